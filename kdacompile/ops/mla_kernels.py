"""The device-independent kernels of the MLA ops. Outputs are contiguous and own their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kdacompile.lowering.attention_backward import run_attention_backward
from kdacompile.lowering.operands import given
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.ops.errors import PagedCacheError
from kdacompile.ops.signature import MLA


def run_mla(call: Attention) -> tuple[Tensor, Tensor]:
    """``kdacompile::mla`` of a checked call, on the torch executor."""
    o, lse = run_attention(call)
    return o.to(call.out_dtype).contiguous(), lse.contiguous()


def mla_backward_kernel(*arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
    """``kdacompile::mla_backward``: one gradient for each wanted tensor, in its dtype."""
    (grad_o, grad_lse, o, lse), operands = MLA.of_backward(arguments)
    call = Attention(*operands, **options, out_dtype=o.dtype)
    if call.block_table is not None:
        raise PagedCacheError(problem="a paged cache has no gradients: gather it, or detach what reads it")
    return gradients_of(call, wanted, lambda names: run_attention_backward(call, o, lse, grad_o, grad_lse, names))


def gradients_of(
    call: Attention, wanted: Sequence[bool], compute: Callable[[list[str]], dict[str, Tensor]]
) -> list[Tensor]:
    """What ``compute`` gives for the wanted operands, in their order and dtypes."""
    asked = {operand.name for operand, want in zip(MLA.operands, wanted, strict=False) if want}
    likes = {name: x for name, x in given(call).items() if name in asked}
    gradients = compute(list(likes))
    return [gradients[name].to(like.dtype).contiguous() for name, like in likes.items()]
