"""The states at the ends of every rank's fragments, in as many messages as the ranks have binary digits.

An all-gather of affine maps holds ``ranks`` of them on every rank. Here each rank sends one map at a time: after the
step of distance d, it holds the map of the last 2 d ranks up to itself (Hillis and Steele, "Data parallel algorithms",
1986). Fragments are walked in the order of their tokens, or against it for gradients. In the zigzag order both go up
the ranks and down again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.compat.groups import group_of
from kdacompile.distributed.maps import Map, after, folding_dtype, is_diagonal


def entering_by_steps(a: Tensor, written: Tensor, group: str) -> Tensor:
    """The state that enters each of this rank's fragments; a ``[fragments, .., K, K | 1]``, written ``[.., K, V]``."""
    found = _walk(list(zip(a, written, strict=True)), group, up=True)
    return torch.stack([b for _, b in found]).to(written.dtype)


def leaving_by_steps(a: Tensor, asked: Tensor, group: str) -> Tensor:
    """The gradient of the state that leaves each of this rank's fragments, from what each asks of what enters."""
    turned = a if is_diagonal(a, asked) else a.mT
    maps = list(zip(turned, asked, strict=True))[::-1]
    found = _walk(maps, group, up=len(maps) == 2)
    return torch.stack([b for _, b in found][::-1]).to(asked.dtype)


def _walk(maps: Sequence[Map], group: str, *, up: bool) -> list[Map]:
    """For each of this rank's fragments in the order of the walk: the map of all fragments walked before it."""
    process_group = group_of(group)
    rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    place = rank if up else ranks - 1 - rank
    first = maps[0]
    before = _exclusive(first, process_group, place, ranks, up)
    if len(maps) == 1:
        return [before]
    # The walk turns at the last rank, whose second fragment follows its first.
    turn, second = place == ranks - 1, maps[1]
    reached = after(first, before)
    last = _exclusive(after(second, reached) if turn else second, process_group, ranks - 1 - place, ranks, not up)
    return [before, reached if turn else last]


def _exclusive(one: Map, group: dist.ProcessGroup, place: int, ranks: int, up: bool) -> Map:
    """The map of the places before ``place``, from that of every place."""
    dtype, fine = one[1].dtype, folding_dtype(one[1].device)
    total: Map = (one[0].to(fine), one[1].to(fine))
    step = 1
    while step < ranks:
        come = _pass_on(total, group, place, ranks, step, up, dtype)
        total = total if come is None else after(total, come)
        step *= 2
    before = _pass_on(total, group, place, ranks, 1, up, dtype)
    return _identity(total) if before is None else before


def _pass_on(
    one: Map, group: dist.ProcessGroup, place: int, ranks: int, step: int, up: bool, dtype: torch.dtype
) -> Map | None:
    """Send a map ``step`` places on, and return what comes from ``step`` places before; None at the beginning."""
    a, b = one
    message = torch.cat([a, b], -1).to(dtype)
    come = torch.empty_like(message)
    sends, receives = place + step < ranks, place >= step

    def peer(at: int) -> int:
        return dist.get_global_rank(group, at if up else ranks - 1 - at)

    work = [dist.P2POp(dist.isend, message, peer(place + step), group)] if sends else []
    work += [dist.P2POp(dist.irecv, come, peer(place - step), group)] if receives else []
    for request in dist.batch_isend_irecv(work) if work else ():
        request.wait()
    if not receives:
        return None
    width = a.shape[-1]
    return come[..., :width].to(a.dtype), come[..., width:].to(a.dtype)


def _identity(like: Map) -> Map:
    a, b = like
    unit = (
        torch.ones_like(a) if is_diagonal(a, b) else torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    )
    return unit, torch.zeros_like(b)
