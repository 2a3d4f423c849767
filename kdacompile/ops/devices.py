"""Which kernels serve the semantic ops on which device; the device-independent ones take the rest.

CUDA: with 16-bit inputs the operands of matrix products are 16-bit and everything is accumulated in fp32, the state
included; fp32 inputs are computed to fp32 accuracy, or with TF32 where ``torch.set_float32_matmul_precision`` allows
it. Ascend ("PrivateUse1"): an operator of torch_npu or the emitted kernels. Nothing of torch_npu is imported: it
registers its operators with torch when it loads, and until it has there is no device of this type.
"""

from __future__ import annotations

from kdacompile.lowering import cuda
from kdacompile.lowering.ascend import npu
from kdacompile.ops import definitions, mla_cut, on_cpu
from kdacompile.ops.fused import FusedAttention, FusedKernels

on_cpu.KERNELS.serve("CPU")
on_cpu.ATTENTION.serve("CPU")

FusedKernels(cuda.choose, gradients=cuda.choose_adjoint, remember=True).serve("CUDA")
FusedAttention(cuda.choose_attention, cuda.choose_gradients, remember=True).serve("CUDA")
definitions.add_kernel(mla_cut.NAME, "CUDA", mla_cut.fused)

FusedKernels(npu.choose, gradients=npu.choose_adjoint).serve("PrivateUse1")
FusedAttention(npu.choose_attention).serve("PrivateUse1")
