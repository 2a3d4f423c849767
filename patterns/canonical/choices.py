"""A choice between two values of one size, by booleans or by numbers made of them: how a state that is kept is spelled.

    where(m, x, y)    m x + (1 - m) y    y + m (x - y)    x - (1 - m) (x - y)    lerp(y, x, m)

A number is known to be 0 or 1 only where it was made of booleans: one that enters the graph may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine.values import Numbering, number, root
from kdacompile.patterns.engine.vocabulary import AS_IS, LAYOUT, ORDERED, PICKING

CASTS = ORDERED | {"_to_copy"}


@dataclass(frozen=True)
class Choice:
    """``chosen`` where ``mask`` is true (false, if ``inverted``), and ``rest`` elsewhere."""

    op: Op
    chosen: Value
    rest: Value
    mask: Value
    """Booleans, or a number that is 0 or 1, laid out like the result."""
    inverted: bool = False

    def turned(self) -> Choice:
        return Choice(self.op, self.rest, self.chosen, self.mask, not self.inverted)

    @cached_property
    def parts(self) -> set[Op]:
        """What it is made with."""
        return ancestors([self.op.out], {self.chosen, self.rest, self.mask}.__contains__)

    @property
    def fits(self) -> bool:
        out, mask = self.op.out, self.mask
        small = len(mask.shape) == len(out.shape) and math.prod(mask.shape) < math.prod(out.shape)
        alike = all((value.shape, value.dtype) == (out.shape, out.dtype) for value in (self.chosen, self.rest))
        return small and alike and not mask.const


def choices(op: Op, numbering: Numbering) -> list[Choice]:
    """The choices that an operator may be read as."""
    if op.kwargs or op.node is None or op.out.const or not op.out.dtype.is_floating_point:
        return []
    found: list[Choice] = []
    if op.name == "where" and len(op.args) == 3 and all(isinstance(arg, Value) for arg in op.args):
        mask, chosen, rest = op.args
        found = [Choice(op, chosen, rest, mask)]
    elif op.name == "lerp" and len(op.reads) == 3:
        rest, chosen, weight = op.args
        found = [Choice(op, chosen, rest, weight)] if bit(weight) else []
    elif op.name in ("add", "sub", "addcmul") and len(op.args) == len(op.reads):
        found = [*_moved(op), *(_mixed(op, numbering) if op.name == "add" else ())]
    return [each for choice in found for each in (choice, choice.turned()) if each.fits]


def _moved(op: Op) -> Iterator[Choice]:
    """``y + m (x - y)``, and ``y - m (y - x)``."""
    if op.name == "addcmul":
        ways = [(op.args[0], *op.args[1:]), (op.args[0], *op.args[:0:-1])]
    else:
        ends = [op.args] if op.name == "sub" else [op.args, op.args[::-1]]
        ways = [(rest, gap, weight) for rest, term in ends for gap, weight in factors(term)]
    for rest, gap, weight in ways:
        below = root(gap, AS_IS).op
        if below is None or below.name != "sub" or below.kwargs or len(below.reads) != 2 or not bit(weight):
            continue
        chosen, start = below.args if op.name != "sub" else below.args[::-1]
        if root(start, AS_IS) is root(rest, AS_IS):
            yield Choice(op, chosen, rest, weight)


def _mixed(op: Op, numbering: Numbering) -> Iterator[Choice]:
    """``m x + (1 - m) y``, either of which may be what is left by a mask."""
    for chosen, weight, inverted in _weighed(op.args[0]):
        for rest, other, turned in _weighed(op.args[1]):
            one, two = bit(weight), bit(other)
            if one is None or two is None or weight.shape != other.shape:
                continue
            if numbering.of(one[0]) == numbering.of(two[0]) and (one[1] != inverted) != (two[1] != turned):
                yield Choice(op, chosen, rest, weight, inverted)


def factors(value: Value) -> list[tuple[Value, Value]]:
    """The factors of a product, either way."""
    op = value.op
    if op is None or op.name != "mul" or op.kwargs or len(op.reads) != 2:
        return []
    return [(op.reads[0], op.reads[1]), (op.reads[1], op.reads[0])]


def _weighed(value: Value) -> list[tuple[Value, Value, bool]]:
    """What is weighed, its weight, and whether that is taken from 1."""
    op = value.op
    if op is not None and op.name == "masked_fill" and number(op.args[2]) == 0:
        return [(op.args[0], op.args[1], True)]
    if op is not None and op.name == "where" and len(op.args) == 3:
        mask, chosen, rest = op.args
        return [
            (kept, mask, inverted)
            for kept, nothing, inverted in ((chosen, rest, False), (rest, chosen, True))
            if isinstance(kept, Value) and number(nothing) == 0
        ]
    return [(one, other, False) for one, other in factors(value)]


def bit(value: Value) -> tuple[Value, bool] | None:
    """The booleans that a number is, and whether it is 1 where they are false; None for other numbers."""
    inverted, found = False, root(value, CASTS)
    while (op := found.op) is not None and (_is_not(op) or _tells(op) is not None):
        inverted ^= _tells(op) is not True
        found = root(op.reads[0], CASTS)
    return (found, inverted) if root(found, LAYOUT | PICKING).dtype == torch.bool else None


def _is_not(op: Op) -> bool:
    """``1 - x``, and ``~x`` of booleans."""
    if op.name == "rsub":
        return op.args[1:] == (1,) and not op.kwargs
    return op.name == "logical_not" or (op.name == "bitwise_not" and op.out.dtype == torch.bool)


def _tells(op: Op) -> bool | None:
    """Whether ``where(m, x, y)`` is 1 where the mask is true; None if it is not 1 on one side and 0 on the other."""
    if op.name != "where" or len(op.args) != 3 or op.kwargs or math.prod(op.args[0].shape) != math.prod(op.out.shape):
        return None
    sides = number(op.args[1]), number(op.args[2])
    return sides == (1.0, 0.0) if sides in ((1.0, 0.0), (0.0, 1.0)) else None
