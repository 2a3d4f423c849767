"""Which tensor entering a region is a log gate, and in which unit: ``decay = exp(rate * g)``.

Most models take ``exp(g)``. Some keep the gate positive and take ``exp(-g)``, some count in powers of two
(``exp2(g)``), some divide by a number before every step. The rate is read off the way from the tensor to the
exponential; like every other part of a binding it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, SOLVES

_EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2.0)}
_PRODUCTS = CONTRACTIONS | SOLVES | {"mul"}


class Units:
    """``gate_rates`` of one region, each walked once."""

    def __init__(self, region: set[Op]) -> None:
        self.region = region
        self.known: dict[tuple[Value, Value | None], list[float]] = {}

    def __call__(self, value: Value, partner: Value | None = None) -> list[float]:
        if (value, partner) not in self.known:
            self.known[value, partner] = gate_rates(value, self.region, partner)
        return self.known[value, partner]


def gate_rates(value: Value, region: set[Op], partner: Value | None = None) -> list[float]:
    """The rates with which ``value`` may reach an exponential before it meets another activation in a product, most
    plausible first; none if it does not: it is no log gate. A product with ``partner`` (Mamba-2's A) does not count.

    Differences of summed gates enter with both signs (``exp(G_i - G_j)``): the order of a subtraction tells nothing.
    Where other signs differ too (``q exp(G)`` beside ``k exp(-G)``), either may be meant.
    """

    def readers(value: Value, rate: float) -> Iterator[tuple[Op, Value, float]]:
        return ((op, value, rate) for op in value.users if op in region)

    def onward(place: tuple[Op, Value, float]) -> Iterator[tuple[Op, Value, float]]:
        op, source, rate = place
        if op.name not in _EXPONENTIALS and (op.name not in _PRODUCTS or _keeps(op, source, partner)):
            for out in op.outs:
                yield from readers(out, rate * _times(op, source))

    met = reach(readers(value, 1.0), onward)
    found = {rate * _EXPONENTIALS[op.name] for op, _, rate in met if op.name in _EXPONENTIALS}
    size = min(map(abs, found), default=0.0)
    return [sign * size for sign in (1.0, -1.0) if any(rate * sign > 0 for rate in found)]


def _keeps(op: Op, source: Value, partner: Value | None) -> bool:
    """True if a product is with constants, or with the partner."""
    others = [read for read in op.reads if read is not source and not read.const]
    alone = sum(read is source for read in op.reads) == 1
    return alone and all(op.name == "mul" and root(read) is partner for read in others)


def _times(op: Op, source: Value) -> float:
    """By what number the operator multiplies ``source``; 1 where that is not one number."""
    if op.name in ("neg", "rsub"):
        return -1.0
    if op.name not in ("sub", "mul", "div"):
        return 1.0
    left, right = op.args[:2]
    if op.name == "sub":
        return -1.0 if right is source and isinstance(left, Value) and left.const else 1.0
    if left is not source or not isinstance(right, (int, float)) or right == 0:
        return 1.0
    return float(right) if op.name == "mul" else 1.0 / right
