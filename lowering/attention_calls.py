"""Kernels of MLA that a device has: what they take, and the weights around those that attend to the latent itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .run_attention import Attention
from .scratch import Scratch


class AttentionImplementation(Protocol):
    """Kernels for some calls. ``declines`` names what is in the way, or is None where ``run`` will do."""

    name: str

    def declines(self, call: Attention) -> str | None: ...

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in the call's ``out_dtype`` and lse ``[B, H, T]`` in fp32, both contiguous and fresh.

        No size of q and of the cache is 0; a query that sees no token gives 0 and +inf.
        """
        ...


class AttentionGradients(Protocol):
    """Kernels for the gradients of some calls; what none of them takes is the torch executor's."""

    name: str

    def declines(self, call: Attention) -> str | None: ...

    def gradients(
        self, call: Attention, o: Tensor, lse: Tensor, grad_o: Tensor, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Of the ``wanted`` operands, by name, given both results and the gradient of o alone."""
        ...


def not_expanded(call: Attention, name: str, *, without: Sequence[str]) -> str | None:
    """Why kernels for keys and values of every head, which know no operands of ``without``, are not for a call."""
    if call.w_uk is None or call.w_uv is None or call.absorbed:
        return "heads attend to the latent itself"
    given = next((operand for operand in without if getattr(call, operand) is not None), None)
    if given is not None:
        return f"{name} is called without {given}"
    return "causal, and there are more queries than tokens" if call.causal and call.q.shape[1] > call.width else None


def joined(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Both side by side; where they lie side by side already, as they lie."""
    step = first.stride(dim)
    adjacent = second.data_ptr() == first.data_ptr() + first.shape[dim] * step * first.element_size()
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not (adjacent and same and first.stride() == second.stride()):
        return torch.cat([first, second], dim)
    shape = list(first.shape)
    shape[dim] += second.shape[dim]
    return first.as_strided(shape, first.stride(), first.storage_offset())


Attend = Callable[[Attention, Scratch], tuple[Tensor, Tensor]]


def absorb(call: Attention, attend: Attend, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The call through ``attend``, which knows no weights: the query through w_uk before, the result through w_uv.

    Both products accumulate in fp32 and round to the operands' dtype, as the expanded form rounds its keys and values.
    """
    if call.w_uk is None or call.w_uv is None:
        return attend(call, scratch)
    q = heads_through(call.q, call.w_uk, call.q.dtype, scratch)
    o, lse = attend(replace(call, q=q, w_uk=None, w_uv=None, out_dtype=call.q.dtype), scratch)
    return heads_through(o, call.w_uv.mT, call.out_dtype, scratch), lse


def heads_through(x: Tensor, weight: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """``[B, T, H, I]`` times each head's ``[H, I, O]``: ``[B, T, H, O]``, contiguous, without a copy in between."""
    batch, tokens, heads, _ = x.shape
    out = scratch.result((batch, tokens, heads, weight.shape[-1]), x.dtype, x.device)
    scratch.apply(_product, out.flatten(0, 1).transpose(0, 1), x.flatten(0, 1).transpose(0, 1), weight)
    return scratch.cast(out, dtype)


def _product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    torch.bmm(x, weight, out=out)
