"""The semantic ops on CUDA: fused kernels for what they take, the device-independent kernels for the rest.

With 16-bit inputs the operands of matrix products are 16-bit and everything is accumulated in fp32, the state included;
fp32 inputs are computed to fp32 accuracy, or with TF32 where ``torch.set_float32_matmul_precision`` allows it.
"""

from __future__ import annotations

from kdacompile.lowering.cuda import choose, choose_adjoint, choose_attention, choose_gradients
from kdacompile.ops import definitions, mla_cut
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.mla_fused import FusedAttention

FusedKernels(choose, gradients=choose_adjoint, remember=True).serve("CUDA")
FusedAttention(choose_attention, choose_gradients, remember=True).serve("CUDA")
definitions.add_kernel(mla_cut.NAME, "CUDA", mla_cut.fused)
