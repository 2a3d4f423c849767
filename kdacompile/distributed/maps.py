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

from collections.abc import Sequence

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


def entering(maps: Tensor, written: Tensor, initial: Tensor | None, wanted: Sequence[int]) -> Tensor:
    """The states that enter the ``wanted`` of G runs that follow each other, their numbers in order.

    maps ``[G, .., K, K | 1]``, written ``[G, .., K, V]``, initial ``[.., K, V]`` or None for zeros.
    """
    fine, first = folding_dtype(written.device), written[0] if initial is None else initial
    states = [torch.zeros_like(first, dtype=fine) if initial is None else first.to(fine)]
    for a, b in zip(maps[: wanted[-1]], written[: wanted[-1]], strict=True):
        states.append(apply(a.to(fine), states[-1]) + b.to(fine))
    return torch.stack([states[number] for number in wanted]).to(written.dtype)


def leaving(maps: Tensor, asked: Tensor, wanted: Sequence[int]) -> Tensor:
    """The gradients of the states that leave the ``wanted`` of G runs; asked ``[G, .., K, V]`` is ``dS_0`` of each."""
    fine, behind = folding_dtype(asked.device), wanted[0] + 1
    grads = [torch.zeros_like(asked[0], dtype=fine)]
    for a, b in zip(reversed(maps[behind:].unbind()), reversed(asked[behind:].unbind()), strict=True):
        grads.append(pull_back(a.to(fine), grads[-1]) + b.to(fine))
    return torch.stack([grads[len(asked) - 1 - number] for number in wanted]).to(asked.dtype)


def after(later: Map, earlier: Map) -> Map:
    """``(A1, B1)`` after ``(A0, B0)``."""
    (a1, b1), (a0, b0) = later, earlier
    a1, b1 = a1.to(a0.dtype), b1.to(a0.dtype)
    return (a1 * a0 if is_diagonal(a1, b1) else a1 @ a0), apply(a1, b0) + b1


def folding_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
