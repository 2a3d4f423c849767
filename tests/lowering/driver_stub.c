// A CUDA driver without a device, as far as Triton needs one: modules load, launches are handed to whoever asked.
#include "cuda.h"
#include <stdint.h>
#include <string.h>

typedef void (*Listener)(const CUlaunchConfig *, CUfunction, void **);
static Listener listener;
static uintptr_t functions = 0x1000;

void stub_listen(Listener heard) { listener = heard; }

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "stub"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)(functions += 16);
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
  *(CUdeviceptr *)data = address;
  return CUDA_SUCCESS;
}

static uint64_t mixed(uint64_t hash, const void *data, size_t bytes) {
  for (const unsigned char *c = data; bytes--; ++c) hash = (hash ^ *c) * 1099511628211u;
  return hash;
}

// The map begins with the address, then a hash of everything else.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  int options[] = {type, rank, interleave, swizzle, promotion, fill};
  uint64_t hash = mixed(14695981039346656037u, options, sizeof options);
  hash = mixed(mixed(hash, sizes, 8 * rank), strides, 8 * (rank - 1));
  hash = mixed(mixed(hash, box, 4 * rank), steps, 4 * rank);
  memset(map, 0, sizeof *map);
  ((uint64_t *)map)[0] = (uint64_t)address;
  ((uint64_t *)map)[1] = hash;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  ((uint64_t *)map)[0] = (uint64_t)address;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  if (listener) listener(config, f, parameters);
  return CUDA_SUCCESS;
}
