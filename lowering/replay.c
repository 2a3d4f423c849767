// A run of launches as it was remembered, on other addresses. See replay.py for what a program consists of.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

// As in cuda.h: both are part of the driver's binary interface.
struct attribute { uint32_t id, unused; uint64_t value[8]; };
struct config {
  uint32_t grid[3], block[3], shared;
  void *stream;
  struct attribute *attributes;
  uint32_t count;
};
enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6, MAP_BYTES = 64 };

struct header { uint64_t function; uint32_t grid[3], threads, shared, dependent, parameters, places, bytes, unused; };
struct place { uint32_t at; int32_t source; int64_t before; };  // source: ~ of the one whose address a tensor map has

typedef int (*launch_function)(const struct config *, void *, void **, void **);
typedef int (*replace_function)(void *, void *);
static launch_function launch;
static replace_function replace;

int load(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!driver) return 0;
  launch = (launch_function)dlsym(driver, "cuLaunchKernelEx");
  replace = (replace_function)dlsym(driver, "cuTensorMapReplaceAddress");
  return launch && replace;
}

int replay(const uint8_t *program, int launches, const uint64_t *addresses, void *stream) {
  for (; launches > 0; --launches) {
    const struct header *header = (const struct header *)program;
    const struct place *places = (const struct place *)(header + 1);
    const uint32_t *offsets = (const uint32_t *)(places + header->places);
    const uint8_t *values = (const uint8_t *)(offsets + (header->parameters + 1) / 2 * 2);
    program = values + header->bytes;
    // A copy, or two threads could not launch at once.
    uint8_t room[header->bytes + MAP_BYTES];
    uint8_t *held = (uint8_t *)(((uintptr_t)room + MAP_BYTES - 1) & ~(uintptr_t)(MAP_BYTES - 1));
    memcpy(held, values, header->bytes);
    for (uint32_t n = 0; n < header->places; ++n) {
      int32_t source = places[n].source;
      uint64_t address = addresses[source < 0 ? ~source : source] + places[n].before;
      int error = 0;
      if (source < 0) error = replace(held + places[n].at, (void *)address);
      else memcpy(held + places[n].at, &address, 8);
      if (error) return error;
    }
    void *parameters[header->parameters + 1];
    for (uint32_t n = 0; n < header->parameters; ++n) parameters[n] = held + offsets[n];
    struct attribute dependent = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, {1}};
    struct config config = {
        {header->grid[0], header->grid[1], header->grid[2]}, {header->threads, 1, 1}, header->shared,
        stream, &dependent, header->dependent};
    int error = launch(&config, (void *)header->function, parameters, 0);
    if (error) return error;
  }
  return 0;
}
