"""How a value lies in memory, be its sizes fixed or open, and what a copy in some order of dimensions would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kdacompile import compat


def order(want: torch.Tensor) -> list[int]:
    """Dimensions, those that are farthest apart in memory first."""
    return sorted(range(want.dim()), key=lambda d: (-compat.size_hint(want.stride(d)), d))


def packed(want: torch.Tensor) -> list[Any]:
    """The strides of a copy without gaps in this order of dimensions."""
    found, run = list[Any](want.stride()), 1
    for dim in reversed(order(want)):
        found[dim], run = run, run * want.shape[dim]
    return found


def has_gaps(want: torch.Tensor) -> bool:
    """Whether ``want`` lies otherwise than such a copy at some of its sizes."""
    pairs = zip(want.shape, want.stride(), packed(want), strict=True)
    return any(not compat.is_one(size) and not compat.alike(own, dense) for size, own, dense in pairs)


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether both have the same strides wherever a dimension has more than one entry."""
    pairs = zip(want.shape, have.stride(), want.stride(), strict=True)
    return all(compat.is_one(size) or str(ours) == str(theirs) for size, ours, theirs in pairs)


def like_channels(x: torch.Tensor, steps: Sequence[Any] | None = None) -> bool:
    """Whether torch takes the second dimension of ``x`` (with the strides ``steps``) for the innermost, as it does
    before ``cat`` and ``roll`` choose how their results lie: strides of dimensions of size one decide that too.
    """
    if x.dim() not in (4, 5):
        return False
    sizes, found = ([int(compat.size_hint(n)) for n in numbers] for numbers in (x.shape, steps or x.stride()))
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if found[dim] < least or found[1] == 0 or (dim == 0 and least == found[1]):
            return False
        least = found[dim] * sizes[dim]
    return True
