"""The device-independent kernels of the MLA ops, and their fakes. Outputs are contiguous and own their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kdacompile.lowering.attention_backward import NAMES, run_attention_backward
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.ops.errors import PagedCacheError
from kdacompile.ops.mla_checks import check_mla

_Operand = Tensor | None


def mla_kernel(
    q: Tensor,
    q_rope: _Operand,
    latent: Tensor,
    k_rope: _Operand,
    w_uk: _Operand,
    w_uv: _Operand,
    mask: _Operand,
    sinks: _Operand,
    lengths: _Operand,
    block_table: _Operand,
    *,
    scale: float,
    causal: bool,
    form: str,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """``kdacompile::mla``."""
    operands = (q, q_rope, latent, k_rope, w_uk, w_uv, mask, sinks, lengths, block_table)
    check_mla(*operands, form=form)
    return execute(Attention(*operands, scale, causal, form, q.dtype if out_dtype is None else out_dtype))


def execute(call: Attention) -> tuple[Tensor, Tensor]:
    """A checked call on the torch executor."""
    o, lse = run_attention(call)
    return o.to(call.out_dtype).contiguous(), lse.contiguous()


def mla_fake(
    q: Tensor,
    q_rope: _Operand,
    latent: Tensor,
    k_rope: _Operand,
    w_uk: _Operand,
    w_uv: _Operand,
    *others: _Operand,
    scale: float,
    causal: bool,
    form: str,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    check_mla(q, q_rope, latent, k_rope, w_uk, w_uv, *others, form=form, symbolic=True)
    batch, tokens, heads, width = q.shape
    value = width if w_uv is None else w_uv.shape[1]
    o = q.new_empty((batch, tokens, heads, value), dtype=q.dtype if out_dtype is None else out_dtype)
    wide = torch.float64 in (q.dtype, latent.dtype)
    return o, q.new_empty((batch, heads, tokens), dtype=torch.float64 if wide else torch.float32)


def mla_backward_kernel(
    grad_o: _Operand,
    grad_lse: _Operand,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    q_rope: _Operand,
    latent: Tensor,
    k_rope: _Operand,
    w_uk: _Operand,
    w_uv: _Operand,
    mask: _Operand,
    sinks: _Operand,
    lengths: _Operand,
    block_table: _Operand,
    *,
    scale: float,
    causal: bool,
    form: str,
    wanted: list[bool],
) -> list[Tensor]:
    """``kdacompile::mla_backward``: one gradient for each wanted tensor, in its dtype."""
    if block_table is not None:
        raise PagedCacheError(problem="a paged cache has no gradients: gather it, or detach what reads it")
    operands = (q, q_rope, latent, k_rope, w_uk, w_uv, mask, sinks, lengths, block_table)
    call = Attention(*operands, scale, causal, form, o.dtype)
    return gradients_of(operands, wanted, lambda names: run_attention_backward(call, o, lse, grad_o, grad_lse, names))


def gradients_of(
    operands: Sequence[_Operand], wanted: list[bool], compute: Callable[[list[str]], dict[str, Tensor]]
) -> list[Tensor]:
    """What ``compute`` gives for the wanted operands, in their order and dtypes."""
    likes = {name: x for name, x, want in zip(NAMES, operands, wanted, strict=False) if want and x is not None}
    gradients = compute(list(likes))
    return [gradients[name].to(like.dtype).contiguous() for name, like in likes.items()]


def mla_backward_fake(
    grad_o: _Operand, grad_lse: _Operand, o: Tensor, lse: Tensor, *tensors: _Operand, wanted: list[bool], **_: object
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, want in zip(tensors, wanted, strict=False) if want and x is not None]
