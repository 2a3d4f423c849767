"""Where an activation turns: the logits at which one of its operators takes another branch.

A comparison, a clamp, a maximum, an absolute value turns where an affine function of the logit is zero; that point is
computed, and every interval between two of them is probed. Between turning points only analytic operators are left, of
which a few dozen points tell one from another. What turns at anything but an affine function of the logit (a band of
its sigmoid) is no activation of ours.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.reduced import EvaluationError
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

X, RATE = sympy.symbols("x r", real=True)
"""The logit and the rate exp(A_log), as polynomials of which values of a cone are written down."""


def turning_points(cone: Cone) -> list[float] | None:
    """Where the cone turns, as logits or as multiples of the rate's inverse; None if that is not known."""
    found: set[float] = set()
    affine = _Affine(cone)
    for op in cone.ops:
        if op.out.const or op.name in _SMOOTH:
            continue
        points = [None if each is None else _zero(each) for each in _differences(op, affine)]
        if not points or None in points:
            return None
        found.update(point for point in points if point is not None)
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


def _differences(op: Op, affine: _Affine) -> Iterator[sympy.Expr | None]:
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


@functools.lru_cache(maxsize=256)
def _zero(difference: sympy.Expr) -> float | None:
    """The x, or the r x, at which a polynomial of degree one in x is zero; None if that is no number.

    Every layer asks for the same ones, and sympy takes 30 ms for each.
    """
    poly = sympy.Poly(difference, X, RATE)
    if poly.degree(X) != 1 or poly.degree(RATE) > 1:
        return None
    slope, offset = (sympy.Poly(difference, X).coeff_monomial(power) for power in (X, 1))
    zero = sympy.cancel(-offset / slope)
    point = next((float(each) for each in (zero, sympy.cancel(zero * RATE)) if each.is_number), math.inf)
    return point if abs(point) < 1e12 else None


def _flat(value: Value) -> sympy.Expr | None:
    """A constant that is one number throughout."""
    try:
        data = constant(value).double()
    except EvaluationError:
        return None
    uniform = data.numel() and bool((data == data.reshape(-1)[0]).all()) and bool(data.isfinite().all())
    return sympy.Float(float(data.min())) if uniform else None


class _Affine:
    """Values of a cone as polynomials of the logit and the rate, of degree one in each at the most."""

    def __init__(self, cone: Cone) -> None:
        self.cone = cone
        self.known: dict[Value, sympy.Expr | None] = {cone.sources[0].value: X}
        self.rate = cone.sources[1].value if len(cone.sources) > 1 else None

    def __call__(self, item: Any) -> sympy.Expr | None:
        plain = number(item)
        if plain is not None:
            return sympy.Float(plain) if math.isfinite(plain) else None
        if not isinstance(item, Value):
            return None
        if item not in self.known:
            self.known[item] = None  # while it is computed
            self.known[item] = _flat(item) if item.const else self.compute(item)
        return self.known[item]

    def difference(self, one: Any, other: Any) -> sympy.Expr | None:
        left, right = self(one), self(other)
        return None if left is None or right is None else left - right

    def compute(self, value: Value) -> sympy.Expr | None:
        op = value.op
        if op is None or op not in self.cone.ops:
            return None
        if op.name in SAME_DATA:
            return None if self.is_rate(op.reads[0]) else self(op.reads[0])
        if op.name == "exp" and self.is_rate(op.reads[0]):
            return RATE
        if op.kwargs or op.name not in _ARITHMETIC:
            return None
        operands = [self(arg) for arg in op.args]
        divided = op.name == "div" and number(op.args[1]) in (None, 0.0)
        if None in operands or divided:
            return None
        found = sympy.expand(_ARITHMETIC[op.name](*operands))
        return found if all(sympy.degree(found, symbol) < 2 for symbol in (X, RATE)) else None

    def is_rate(self, value: Value) -> bool:
        value = root(value, SAME_DATA, until=lambda step: step is self.rate or step.op not in self.cone.ops)
        return self.rate is not None and value is self.rate


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda x, y: y - x,
    "mul": operator.mul,
    "neg": operator.neg,
    "div": operator.truediv,
}
