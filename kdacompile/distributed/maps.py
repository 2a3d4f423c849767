"""Affine maps of states: what a run of tokens does to the state that comes in.

    S_out = A S_in + B        (A1, B1) after (A0, B0) = (A1 A0, A1 B0 + B1)

A is the product of the tokens' transitions ``(I - beta k k^T) diag(exp g)``: ``[K, K]``, or without the delta rule a
diagonal, kept as ``[K, 1]``. B is the state that the tokens leave behind if none came in. Gradients go the other way,
``dS_in = A^T dS_out + dS_0``, where ``dS_0`` is what the outputs of the run ask of the state that came in
(the carry's ``combine`` in :mod:`kdacompile.lowering.linear_attention`; arXiv 2510.26692, section 3).

States cross ranks as float32 at least, and are folded in float64 where the device has it: products of float32 matrices
would be rounded to TF32 wherever the user allowed it for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.compat.groups import group_of

Map = tuple[Tensor, Tensor]
"""A ``[.., K, K]`` or a diagonal ``[.., K, 1]``, and B ``[.., K, V]``."""


def apply(a: Tensor, state: Tensor) -> Tensor:
    """``A S``: a ``[.., K, K]`` or a diagonal ``[.., K, 1]``, state ``[.., K, V]``."""
    return a * state if is_diagonal(a, state) else a @ state


def pull_back(a: Tensor, grad: Tensor) -> Tensor:
    """``A^T dS``."""
    return a * grad if is_diagonal(a, grad) else a.mT @ grad


def is_diagonal(a: Tensor, state: Tensor) -> bool:
    return a.shape[-1] == 1 and state.shape[-2] != 1


def entering(maps: Tensor, written: Tensor, wanted: Sequence[int], first: Tensor | None = None) -> Tensor:
    """The states that enter the ``wanted`` of G runs that follow each other, their numbers in order.

    maps ``[G, .., K, K | 1]``, written ``[G, .., K, V]``; first: what enters the first one, or None for nothing.
    """
    return torch.stack(_folded(apply, maps.unbind(), written.unbind(), first, wanted))


def leaving(maps: Tensor, asked: Tensor, wanted: Sequence[int], last: Tensor | None = None) -> Tensor:
    """The gradients of the states that leave the ``wanted`` of G runs, number -1 the one before all; asked
    ``[G, .., K, V]`` is ``dS_0`` of each.

    last: the gradient of what leaves the last one, or None for nothing.
    """
    steps = [len(asked) - 1 - number for number in reversed(wanted)]
    return torch.stack(_folded(pull_back, maps.unbind()[::-1], asked.unbind()[::-1], last, steps)[::-1])


def _folded(
    function: Callable[[Tensor, Tensor], Tensor],
    maps: Sequence[Tensor],
    added: Sequence[Tensor],
    first: Tensor | None,
    wanted: Sequence[int],
) -> list[Tensor]:
    """``x`` before the wanted steps of ``x -> function(map, x) + added``; the step from no x is no operation."""
    fine = folding_dtype(added[0].device)
    states = [first]
    for a, b in zip(maps[: wanted[-1]], added[: wanted[-1]], strict=True):
        x = states[-1]
        states.append(b if x is None else function(a.to(fine), x.to(fine)) + b.to(fine))
    found = [states[number] for number in wanted]
    return [torch.zeros_like(added[0]) if x is None else x.to(added[0].dtype) for x in found]


def after(later: Map, earlier: Map) -> Map:
    """``(A1, B1)`` after ``(A0, B0)``."""
    (a1, b1), (a0, b0) = later, earlier
    a1, b1 = a1.to(a0.dtype), b1.to(a0.dtype)
    return (a1 * a0 if is_diagonal(a1, b1) else a1 @ a0), apply(a1, b0) + b1


def folding_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


# -- in steps ----------------------------------------------------------------------------------------------------------
# An all-gather of affine maps holds ``ranks`` of them on every rank. Here each rank sends one map at a time: after
# the step of distance d, it holds the map of the last 2 d ranks up to itself (Hillis and Steele, "Data parallel
# algorithms", 1986). Fragments are walked in the order of their tokens, or against it for gradients. In the zigzag
# order both go up the ranks and down again. They yield while a message is on its way.


def entering_by_steps(a: Tensor, written: Tensor, group: str) -> Generator[None, None, Tensor]:
    """The state that enters each of this rank's fragments; a ``[fragments, .., K, K | 1]``, written ``[.., K, V]``."""
    found = yield from _walk(list(zip(a, written, strict=True)), group, up=True)
    return torch.stack([b for _, b in found]).to(written.dtype)


def leaving_by_steps(a: Tensor, asked: Tensor, group: str) -> Generator[None, None, Tensor]:
    """The gradient of the state that leaves each of this rank's fragments, from what each asks of what enters."""
    turned = a if is_diagonal(a, asked) else a.mT
    maps = list(zip(turned, asked, strict=True))[::-1]
    found = yield from _walk(maps, group, up=len(maps) == 2)
    return torch.stack([b for _, b in found][::-1]).to(asked.dtype)


def _walk(maps: Sequence[Map], group: str, *, up: bool) -> Generator[None, None, list[Map]]:
    """For each of this rank's fragments in the order of the walk: the map of all fragments walked before it."""
    process_group = group_of(group)
    rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    place = rank if up else ranks - 1 - rank
    first = maps[0]
    before = yield from _exclusive(first, process_group, place, ranks, up)
    if len(maps) == 1:
        return [before]
    # The walk turns at the last rank, whose second fragment follows its first.
    turn, second = place == ranks - 1, maps[1]
    reached = after(first, before)
    second = after(second, reached) if turn else second
    last = yield from _exclusive(second, process_group, ranks - 1 - place, ranks, not up)
    return [before, reached if turn else last]


def _exclusive(one: Map, group: dist.ProcessGroup, place: int, ranks: int, up: bool) -> Generator[None, None, Map]:
    """The map of the places before ``place``, from that of every place."""
    dtype, fine = one[1].dtype, folding_dtype(one[1].device)
    total: Map = (one[0].to(fine), one[1].to(fine))
    step = 1
    while step < ranks:
        come = yield from _pass_on(total, group, place, ranks, step, up, dtype)
        total = total if come is None else after(total, come)
        step *= 2
    before = yield from _pass_on(total, group, place, ranks, 1, up, dtype)
    return _identity(total) if before is None else before


def _pass_on(
    one: Map, group: dist.ProcessGroup, place: int, ranks: int, step: int, up: bool, dtype: torch.dtype
) -> Generator[None, None, Map | None]:
    """Send a map ``step`` places on, and return what comes from ``step`` places before; None at the beginning."""
    a, b = one
    message = torch.cat([a, b], -1).to(dtype)
    come = torch.empty_like(message)
    sends, receives = place + step < ranks, place >= step

    def peer(at: int) -> int:
        return dist.get_global_rank(group, at if up else ranks - 1 - at)

    work = [dist.P2POp(dist.isend, message, peer(place + step), group)] if sends else []
    work += [dist.P2POp(dist.irecv, come, peer(place - step), group)] if receives else []
    requests = dist.batch_isend_irecv(work) if work else ()
    yield
    for request in requests:
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
