"""Where an activation turns: the logits at which one of its operators takes another branch.

A comparison, a clamp, a maximum, an absolute value turns where an affine function of the logit is zero; that point is
computed, and every interval between two of them is probed. Between turning points only analytic operators are left, of
which a few dozen points tell one from another. What turns at anything but an affine function of the logit (a band of
its sigmoid) is no activation of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.evaluate import EvaluationError, constant
from kdacompile.patterns.engine.values import number, root
from kdacompile.patterns.recurrence.absorb.axes import SAME_DATA
from kdacompile.patterns.recurrence.absorb.cone import Cone

MOST = 12
"""Turning points of one activation; real ones have one or two."""

_COMPARISONS = frozenset("gt lt ge le eq ne maximum minimum".split())
_SMOOTH = SAME_DATA | frozenset(
    "add sub rsub mul div neg exp exp2 log log1p sigmoid log_sigmoid_forward logaddexp where reciprocal sqrt rsqrt pow "
    "square tanh".split()
)
"""Operators without a branch of their own (that of ``where`` is its condition's)."""

Affine = dict[tuple[int, int], float]
"""A sum of ``c x^i r^j``, by (i, j): x the logit, r the rate exp(A_log)."""


def turning_points(cone: Cone) -> list[float] | None:
    """Where the cone turns, as logits or as multiples of the rate's inverse; None if that is not known."""
    found: set[float] = set()
    affine = _Affine(cone)
    for op in cone.ops:
        if op.out.const or op.name in _SMOOTH:
            continue
        differences = list(_differences(op, affine))
        if not differences or None in differences:
            return None
        for difference in differences:
            point = _zero(difference or {})
            if point is None:
                return None
            found.add(point)
    return sorted(found) if len(found) <= MOST else None


def points(cone: Cone) -> Tensor | None:
    """Logits on all sides of every turning point; None if those are not known."""
    turns = turning_points(cone)
    if turns is None:
        return None
    inner = torch.linspace(0.0, 1.0, 41, dtype=torch.float64)[1:-1]
    near = torch.tensor([1e-12, 1e-9, 1e-6, 1e-3, 1e-2, 0.1, 1.0], dtype=torch.float64)
    far = torch.logspace(0.0, 5.0, 60, dtype=torch.float64)
    parts = [torch.linspace(-60.0, 60.0, 481, dtype=torch.float64), torch.tensor([90.0, -90.0, 150.0, -150.0])]
    for place, turn in enumerate(turns):
        offsets = near * max(1.0, abs(turn))
        parts += [torch.tensor([turn], dtype=torch.float64), turn + offsets, turn - offsets]
        if place:
            parts.append(turns[place - 1] + inner * (turn - turns[place - 1]))
    parts += [max([0.0, *turns]) + far, min([0.0, *turns]) - far]
    found = torch.cat([part.double() for part in parts])
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(3))]


def _differences(op: Op, affine: _Affine) -> Iterator[Affine | None]:
    """Functions at whose zeros the operator takes another branch; None for one that is not affine."""
    args: tuple[Any, ...] = op.args
    if op.name in _COMPARISONS:
        yield affine.difference(args[0], args[1])
    elif op.name in ("relu", "abs"):
        yield affine(args[0])
    elif op.name in ("clamp", "clamp_min", "clamp_max"):
        limits: list[Any] = [*args[1:3], *(op.kwargs.get(name) for name in ("min", "max"))]
        for limit in limits:
            if limit is not None:
                yield affine.difference(args[0], limit)
    elif op.name == "softplus":
        options = list(args[1:3])
        beta, threshold = (options or [1.0])[0], (options[1:] or [20.0])[0]
        yield affine.difference(args[0], threshold / beta)


def _zero(difference: Affine) -> float | None:
    """The x, or the r x, at which ``a x r^j + c r^k`` is zero, for k = j or k = 0; None if it is no such function."""
    slopes = {key: c for key, c in difference.items() if key[0] == 1 and c}
    rest = {key: c for key, c in difference.items() if key[0] == 0 and c}
    if len(slopes) != 1 or len(rest) > 1:
        return None
    j, slope = next((key[1], c) for key, c in slopes.items())
    k, offset = next(((key[1], c) for key, c in rest.items()), (0, 0.0))
    if j not in (0, 1) or k not in (0, j):
        return None
    point = -offset / slope
    return point if math.isfinite(point) and abs(point) < 1e12 else None


def _flat(value: Value) -> Affine | None:
    """A constant that is one number throughout."""
    try:
        data = constant(value).double()
    except EvaluationError:
        return None
    return {(0, 0): float(data.min())} if data.numel() and bool((data == data.reshape(-1)[0]).all()) else None


class _Affine:
    """Values of a cone as sums of ``c x^i r^j``."""

    def __init__(self, cone: Cone) -> None:
        self.cone = cone
        self.known: dict[Value, Affine | None] = {cone.sources[0].value: {(1, 0): 1.0}}
        self.rate = cone.sources[1].value if len(cone.sources) > 1 else None

    def __call__(self, item: Any) -> Affine | None:
        plain = number(item)
        if plain is not None:
            return {(0, 0): plain}
        if not isinstance(item, Value):
            return None
        if item.const and item not in self.known:
            self.known[item] = _flat(item)
        if item not in self.known:
            self.known[item] = None
            self.known[item] = self.compute(item)
        return self.known[item]

    def difference(self, one: Any, other: Any) -> Affine | None:
        return self.plus(self(one), self(other), -1.0)

    def plus(self, one: Affine | None, other: Affine | None, times: float = 1.0) -> Affine | None:
        if one is None or other is None:
            return None
        return {key: one.get(key, 0.0) + times * other.get(key, 0.0) for key in {*one, *other}}

    def times(self, one: Affine | None, other: Affine | None) -> Affine | None:
        if one is None or other is None:
            return None
        found: Affine = {}
        for (i, j), a in one.items():
            for (k, n), b in other.items():
                found[i + k, j + n] = found.get((i + k, j + n), 0.0) + a * b
        return found if all(i < 2 and j < 2 for i, j in found) else None

    def compute(self, value: Value) -> Affine | None:
        op = value.op
        if op is None or (op not in self.cone.ops and not value.const):
            return None
        if op.name in SAME_DATA:
            return self.rate_or(op.reads[0])
        if op.name == "exp" and self.is_rate(op.reads[0]):
            return {(0, 1): 1.0}
        if op.name in ("add", "sub", "rsub") and not op.kwargs and len(op.args) == 2:
            one, other = self(op.args[0]), self(op.args[1])
            pair = (other, one) if op.name == "rsub" else (one, other)
            return self.plus(*pair, 1.0 if op.name == "add" else -1.0)
        if op.name == "mul":
            return self.times(self(op.args[0]), self(op.args[1]))
        if op.name == "neg":
            return self.times(self(op.args[0]), {(0, 0): -1.0})
        divisor = number(op.args[1]) if op.name == "div" and not op.kwargs else None
        return self.times(self(op.args[0]), {(0, 0): 1.0 / divisor}) if divisor else None

    def rate_or(self, value: Value) -> Affine | None:
        return None if self.is_rate(value) else self(value)

    def is_rate(self, value: Value) -> bool:
        value = root(value, SAME_DATA, until=lambda step: step is self.rate or step.op not in self.cone.ops)
        return self.rate is not None and value is self.rate
