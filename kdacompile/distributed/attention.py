"""MLA's prefill over tokens that lie on several ranks: the latent is gathered, not keys and values.

A token's latent and rotated key are R + D columns for all heads (512 + 64 in DeepSeek-V3), its keys and values
H (N + D + V) (40,960 there). So each rank gathers the latents of all tokens, after norm and RoPE, and expands what its
own queries see block by block, as on one GPU. Gradients of the latents are reduce-scattered, so that each rank gets
those of its own tokens. Queries of a fragment see everything before them: a causal call on the tokens up to its end.
A mask (padding, packed documents) has this rank's queries for its rows and all tokens, in their order, for its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kdacompile.distributed.collectives import gather
from kdacompile.distributed.fragments import ContextParallel
from kdacompile.lowering.operands import tensors
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops import definitions
from kdacompile.ops.errors import ContextParallelError

_REFUSED = ("lengths", "block_table", "schedule")


def parallel_mla(
    operands: Sequence[Tensor | None], options: Mapping[str, Any], context: ContextParallel
) -> tuple[Tensor, Tensor]:
    """o and lse of this rank's queries, from the op's arguments; q, latent and k_rope are this rank's tokens."""
    call, context = Attention(*operands, **options), ContextParallel.checked(context)  # type: ignore[arg-type]
    for name in _REFUSED:
        if getattr(call, name) is not None:
            raise ContextParallelError(problem=f"MLA takes no {name} here")
    if call.q.shape[1] != call.latent.shape[1]:
        raise ContextParallelError(problem="MLA is a prefill here: queries and latents are of the same tokens")
    sizes = [*call.q.shape[:3], call.latent.shape[2]]
    context.check_alike(["B", "T", "H", "R"], sizes, call.q.shape[1], call.q.device)
    latent, k_rope = _every_token(call.latent, call.k_rope, context)
    _check_mask(call, latent.shape[1])
    results = [_fragment(call, options, latent, k_rope, *cut) for cut in _cuts(call, context, latent.shape[1])]
    o, lse = zip(*results, strict=True)
    return (o[0], lse[0]) if len(o) == 1 else (torch.cat(o, 1), torch.cat(lse, 2))


def _check_mask(call: Attention, total: int) -> None:
    mask, here = call.mask, call.q.shape[1]
    if mask is None or (mask.dim() == 4 and mask.shape[2] in (1, here) and mask.shape[3] == total):
        return
    problem = f"mask must be [B | 1, H | 1, {here} | 1, {total}], rows of this rank's queries and columns of all tokens"
    raise ContextParallelError(problem=f"{problem}; got {list(mask.shape)}")


def _every_token(latent: Tensor, k_rope: Tensor | None, context: ContextParallel) -> tuple[Tensor, Tensor | None]:
    """Both of all tokens, in one message if they have one dtype."""
    if k_rope is None or k_rope.dtype != latent.dtype:
        return _gathered(latent, context), None if k_rope is None else _gathered(k_rope, context)
    both = _gathered(torch.cat([latent, k_rope], -1), context)
    return both[..., : latent.shape[-1]], both[..., latent.shape[-1] :]


def _gathered(x: Tensor, context: ContextParallel) -> Tensor:
    return context.fragments.in_order(list(gather(x.contiguous(), context.name, context.ranks).unbind()))


def _cuts(call: Attention, context: ContextParallel, total: int) -> list[tuple[int, int, int]]:
    """Of each fragment: where its queries begin here, how many they are, and up to which token they see."""
    cuts, begin = [], 0
    for start, end in context.fragments.bounds(context.rank, total):
        cuts.append((begin, end - start, end if call.causal else total))
        begin += end - start
    return cuts


def _fragment(
    call: Attention, options: Mapping[str, Any], latent: Tensor, k_rope: Tensor | None, begin: int, count: int, end: int
) -> Any:
    mask = call.mask
    if mask is not None:
        mask = (mask.narrow(2, begin, count) if mask.shape[2] > 1 else mask)[..., :end]
    part = replace(
        call,
        q=call.q.narrow(1, begin, count),
        q_rope=None if call.q_rope is None else call.q_rope.narrow(1, begin, count),
        latent=latent[:, :end],
        k_rope=None if k_rope is None else k_rope[:, :end],
        mask=mask,
    )
    return definitions.mla(*tensors(part), **options)
