"""Where a function takes another branch, from what its concolic runs did.

Every size gets a law: a constant, an affine function of the batch B or the tokens T, or such a number rounded up to
whole chunks. A comparison of laws is worked out for every length up to ``FARTHEST``, and for all beyond from its slope;
lengths at which the comparisons come to something new have to be visited. So have all remainders of a division. What
has no law may be compared, or used as a plain number, only if it is the same in all runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from kdacompile.capture.concolic import Point, Run
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.formulas import OPAQUE, Formula, is_opaque

FARTHEST = 4200
LARGEST_BATCH = 512
MOST_REMAINDERS = 256
LONGEST_PERIOD = 1024


class _NotAffine(Exception):
    pass


def to_visit(runs: list[Run], batch: int, length: int) -> set[Point]:
    """Points at which the function might do what it has not done yet; raises ``Unliftable`` for what cannot be settled
    by visiting points. Lengths are visited with ``batch``, batches with ``length``.
    """
    refused = sorted({reason for run in runs for reason in run.refused})
    if refused:
        raise Unliftable(refused[0])
    laws = _Laws(runs)
    _check_uses(runs, laws)
    comparisons = _comparisons(runs, laws)
    points = {(batch, size) for size in _remainders(runs, laws)}
    for axis, most in (("T", FARTHEST), ("B", LARGEST_BATCH)):
        sizes = _new_outcomes([gap for gap in comparisons if axis in _axes(gap[1])], axis, most)
        points |= {(batch, size) if axis == "T" else (size, length) for size in sizes}
    return points


def undecided(runs: list[Run], proven: Iterable[Point]) -> list[Point]:
    """Points at which some comparison came out as at none of the ``proven`` ones. What the function does there was run,
    which is no proof: an added 1e-9 shows in no comparison of results.
    """
    proven = set(proven)
    known = {outcome for run in runs if run.point in proven for outcome in _outcomes(run)}
    found: list[Point] = []
    for run in sorted(runs, key=lambda run: run.point[::-1]):
        if not known.issuperset(outcomes := _outcomes(run)):
            found.append(run.point)
            known |= outcomes
    return found


def does_other_than(runs: list[Run], others: list[Run]) -> bool:
    """True if a comparison or a question about a dtype came out in ``runs`` as in none of the ``others``."""
    known = {outcome for run in others for outcome in _outcomes(run) | run.answers}
    return any(not known.issuperset(_outcomes(run) | run.answers) for run in runs)


def _outcomes(run: Run) -> set[tuple[Any, ...]]:
    return {(place, relation, getattr(operator, relation)(gap, 0)) for place, relation, _, gap in run.comparisons}


# -- laws -------------------------------------------------------------------------------------------------------------


class _Laws:
    """What each size that was asked for is at any batch and length, going by all runs."""

    def __init__(self, runs: list[Run]) -> None:
        seen: dict[Any, list[tuple[int, int, int]]] = {}
        for run in runs:
            for name, value in run.reads.items():
                seen.setdefault(name, []).append((*run.point, value))
        self.divisors = {divisor for run in runs for _, divisor in run.quotients}
        self.of = {name: self.law(points) for name, points in seen.items()}

    def law(self, points: list[tuple[int, int, int]]) -> Formula:
        for form in _forms(points, self.divisors):
            if all(_at(form, batch, length) == value for batch, length, value in points):
                return form
        return OPAQUE

    def resolved(self, formula: Formula) -> Formula:
        """The formula in terms of "B" and "T"; OPAQUE if there is none."""
        if is_opaque(formula):
            return OPAQUE
        if not isinstance(formula, tuple):
            return formula
        if formula[0] == "read":
            return self.of[formula]
        name, left, right = formula
        one, other = self.resolved(left), self.resolved(right)
        if is_opaque(one) or is_opaque(other):
            return OPAQUE
        constant = not isinstance(one, (tuple, str)) and not isinstance(other, (tuple, str))
        return getattr(operator, name)(one, other) if constant else (name, one, other)


def _forms(points: list[tuple[int, int, int]], divisors: Iterable[int]) -> Iterator[Formula]:
    batch, length, value = points[0]
    if len({length for _, length, _ in points}) < 2:
        return
    yield value
    for axis, place in (("T", 1), ("B", 0)):
        other = next((point for point in points if point[place] != points[0][place]), None)
        if other is not None and (value - other[2]) % (points[0][place] - other[place]) == 0:
            slope = (value - other[2]) // (points[0][place] - other[place])
            yield "add", ("mul", axis, slope), value - slope * points[0][place]
    for divisor in sorted(divisors):
        chunks = -(-length // divisor)
        if divisor and value % chunks == 0:
            yield "mul", ("floordiv", ("add", "T", divisor - 1), divisor), value // chunks
    if value % (batch * length) == 0:
        yield "mul", ("mul", "B", "T"), value // (batch * length)


def _at(formula: Formula, batch: Any, length: Any) -> Any:
    if not isinstance(formula, tuple):
        return batch if formula == "B" else length if formula == "T" else formula
    name, left, right = formula
    return getattr(operator, name)(_at(left, batch, length), _at(right, batch, length))


def _axes(formula: Formula) -> set[str]:
    if isinstance(formula, tuple):
        return _axes(formula[1]) | _axes(formula[2])
    return {formula} if isinstance(formula, str) and formula != OPAQUE else set()


def _period(formula: Formula) -> int:
    """The period p of an affine function with rounding: it grows by the same from x to x + p for every x."""
    return _growth(formula)[0]


def _growth(formula: Formula) -> tuple[int, int]:
    """(period, growth over a period)."""
    if not isinstance(formula, tuple):
        return 1, int(isinstance(formula, str))
    name, left, right = formula
    if name in ("add", "sub") or (name == "mul" and not (_axes(left) and _axes(right))):
        (one, rise), (other, rest) = _growth(left), _growth(right)
        period = math.lcm(one, other)
        if name == "mul":
            return period, period // one * rise * right if _axes(left) else period // other * rest * left
        rise, rest = rise * period // one, rest * period // other
        return period, rise + rest if name == "add" else rise - rest
    if name in ("floordiv", "mod") and not _axes(right) and "B" not in _axes(left) and right > 0:
        period, rise = _growth(left)
        times = right // math.gcd(rise, right)
        return period * times, 0 if name == "mod" else rise * times // right
    raise _NotAffine


# -- numbers that go where no formula follows --------------------------------------------------------------------------


def _check_uses(runs: list[Run], laws: _Laws) -> None:
    """Such numbers must be the same in all runs."""
    kinds: dict[Any, list[set[int]]] = {}
    for run in runs:
        here: dict[Any, set[int]] = {}
        for place, what, formula, value in run.uses:
            if _axes(laws.resolved(formula)):
                raise Unliftable(f"it {what}" if " " in what else what)
            here.setdefault((place, what), set()).add(value)
        for key, values in here.items():
            kinds.setdefault(key, []).append(values)
    for (_, what), sets in kinds.items():
        if any(values != sets[0] for values in sets):
            raise Unliftable(f"it {what}")


# -- comparisons ------------------------------------------------------------------------------------------------------


def _comparisons(runs: list[Run], laws: _Laws) -> set[tuple[str, Formula]]:
    """(relation, difference) of the comparisons that depend on batch or length."""
    kinds: dict[Any, list[set[Any]]] = {}
    found: set[tuple[str, Formula]] = set()
    for run in runs:
        here: dict[Any, set[Any]] = {}
        for place, relation, formula, value in run.comparisons:
            gap = laws.resolved(formula)
            if _axes(gap):
                found.add((relation, gap))
                value = gap
            here.setdefault((place, relation), set()).add(value)
        for key, values in here.items():
            kinds.setdefault(key, []).append(values)
    for sets in kinds.values():
        if any(values != sets[0] for values in sets):
            raise Unliftable("it compares a number that is counted in a loop, or one that follows from no size")
    return found


def _new_outcomes(comparisons: list[tuple[str, Formula]], axis: str, most: int) -> set[int]:
    """Sizes at which the comparisons come out as at no smaller one, and the sizes on both sides of each change."""
    if not comparisons:
        return set()
    sizes = torch.arange(1, most + 1)
    outcomes: list[Tensor] = []
    for relation, gap in comparisons:
        if _axes(gap) != {axis}:
            raise Unliftable("it compares a length with a batch")
        try:
            period = _period(gap)
        except _NotAffine:
            raise Unliftable("it compares a number that is not affine in a length") from None
        values = _at(gap, sizes, sizes)
        _check_beyond(values, period, most)
        outcomes.append(getattr(operator, relation)(values, 0))
    known: dict[Any, int] = {}
    wanted: set[int] = set()
    before: Any = None
    for size, outcome in zip(sizes.tolist(), torch.stack(outcomes, 1).tolist(), strict=True):
        now = tuple(outcome)
        if size > 1:
            for key, near in ((now, {size}), ((before, now), {size - 1, size})):
                if known.setdefault(key, 0) < (2 if key == now else 1):
                    known[key] += 1
                    wanted |= near
        before = now
    return {size for size in wanted if size > 1}


def _check_beyond(values: Tensor, period: int, most: int) -> None:
    """Raises ``Unliftable`` if a difference that is ``values`` at 1, 2, .. could change its sign past the last one."""
    if 2 * period > most or period > LONGEST_PERIOD:
        raise Unliftable("it compares what has too long a period to try all of it")
    last, earlier = values[-period:], values[-2 * period : -period]
    if bool(((last - earlier) * last < 0).any() | ((last == 0) & (last != earlier)).any()):
        raise Unliftable(f"it decides something beyond {most}, more than can be tried")


def _remainders(runs: list[Run], laws: _Laws) -> set[int]:
    """Lengths with every remainder of the divisions of a length."""
    wanted: set[int] = set()
    for formula, divisor in {quotient for run in runs for quotient in run.quotients}:
        inner = laws.resolved(formula)
        if "B" in _axes(inner):
            raise Unliftable("it divides the batch")
        try:
            many = _period(("floordiv", inner, divisor)) if "T" in _axes(inner) else divisor
        except _NotAffine:
            raise Unliftable("it divides what is not affine in a length") from None
        if "T" in _axes(inner):
            if many > MOST_REMAINDERS:
                raise Unliftable(f"it divides a length by {many}, which has more remainders than can be tried")
            wanted |= set(range(2, many + 2))
        elif many > FARTHEST:
            raise Unliftable(f"it divides by {many}, more than can be tried")
        elif many > 1:
            wanted |= {size for size in (many - 1, many, many + 1, 2 * many + 1) if 1 < size <= FARTHEST}
    return wanted
