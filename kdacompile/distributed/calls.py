"""Linear attention over a rank's tokens, by either method of :class:`.ContextParallel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile.distributed import linear_attention as parallel
from kdacompile.distributed.collectives import exchange, gather, sum_over_ranks
from kdacompile.distributed.fragments import ContextParallel
from kdacompile.distributed.parallel_call import heads_of
from kdacompile.lowering.operands import Operand, dimensions
from kdacompile.ops import definitions
from kdacompile.ops.errors import ContextParallelError
from kdacompile.ops.signature import LINEAR_ATTENTION


def linear_attention(
    operands: Sequence[Tensor | None], options: Mapping[str, Any], context: ContextParallel, *, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """o of this rank's tokens and, if wanted, the final state of whole sequences, from the op's arguments."""
    call, context = LINEAR_ATTENTION.call(*operands, **options), ContextParallel.checked(context)
    _check_ranks(call, context)
    if context.method == "heads":
        return _by_heads(call, options, context, final_state)
    o, part, *_ = parallel.op(*operands, **options, **context.options)
    return o, sum_over_ranks(part, context.name) if final_state else None


def _check_ranks(call: Any, context: ContextParallel) -> None:
    """The sizes and options that every rank must have alike; T only where fragments must be equal."""
    equal = context.order == "zigzag" or context.method == "heads"
    named = {"the number of fragments": context.fragments.per_rank, "B": call.q.shape[0], "H": call.q.shape[2]}
    named |= {"K": call.q.shape[3], "HV": call.v.shape[2], "V": call.v.shape[3]}
    named |= {"the number of sequences": call.sequences, "T": call.q.shape[1] if equal else 0}
    named |= {'method="heads"': context.method == "heads", "delta": call.delta, "steps": bool(context.steps)}
    named |= {"overlap": bool(context.overlap)}
    packed = call.cu_seqlens is not None
    context.check_alike(list(named), list(named.values()), call.q.shape[1], call.q.device, packed=packed)


def _by_heads(
    call: Any, options: Mapping[str, Any], context: ContextParallel, final_state: bool
) -> tuple[Tensor, Tensor | None]:
    ranks, total = context.ranks, context.total_length
    if total is not None and total != call.q.shape[1] * ranks:
        raise ContextParallelError(problem=f'method "heads" needs the same number of tokens on every rank of {ranks}')
    mine = (_of_these_heads(operand, call, context) for operand in LINEAR_ATTENTION.operands)
    o, final = definitions.linear_attention(*mine, **options)
    if not final_state:
        return to_tokens(o, context), None
    return to_tokens(o, context), gather(final, context.name, ranks).movedim(0, 1).flatten(1, 2)


def _of_these_heads(operand: Operand, call: Any, context: ContextParallel) -> Tensor | None:
    """This rank's heads of an operand: of all tokens, or of what all ranks hold."""
    x, layout, ranks = getattr(call, operand.name), operand.text(call), context.ranks
    dim = heads_of(layout)
    if x is None or dim is None:
        return x
    if "T" not in dimensions(layout):
        return x.tensor_split(ranks, dim)[context.rank]
    if x.shape[dim] % ranks and ranks % x.shape[dim] == 0 and operand.name in ("q", "k"):
        x = x.repeat_interleave(ranks // x.shape[dim], dim)  # fewer key heads than ranks: as many copies as it takes
    return to_heads(x, context, operand.name)


# -- over heads --------------------------------------------------------------------------------------------------------
# DeepSpeed Ulysses' exchange (arXiv 2309.14509). What runs in between is the op on whole sequences, so its results are
# those of one rank bit for bit.


def to_heads(x: Tensor, context: ContextParallel, name: str) -> Tensor:
    """``[B, T / ranks, H, ..]`` to ``[B, T, H / ranks, ..]``, tokens in their order."""
    ranks, heads = context.ranks, x.shape[2]
    if heads % ranks:
        raise ContextParallelError(problem=f'method "heads" cannot divide the {heads} heads of {name} by {ranks} ranks')
    parts = exchange(x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous(), context.name)
    return context.fragments.in_order(list(parts.unbind()))


def to_tokens(x: Tensor, context: ContextParallel) -> Tensor:
    """``[B, T, H / ranks, ..]`` to ``[B, T / ranks, H, ..]``: the inverse."""
    fragments = context.fragments
    shards = [fragments.shard(x, rank) for rank in range(context.ranks)]
    parts = exchange(torch.stack(shards), context.name)
    return parts.movedim(0, 2).flatten(2, 3)
