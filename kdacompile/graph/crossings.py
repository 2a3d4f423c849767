"""How far out the lines cross on which a region's comparisons of positions turn.

Two comparisons that have each come out both ways may be true together at larger sizes only: ``i >= 2 * j`` and
``j > 100`` are so for a pair of positions from 203 tokens on. The line of a comparison is
``steps . index + offset = 0`` with whole steps, the largest of them s. Two lines that are not parallel cross within
|offset| s' + |offset'| s (Cramer's rule: the determinant of whole numbers is at least 1), and what lies between them
has a position within 2 (s + s') of there, since a parallelogram of whole sides has one.

Comparisons follow each other as well: where token i sees k, k sees j, and each must be 100 tokens later than the other,
nothing is seen before 202 tokens; the sixth square of a strict triangle is nothing before 65. So what lies between the
tokens of a value adds up, wherever values are multiplied or picked by each other, and slopes multiply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

from kdacompile.graph.ir import Op, Value
from kdacompile.graph.positions import Edge
from kdacompile.patterns.engine.vocabulary import SOLVES

_NEAR = 2.0
"""Offsets of lines among the first tokens."""

_SUMS = frozenset("add sub rsub cat stack maximum minimum".split())
"""Operators that have, between tokens, what one of their operands has."""


@dataclass(frozen=True)
class Line:
    """Where a comparison turns, in whole steps without a common divisor."""

    steps: tuple[tuple[int, int], ...]
    """Dimensions that grow, counted from the last, with their steps for one more of a size; the first is positive."""
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
        if one == two == 1 and min(self.offset, other.offset) <= _NEAR:
            return 0
        between = 2 * (one + two) * max(self.stretch, other.stretch)
        return math.ceil(self.offset * two + other.offset * one + between)


def line_of(edge: Edge, there: Edge, before: Mapping[Any, int], after: Mapping[Any, int]) -> Line | None:
    """The line of a comparison, which is ``there`` at sizes ``after``; None if none of its dimensions grow."""
    rank, grows = len(edge.shape), _growing(edge, there)
    if not grows:
        return None
    stretches = [_stretch(edge.shape[dim], there.shape[dim], before, after) for dim in grows]
    steps = [edge.steps[dim] / stretch for dim, stretch in zip(grows, stretches, strict=True)]
    fine = math.lcm(*(step.denominator for step in steps))
    whole = [int(step * fine) for step in steps]
    common = math.gcd(*whole) * (1 if whole[0] > 0 else -1)
    fixed = sum(abs(edge.steps[dim]) * (edge.shape[dim] - 1) for dim in range(rank) if dim not in grows)
    return Line(
        tuple((dim - rank, step // common) for dim, step in zip(grows, whole, strict=True)),
        (abs(edge.offset) + float(fixed)) * fine / abs(common),
        float(max(stretches)),
    )


def grown(edge: Edge, there: Edge) -> list[tuple[int, int]]:
    """The sizes, here and there, of the dimensions along which a comparison's line grows."""
    return [(edge.shape[dim], there.shape[dim]) for dim in _growing(edge, there)]


def _growing(edge: Edge, there: Edge) -> list[int]:
    sizes = zip(edge.shape, there.shape, edge.steps, strict=True)
    return [dim for dim, (here, other, step) in enumerate(sizes) if here != other and step]


def _stretch(here: int, there: int, before: Mapping[Any, int], after: Mapping[Any, int]) -> Fraction:
    moved = [(size, Fraction(after[symbol] - size, there - here)) for symbol, size in before.items()]
    if any(size == here and rate == 1 for size, rate in moved):
        return Fraction(1)
    return max(Fraction(1), *(abs(rate) for _, rate in moved))


def beyond_crossings(lines: Iterable[Line]) -> int:
    """The size beyond all that is new where two of the lines cross; 0 if that is not far out."""
    farthest: dict[Any, Line] = {}
    for line in lines:
        known = farthest.setdefault(line.steps, line)
        most = max(line.offset, known.offset), max(line.stretch, known.stretch)
        farthest[line.steps] = Line(line.steps, *most)
    pairs = combinations_with_replacement(farthest.values(), 2)
    return max((one.reach(other) for one, other in pairs), default=0)


def beyond_compositions(ops: Iterable[Op], lines: Mapping[Value, Line]) -> float:
    """The size beyond all that is new where comparisons follow each other; 0 if none do."""
    between: dict[Value, tuple[float, float]] = {}
    """Tokens that lie between those of a value, and how much slopes make of one."""
    for op in ops if lines else ():
        some = [between.get(value, (0.0, 1.0)) for value in op.reads]
        if op.name in SOLVES:  # what it adds to any power that is written out
            some *= 2
        tokens = [each for each, _ in some]
        slopes = [each for _, each in some]
        here = max(tokens, default=0.0) if op.name in _SUMS else sum(tokens)
        slope = max(slopes, default=1.0) if op.name in _SUMS else math.prod(slopes)
        for value in op.outs:
            line = lines.get(value)
            own = (line.offset + line.stretch, line.steepest) if line is not None else (0.0, 1.0)
            between[value] = here + own[0], slope * own[1]
    most = max((tokens * slope for tokens, slope in between.values()), default=0.0)
    alone = max((line.offset + line.stretch for line in lines.values()), default=0.0)
    return most + 2 * max((line.stretch for line in lines.values()), default=0.0) if most > alone else 0.0
