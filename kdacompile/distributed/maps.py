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

import torch
from torch import Tensor


def apply(a: Tensor, state: Tensor) -> Tensor:
    """``A S``: a ``[.., K, K]`` or a diagonal ``[.., K, 1]``, state ``[.., K, V]``."""
    return a * state if is_diagonal(a, state) else a @ state


def pull_back(a: Tensor, grad: Tensor) -> Tensor:
    """``A^T dS``."""
    return a * grad if is_diagonal(a, grad) else a.mT @ grad


def is_diagonal(a: Tensor, state: Tensor) -> bool:
    return a.shape[-1] == 1 and state.shape[-2] != 1


def entering(maps: Tensor, written: Tensor, initial: Tensor | None) -> list[Tensor]:
    """The state that enters each of G runs that follow each other.

    maps ``[G, .., K, K | 1]``, written ``[G, .., K, V]``, initial ``[.., K, V]`` or None for zeros.
    """
    dtype, fine = written.dtype, folding_dtype(written.device)
    state = torch.zeros_like(written[0], dtype=fine) if initial is None else initial.to(fine)
    found = []
    for a, b in zip(maps, written, strict=True):
        found.append(state.to(dtype))
        state = apply(a.to(fine), state) + b.to(fine)
    return found


def leaving(maps: Tensor, asked: Tensor) -> list[Tensor]:
    """The gradient of the state that leaves each of G runs, from ``dS_0`` of each, ``asked`` ``[G, .., K, V]``."""
    dtype, fine = asked.dtype, folding_dtype(asked.device)
    grad = torch.zeros_like(asked[0], dtype=fine)
    found = []
    for a, b in zip(reversed(maps.unbind()), reversed(asked.unbind()), strict=True):
        found.append(grad.to(dtype))
        grad = pull_back(a.to(fine), grad) + b.to(fine)
    return found[::-1]


def folding_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
