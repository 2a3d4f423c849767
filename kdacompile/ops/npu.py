"""The semantic ops on an Ascend NPU: an operator of torch_npu or the emitted kernels, else the device-independent ones.

Nothing of torch_npu is imported: it registers its operators with torch when it loads, and until it has there is no
device of this type.
"""

from __future__ import annotations

from kdacompile.lowering.ascend.npu import choose, choose_attention
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.mla_fused import FusedAttention

FusedKernels(choose).serve("PrivateUse1")
FusedAttention(choose_attention).serve("PrivateUse1")
