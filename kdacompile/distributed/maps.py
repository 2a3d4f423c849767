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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
