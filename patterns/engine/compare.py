"""Two computations of one function in float64: how close they are, and how they are run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

TOLERANCE = 1e-8
"""Relative error per token, in float64, up to which two computations count as the same function."""

PRECISE = 1e-12
"""The same where nothing but numbers speaks for them. Spellings of one function differ by 1e-13 at most, and by 2e-12
under strong gates, which make what is left of a number small.
"""


def token_error(have: Tensor, want: Tensor) -> float:
    """Largest relative error of a token [B, T, ...] where ``have`` is finite; tokens far below the rest count less."""
    finite = torch.isfinite(have)
    if not finite.any():
        return float("inf")
    gap = torch.where(finite, have - want, 0.0).flatten(2).norm(dim=-1)
    size = want.flatten(2).norm(dim=-1)
    floor = 1e-6 * size.square().mean().sqrt() + 1e-30
    return float((gap / (size + floor)).max())


@contextmanager
def one_thread() -> Generator[None]:
    """Probes are many small operators: waking other threads for each costs more than it brings, tenfold on a busy
    machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
