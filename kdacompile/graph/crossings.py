"""How far out the lines cross on which a region's comparisons of positions turn.

Two comparisons that have each come out both ways may be true together at larger sizes only: ``i >= 2 * j`` and
``j > 100`` are so for a pair of positions from 203 tokens on. The line of a comparison is
``steps . index + offset = 0`` with whole steps, the largest of them s. Two lines that are not parallel cross within
|offset| s' + |offset'| s (Cramer's rule: the determinant of whole numbers is at least 1), and what lies between them
has a position within 2 (s + s') of there, since a parallelogram of whole sides has one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from kdacompile.graph.positions import Edge


@dataclass(frozen=True)
class Line:
    """Where a comparison turns, in whole steps without a common divisor."""

    steps: tuple[tuple[int, int], ...]
    """Dimensions that grow, counted from the last, with their steps; the first one is positive."""
    offset: float
    """How far from zero it may be where the indices of all of these are zero."""
    stretch: float
    """How much a size grows for one index more."""

    @property
    def steepest(self) -> int:
        return max(abs(step) for _, step in self.steps)

    def reach(self, other: Line) -> int:
        """A size beyond all that is new where the two cross; 0 if that is not far out."""
        one, two = self.steepest, other.steepest
        if self.steps == other.steps and (one == 1 or len(self.steps) == 1):  # parallel, also where one is transposed
            return 0
        if one == two == 1 and min(self.offset, other.offset) <= 1:
            return 0
        index = self.offset * two + other.offset * one + 2 * (one + two)
        return math.ceil(index * max(self.stretch, other.stretch))


def line_of(edge: Edge, there: Edge, before: Mapping[Any, int], after: Mapping[Any, int]) -> Line | None:
    """The line of a comparison, which is ``there`` at sizes ``after``; None if none of its dimensions grow."""
    rank = len(edge.shape)
    grows = [dim for dim in range(rank) if edge.shape[dim] != there.shape[dim] and edge.steps[dim]]
    if not grows:
        return None
    fine = math.lcm(*(edge.steps[dim].denominator for dim in grows))
    whole = [int(edge.steps[dim] * fine) for dim in grows]
    common = math.gcd(*whole) * (1 if whole[0] > 0 else -1)
    fixed = sum(abs(edge.steps[dim]) * (edge.shape[dim] - 1) for dim in range(rank) if dim not in grows)
    return Line(
        tuple((dim - rank, step // common) for dim, step in zip(grows, whole, strict=True)),
        (abs(edge.offset) + float(fixed)) * fine / abs(common),
        max(_stretch(edge.shape[dim], there.shape[dim], before, after) for dim in grows),
    )


def _stretch(here: int, there: int, before: Mapping[Any, int], after: Mapping[Any, int]) -> float:
    if any(size == here and after[symbol] == there for symbol, size in before.items()):
        return 1.0
    return max(1.0, *(abs((after[symbol] - size) / (there - here)) for symbol, size in before.items()))


def beyond_crossings(lines: Iterable[Line]) -> int:
    """The size beyond all that is new where two of the lines cross; 0 if that is not far out."""
    farthest: dict[Any, Line] = {}
    for line in lines:
        known = farthest.setdefault(line.steps, line)
        farthest[line.steps] = Line(line.steps, max(line.offset, known.offset), max(line.stretch, known.stretch))
    pairs: Collection[tuple[Line, Line]] = list(combinations_with_replacement(farthest.values(), 2))
    return max((one.reach(other) for one, other in pairs), default=0)
