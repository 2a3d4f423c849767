"""Short causal convolutions over tokens that lie on several ranks: a halo of ``width - 1`` tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.distributed.collectives import pass_on
from kdacompile.distributed.fragments import ContextParallel
from kdacompile.ops.errors import ContextParallelError, OptionError, RankError, SizeError

ACTIVATIONS = {None: lambda y: y, "silu": F.silu, "swish": F.silu}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    context_parallel: ContextParallel,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The depthwise causal convolution before linear attention, under context parallelism::

        y_t = act(bias + sum_j weight[:, width - 1 - j] x_{t - j})        j = 0 .. width - 1

    with x of tokens before the first one, or of another sequence, taken as 0.

    Args:
        x: ``[B, T, C]``, this rank's tokens.
        weight: ``[C, width]``, as ``torch.nn.Conv1d``'s ``[C, 1, width]`` without its middle dimension.
        bias: ``[C]``.
        context_parallel: where tokens lie. Every fragment but the last needs ``width - 1`` tokens.
        activation: None, "silu" or "swish".
        cu_seqlens: ``[N + 1]``, the bounds of whole sequences packed along T (B must be 1), the same on every rank.

    Returns:
        ``[B, T, C]`` in the dtype that x, weight and bias promote to. The gradients of weight and bias are this rank's
        share.

    Raises:
        ContextParallelError: fragments that are too short; kdacompile.ops.errors.OpError: shapes that do not fit.
    """
    width = _check(x, weight, bias, activation)
    sizes, packed = [x.shape[0], x.shape[2], width], cu_seqlens is not None
    held = context_parallel.check_alike(["B", "C", "the width"], sizes, x.shape[1], x.device, packed=packed)
    context_parallel.fragments.check_halves(x.shape[1])
    parts = x.unflatten(1, (context_parallel.fragments.per_rank, -1))  # [B, fragments, T, C]
    length = parts.shape[2]
    if _too_short(context_parallel, held, length, width):
        problem = f"a convolution of width {width} needs {width - 1} tokens in each fragment, got {length}"
        raise ContextParallelError(problem=problem)
    if width > 1:
        tails = F.pad(parts, (0, 0, max(width - 1 - length, 0), 0))[:, :, -(width - 1) :]
        halos = pass_on(tails.transpose(0, 1).contiguous(), context_parallel.name, True).transpose(0, 1)
        parts = torch.cat([halos, parts], 2)  # [B, fragments, width - 1 + T, C]
    y = _taps(parts, weight, _same_sequence(cu_seqlens, context_parallel, x.shape[1], width))
    y = y.flatten(1, 2)
    return ACTIVATIONS[activation](y if bias is None else y + bias)


def _taps(x: Tensor, weight: Tensor, seen: list[Tensor] | None) -> Tensor:
    """``sum_j weight[:, width - 1 - j] x_{t - j}``; ``seen[j]`` says whether token t - j counts."""
    width, length = weight.shape[1], x.shape[2] - weight.shape[1] + 1
    y = x[:, :, width - 1 :] * weight[:, width - 1]
    for j in range(1, width):
        before = x.narrow(2, width - 1 - j, length)
        y = y + (before if seen is None else torch.where(seen[j], before, 0)) * weight[:, width - 1 - j]
    return y


def _same_sequence(cu_seqlens: Tensor | None, context: ContextParallel, here: int, width: int) -> list[Tensor] | None:
    """For each j, ``[fragments, T, 1]``: whether token t - j belongs to the sequence of token t."""
    if cu_seqlens is None:
        return None
    fragments, total = context.fragments, context.total_length or here * context.ranks
    bounds = cu_seqlens.to(torch.int64)
    spans = fragments.bounds_here(context.rank, total, here)
    tokens = torch.stack([torch.arange(start, end, device=bounds.device) for start, end in spans])
    sequence = torch.bucketize(tokens, bounds, right=True)
    return [(torch.bucketize(tokens - j, bounds, right=True) == sequence).unsqueeze(-1) for j in range(width)]


def _too_short(context: ContextParallel, held: Sequence[int] | None, length: int, width: int) -> bool:
    """Whether a halo would reach over a whole fragment; alike on all ranks, where their tokens are known.

    Before the second fragment there is nothing to reach. The last ranks of the contiguous order may have fewer tokens.
    """
    total, fragments = context.total_length, context.fragments
    if held is None and total is None:
        return length < width - 1 and fragments.count > 2 and fragments.held_by(context.rank) != (fragments.count - 1,)
    if held is None:
        spans = (fragments.bounds(rank, total or 0) for rank in range(context.ranks))
        held = [sum(end - start for start, end in some) for some in spans]
    sizes = held if fragments.per_rank == 1 else [held[0] // 2] * fragments.count
    return any(size < width - 1 and any(sizes[:n]) and any(sizes[n + 1 :]) for n, size in enumerate(sizes))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    if x.dim() != 3:
        raise RankError(name="x", expected=3, layout="[B, T, C]", actual=tuple(x.shape))
    if weight.dim() != 2:
        raise RankError(name="weight", expected=2, layout="[C, width]", actual=tuple(weight.shape))
    channels, width = x.shape[2], weight.shape[1]
    if weight.shape[0] != channels:
        raise SizeError(name="weight", expected=(channels, width), layout="[C, width]", actual=tuple(weight.shape))
    if bias is not None and tuple(bias.shape) != (channels,):
        raise SizeError(name="bias", expected=(channels,), layout="[C]", actual=tuple(bias.shape))
    if activation not in ACTIVATIONS:
        raise OptionError(name="activation", expected='None, "silu" or "swish"', actual=activation)
    return width
