"""MLA as torch library ops: ``kdacompile::mla`` and ``kdacompile::mla_backward``.

One op serves prefill and decoding, contiguous and paged caches, the expanded and the absorbed form: which of the two
runs is decided by its kernel, from the sizes of the call.
"""

from __future__ import annotations

from kdacompile.ops import autograd, mla_kernels
from kdacompile.ops.definitions import backend_kernels, define, register

_OPERANDS = (
    "Tensor q, Tensor? q_rope, Tensor latent, Tensor? k_rope, Tensor? w_uk, Tensor? w_uv, Tensor? mask, Tensor? sinks, "
    "Tensor? lengths, Tensor? block_table"
)
_OPTIONS = "float scale, bool causal, str form"

mla = define(
    "mla",
    f"({_OPERANDS}, *, {_OPTIONS}, ScalarType? out_dtype) -> (Tensor o, Tensor lse)",
    mla_kernels.mla_kernel,
    mla_kernels.mla_fake,
)
mla_backward = define(
    "mla_backward",
    f"(Tensor? grad_o, Tensor? grad_lse, Tensor o, Tensor lse, {_OPERANDS}, *, {_OPTIONS}, bool[] wanted) -> Tensor[]",
    mla_kernels.mla_backward_kernel,
    mla_kernels.mla_backward_fake,
)
register("mla", autograd.functional_autograd(mla, mla_backward, backend_kernels("mla"), keeps_results=True))
register("mla_backward", autograd.backward_autograd(mla_backward))
