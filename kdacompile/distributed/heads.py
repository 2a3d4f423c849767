"""All-to-all between a rank's tokens of all heads and all tokens of a rank's heads.

DeepSpeed Ulysses' exchange (arXiv 2309.14509). What runs in between is the op on whole sequences, so its results are
those of one rank bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.distributed.collectives import exchange
from kdacompile.distributed.context import ContextParallel
from kdacompile.ops.errors import ContextParallelError


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
