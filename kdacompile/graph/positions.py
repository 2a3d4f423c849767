"""What the constants of a region are as functions of positions: the question whether they are alike at every size.

Masks and decay tables are made of ``arange``, ``ones`` and the like. A region with an open size is proven at
a few, and is the same at all others if every constant in it is one of these, along the dimensions that grow:

- affine in positions: ``offset + sum(steps[d] * i_d)`` in exact whole or binary fractions,
- linear: the same with any coefficients, or in pieces,
- a mask: made of comparisons of affine numbers, so that its edges are straight lines,
- a table: a power whose exponent is linear, ``gamma ** (i - j)``.

A comparison turns where its two sides meet. ``edges`` lists them with the range of ``left - right`` at this instance:
one that comes out the same way everywhere may turn at a larger size, which then has to be looked at. What is none of
the above (quotients, shifts and squares of positions, square roots, narrow integers) raises ``NotAffine``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from kdacompile.compat.operators import tree_leaves
from kdacompile.graph.ir import Op, Value
from kdacompile.graph.laws import (
    FIXED,
    LINEAR,
    MAKERS,
    MASK,
    TABLE,
    Law,
    NotAffine,
    continued,
    in_dtype,
    indexed,
    join,
    picked,
    power,
    product,
    running_sum,
    scaled,
    summed,
    uniform,
    viewed,
)
from kdacompile.patterns.engine.values import turn
from kdacompile.patterns.engine.vocabulary import AS_IS, LAYOUT, PICKING, TURNS, VIEWS


@dataclass(frozen=True)
class Edge:
    """A comparison with zero: ``relation`` and the least and greatest difference of its sides at an instance."""

    relation: str
    least: float
    most: float
    offset: float
    """The difference where all indices are zero."""
    steps: tuple[Fraction, ...] = ()
    """What it grows by along each dimension of ``shape``; none for a comparison of sizes."""
    shape: tuple[int, ...] = ()
    value: Value | None = field(default=None, compare=False)
    """What the comparison is part of."""

    def turns_at(self, size: int) -> int | None:
        """The size at which it comes out the other way for the first time, if all dimensions grow with a size that is
        ``size`` now; None if it has done so already, or never will.
        """
        above = self.least > 0 or (self.least == 0 and self.relation in ("ge", "lt"))
        reach = self.offset - self.least if above else self.most - self.offset
        if len(self.outcomes) > 1 or not reach or (above and self.offset < 0) or (not above and self.offset > 0):
            return None
        return math.ceil(size * (abs(self.offset) + 1) / reach) + 1

    @property
    def outcomes(self) -> frozenset[bool]:
        """What the comparison comes to, somewhere."""
        low, high = self.least, self.most
        if self.relation in ("eq", "ne"):
            equal = {low == high == 0, low <= 0 <= high}
            return frozenset(equal if self.relation == "eq" else {not each for each in equal})
        test: Callable[[float], bool] = {
            "lt": lambda gap: gap < 0,
            "le": lambda gap: gap <= 0,
            "gt": lambda gap: gap > 0,
            "ge": lambda gap: gap >= 0,
        }[self.relation]
        return frozenset({test(low), test(high)})


def edges(ops: Iterable[Op], others: Iterable[Op]) -> list[Edge] | None:
    """The edges of a region's constants and slices, in order; None if the region consists of other operators at another
    instance, whose operators are ``others``. Raises ``NotAffine``.
    """
    here, there = (sorted(each, key=lambda op: op.outs[0].index) for each in (ops, others))
    if [op.name for op in here] != [op.name for op in there]:
        return None
    pairs = dict(zip(here, there, strict=True))
    return _Reader(lambda op: _signature(op) == _signature(pairs[op])).read(here)


def edges_of_constants(ops: Sequence[Op], others: Sequence[Op]) -> list[Edge]:
    """The edges of constants among operators that are not one to one with those of another instance: unrolled loops."""
    known = {repr(_signature(op)) for op in others}
    return _Reader(lambda op: repr(_signature(op)) in known).read(ops)


def _signature(op: Op) -> tuple[Any, ...]:
    return op.name, _numbers(op), [value.shape for value in op.outs], [value.dtype for value in op.outs]


class _Reader:
    """Goes through operators; ``is_same`` tells those that are the same at another instance."""

    def __init__(self, is_same: Callable[[Op], bool]) -> None:
        self.is_same = is_same
        self.laws: dict[Value, Law] = {}
        self.fixed: set[Value] = set()
        """Constants that are the same at both instances."""
        self.edges: list[Edge] = []

    def read(self, ops: Iterable[Op]) -> list[Edge]:
        for op in ops:
            self.bounds(op)
            if op.out.const and op.out.payload is None:
                self.constant(op)
            elif op.name in ("tril", "triu"):
                self.triangle(op, FIXED)
        return self.edges

    def constant(self, op: Op) -> None:
        laws = [self.law(value) for value in op.reads]
        fixed = self.is_same(op) and all(value in self.fixed or value not in self.laws for value in op.reads)
        known = len(self.edges)
        try:
            found = self.made(op, laws)
        except NotAffine:
            if not fixed:
                raise
            found = FIXED
        if fixed:
            del self.edges[known:]  # it has come to all that it will
        for value in op.outs:
            self.laws[value] = FIXED if fixed and found.kind != "affine" else found
            if fixed:
                self.fixed.add(value)

    def law(self, value: Value) -> Law:
        if value.payload is not None and not value.shape:
            return uniform(value.payload.item(), 0) if value.payload.device.type != "meta" else FIXED
        return self.laws.get(value, FIXED)

    # -- operators ----------------------------------------------------------------------------------------------------

    def made(self, op: Op, laws: list[Law]) -> Law:
        name, rank = op.name, len(op.out.shape)
        if name in MAKERS:
            return MAKERS[name](op, rank)
        if name in LAYOUT or name in PICKING:
            return self.moved(op, laws)
        if name in _COMPARE:
            return self.compared(_COMPARE[name], op, laws)
        if name in ("tril", "triu"):
            return self.triangle(op, laws[0])
        if name == "cat":
            return continued(op, laws) or join(laws)
        if name in _PLACING:
            return join(laws)
        if name in ("where", "masked_fill"):
            return join([law for law, value in zip(laws, op.reads, strict=True) if value.dtype is not torch.bool])
        if name in ("add", "sub", "rsub", "neg", "mul", "div"):
            return self.arithmetic(op, laws)
        if name not in _SUMS and all(law.kind in ("mask", "fixed") or law.is_uniform for law in laws):
            return MASK
        return self.function(op, laws)

    def function(self, op: Op, laws: list[Law]) -> Law:
        """Of what depends on positions."""
        if op.name in ("exp", "exp2", "pow"):
            return power(op, laws)
        if op.name in ("abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"):
            return self.bent(op, laws)
        if op.name in ("sqrt", "rsqrt", "reciprocal", "log") and laws[0] == TABLE:
            return LINEAR if op.name == "log" else TABLE
        if op.name == "cumsum":
            return running_sum(op, laws[0])
        raise NotAffine(f"{op.name.strip('_')} of positions is not affine in them")

    def moved(self, op: Op, laws: list[Law]) -> Law:
        law = laws[0]
        if law.kind != "affine":
            return law
        value, rank = op.reads[0], len(op.reads[0].shape)
        steps, name, offset = law.steps, op.name, law.offset
        if law.is_uniform:
            return uniform(offset, len(op.out.shape))
        if name == "_to_copy":
            return in_dtype(Law("affine", offset, steps), op.out.dtype)
        if name in AS_IS:
            return law
        if name == "expand":
            return Law("affine", offset, (Fraction(0),) * (len(op.out.shape) - rank) + steps)
        if name in ("select", "slice", "flip"):
            return picked(op, law)
        if name == "index":
            return indexed(op, laws)
        if name in TURNS:
            return Law("affine", offset, tuple(steps[dim] for dim in turn(op)))
        if name in VIEWS:
            other = viewed(value.shape, steps, op.out.shape)
            if other is not None:
                return Law("affine", offset, other)
        return LINEAR

    def compared(self, relation: str, op: Op, laws: list[Law]) -> Law:
        """Raises ``NotAffine`` unless both sides are affine."""
        gap = summed(op, laws, -1)
        if gap.kind != "affine":
            if all(law.kind in ("mask", "fixed") or law.is_uniform for law in laws):
                return MASK
            raise NotAffine("what positions are compared with is not affine in them")
        self.edge(relation, gap, op.out)
        if gap.is_uniform and gap.kind == "affine":  # it comes out one way everywhere: how, the edge has
            return uniform(int(True in self.edges[-1].outcomes), len(op.out.shape))
        return MASK

    def edge(self, relation: str, gap: Law, value: Value) -> None:
        reach = [step * (size - 1) for step, size in zip(gap.steps, value.shape, strict=True)]
        least = gap.offset + sum((each for each in reach if each < 0), Fraction(0))
        most = gap.offset + sum((each for each in reach if each > 0), Fraction(0))
        place = gap.steps, tuple(value.shape), value
        self.edges.append(Edge(relation, float(least), float(most), float(gap.offset), *place))

    def triangle(self, op: Op, law: Law) -> Law:
        diagonal = op.args[1] if len(op.args) > 1 else op.kwargs.get("diagonal", 0)
        rank = len(op.out.shape)
        steps = (Fraction(0),) * (rank - 2) + (Fraction(-1), Fraction(1))
        self.edge("le" if op.name == "tril" else "ge", Law("affine", Fraction(-diagonal), steps), op.out)
        return join([law, MASK])

    def bent(self, op: Op, laws: list[Law]) -> Law:
        """Affine in two pieces, with an edge between them."""
        bounds = [number for number in (*op.args[1:], *op.kwargs.values()) if isinstance(number, (int, float))]
        if laws[0].kind != "affine" or len(laws) > 1:
            raise NotAffine(f"{op.name} of positions is not affine in them")
        for bound in bounds or [0]:
            gap = Law("affine", laws[0].offset - Fraction(bound), laws[0].steps)
            self.edge("lt", gap, op.out)
        return LINEAR

    def arithmetic(self, op: Op, laws: list[Law]) -> Law:
        if op.name == "neg":
            return scaled(laws[0], Fraction(-1))
        if op.name in ("mul", "div"):
            return product(op, laws)
        sign = 1 if op.name == "add" else -1
        found = summed(op, laws, sign * Fraction(op.kwargs.get("alpha", 1)))
        if op.name == "rsub":
            found = scaled(found, Fraction(-1))
        return in_dtype(found, op.out.dtype)

    def bounds(self, op: Op) -> None:
        """Slices and joins begin and end somewhere: a size compared with a number."""
        if op.name in ("slice", "slice_scatter") and op.reads:
            value, first = op.reads[0], 1 if op.name == "slice" else 2
            rest = [*op.args[first:], *(None,) * 4][:3]
            dim, start, end = (
                op.kwargs.get(key, item) for key, item in zip(("dim", "start", "end"), rest, strict=True)
            )
            size = value.shape[(dim or 0) % len(value.shape)]
            for number in (start, end):
                if isinstance(number, int) and 0 < number < 1 << 40:
                    self.scalar("ge", size - number)
        elif op.name == "cat":
            dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(op.out.shape)
            sizes = [value.shape[dim] if len(value.shape) > dim else 0 for value in op.reads]
            for size in sizes:
                self.scalar("gt", size)

    def scalar(self, relation: str, gap: int) -> None:
        self.edges.append(Edge(relation, gap, gap, gap))


_COMPARE = {name: name for name in ("lt", "le", "gt", "ge", "eq", "ne")} | {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne"
}  # fmt: skip
_PLACING = frozenset("stack constant_pad_nd slice_scatter select_scatter diagonal_scatter repeat copy".split())
_SUMS = frozenset("sum mean bmm mm prod cumsum cumprod".split())


def _numbers(op: Op) -> list[Any]:
    """What an operator is given besides tensors."""
    return [item for item in tree_leaves((op.args, op.kwargs)) if not isinstance(item, Value)]
