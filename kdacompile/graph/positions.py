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
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING

EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that hold every position there will be."""

_GRAIN, _LARGEST = 256, 1 << 20
"""Coefficients of this fineness and size are computed with exactly in each of them."""


class NotAffine(Exception):
    """A constant of the region is not known at other sizes; the message says why."""


@dataclass(frozen=True)
class Edge:
    """A comparison with zero: ``relation`` and the least and greatest difference of its sides at an instance."""

    relation: str
    least: float
    most: float
    offset: float
    """The difference where all indices are zero."""

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


@dataclass(frozen=True)
class Law:
    """What a constant is: "fixed" (no dimension of it grows), "affine", "linear", "mask" or "table"."""

    kind: str
    offset: Fraction = Fraction(0)
    steps: tuple[Fraction, ...] = ()

    @property
    def is_uniform(self) -> bool:
        return self.kind == "affine" and not any(self.steps)


MASK, TABLE, LINEAR, FIXED = Law("mask"), Law("table"), Law("linear"), Law("fixed")


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
            return _uniform(value.payload.item(), value.dtype, 0) if value.payload.device.type != "meta" else FIXED
        return self.laws.get(value, FIXED)

    # -- operators ----------------------------------------------------------------------------------------------------

    def made(self, op: Op, laws: list[Law]) -> Law:
        name, rank = op.name, len(op.out.shape)
        if name in _MAKERS:
            return _MAKERS[name](op, rank)
        if name in LAYOUT or name in PICKING:
            return self.moved(op, laws)
        if name in _COMPARE:
            return self.compared(_COMPARE[name], op, laws)
        if name in ("tril", "triu"):
            return self.triangle(op, laws[0])
        if name in _PLACING:
            return _join(laws)
        if name in ("where", "masked_fill"):
            return _join([law for law, value in zip(laws, op.reads, strict=True) if value.dtype is not torch.bool])
        if name in ("add", "sub", "rsub", "neg", "mul", "div"):
            return self.arithmetic(op, laws)
        if name not in _SUMS and all(law.kind in ("mask", "fixed") or law.is_uniform for law in laws):
            return MASK
        return self.function(op, laws)

    def function(self, op: Op, laws: list[Law]) -> Law:
        """Of what depends on positions."""
        if op.name in ("exp", "exp2", "pow"):
            return _power(op, laws)
        if op.name in ("abs", "relu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum"):
            return self.bent(op, laws)
        if op.name in ("sqrt", "rsqrt", "reciprocal", "log") and laws[0] == TABLE:
            return LINEAR if op.name == "log" else TABLE
        if op.name == "cumsum":
            return _cumsum(op, laws[0])
        raise NotAffine(f"{op.name.strip('_')} of positions is not affine in them")

    def moved(self, op: Op, laws: list[Law]) -> Law:
        law = laws[0]
        if law.kind != "affine":
            return law
        value, rank = op.reads[0], len(op.reads[0].shape)
        steps, name, offset = law.steps, op.name, law.offset
        if law.is_uniform:
            return _uniform(offset, op.out.dtype, len(op.out.shape))
        if name == "_to_copy":
            return _in_dtype(Law("affine", offset, steps), op.out.dtype)
        if name in ("clone", "contiguous", "alias", "detach", "lift_fresh"):
            return law
        if name == "expand":
            return Law("affine", offset, (Fraction(0),) * (len(op.out.shape) - rank) + steps)
        if name in ("select", "slice", "flip"):
            return _picked(op, law)
        if name in ("transpose", "t", "permute"):
            order = list(range(rank))
            if name == "permute":
                order = [dim % rank for dim in op.args[1]]
            elif rank > 1:
                one, other = (dim % rank for dim in (op.args[1:3] if name == "transpose" else (0, 1)))
                order[one], order[other] = order[other], order[one]
            return Law("affine", offset, tuple(steps[dim] for dim in order))
        if name in ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze"):
            viewed = _viewed(value.shape, steps, op.out.shape)
            if viewed is not None:
                return Law("affine", offset, viewed)
        return LINEAR

    def compared(self, relation: str, op: Op, laws: list[Law]) -> Law:
        """Raises ``NotAffine`` unless both sides are affine."""
        gap = _sum(op, laws, -1)
        if gap.kind != "affine":
            if all(law.kind in ("mask", "fixed") or law.is_uniform for law in laws):
                return MASK
            raise NotAffine("what positions are compared with is not affine in them")
        self.edge(relation, gap, op.out.shape)
        return MASK

    def edge(self, relation: str, gap: Law, shape: Sequence[int]) -> None:
        reach = [step * (size - 1) for step, size in zip(gap.steps, shape, strict=True)]
        least = gap.offset + sum((each for each in reach if each < 0), Fraction(0))
        most = gap.offset + sum((each for each in reach if each > 0), Fraction(0))
        self.edges.append(Edge(relation, float(least), float(most), float(gap.offset)))

    def triangle(self, op: Op, law: Law) -> Law:
        diagonal = op.args[1] if len(op.args) > 1 else op.kwargs.get("diagonal", 0)
        rank = len(op.out.shape)
        steps = (Fraction(0),) * (rank - 2) + (Fraction(-1), Fraction(1))
        self.edge("le" if op.name == "tril" else "ge", Law("affine", Fraction(-diagonal), steps), op.out.shape)
        return _join([law, MASK])

    def bent(self, op: Op, laws: list[Law]) -> Law:
        """Affine in two pieces, with an edge between them."""
        bounds = [number for number in (*op.args[1:], *op.kwargs.values()) if isinstance(number, (int, float))]
        if laws[0].kind != "affine" or len(laws) > 1:
            raise NotAffine(f"{op.name} of positions is not affine in them")
        for bound in bounds or [0]:
            gap = Law("affine", laws[0].offset - Fraction(bound), laws[0].steps)
            self.edge("lt", gap, op.out.shape)
        return LINEAR

    def arithmetic(self, op: Op, laws: list[Law]) -> Law:
        if op.name == "neg":
            return _scaled(laws[0], Fraction(-1))
        if op.name in ("mul", "div"):
            return _product(op, laws)
        sign = 1 if op.name == "add" else -1
        found = _sum(op, laws, sign * Fraction(op.kwargs.get("alpha", 1)))
        if op.name == "rsub":
            found = _scaled(found, Fraction(-1))
        return _in_dtype(found, op.out.dtype)

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


# -- laws of operators ------------------------------------------------------------------------------------------------

_COMPARE = {name: name for name in ("lt", "le", "gt", "ge", "eq", "ne")} | {
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne"
}  # fmt: skip
_PLACING = frozenset("cat stack constant_pad_nd slice_scatter select_scatter diagonal_scatter repeat copy".split())
_SUMS = frozenset("sum mean bmm mm prod cumsum cumprod".split())


def _numbers(op: Op) -> list[Any]:
    """What an operator is given besides tensors."""
    found: list[Any] = []

    def visit(item: Any) -> None:
        if isinstance(item, (list, tuple)):
            for part in item:
                visit(part)
        elif not isinstance(item, Value):
            found.append(item)

    visit([op.args, list(op.kwargs.values())])
    return found


def _uniform(number: Any, dtype: torch.dtype, rank: int) -> Law:
    if isinstance(number, (bool, complex)) or not math.isfinite(number):
        return MASK
    return Law("affine", Fraction(number), (Fraction(0),) * rank)


def _in_dtype(law: Law, dtype: torch.dtype) -> Law:
    """The law of affine numbers in a dtype: exact, or only linear."""
    if law.kind != "affine" or law.is_uniform:
        return law
    if dtype is torch.bool or dtype not in EXACT:
        raise NotAffine(f"positions in {str(dtype).removeprefix('torch.')} are exact for short sequences only")
    if not dtype.is_floating_point and any(each.denominator != 1 for each in (law.offset, *law.steps)):
        raise NotAffine("positions are rounded")
    exact = all(_GRAIN % each.denominator == 0 and abs(each) < _LARGEST for each in (law.offset, *law.steps))
    return law if exact else LINEAR


def _filled(position: int | None, number: float | None = None) -> Callable[[Op, int], Law]:
    def law(op: Op, rank: int) -> Law:
        filler = number if position is None else op.args[position]
        return MASK if isinstance(filler, Value) or filler is None else _uniform(filler, op.out.dtype, rank)

    return law


def _arange(op: Op, rank: int) -> Law:
    numbers = [number for number in op.args if isinstance(number, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    return _in_dtype(Law("affine", Fraction(start), (Fraction(step),)), op.out.dtype)


_MAKERS: dict[str, Callable[[Op, int], Law]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(None, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(None, 1)),
    **dict.fromkeys(("full", "full_like"), _filled(1)),
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "eye"), lambda op, rank: MASK),
    "arange": _arange,
}


def _join(laws: Sequence[Law]) -> Law:
    """One of several laws, in pieces."""
    kinds = {"mask" if law.is_uniform or law.kind == "fixed" else law.kind for law in laws}
    if kinds <= {"mask"}:
        return MASK
    if kinds <= {"mask", "affine", "linear"}:
        return LINEAR
    if kinds <= {"mask", "table"}:
        return TABLE
    raise NotAffine("positions and powers of them are put side by side")


def _operands(op: Op, laws: Iterable[Law]) -> list[Law]:
    """The laws of the first two operands, each a tensor or a number."""
    queue = iter(laws)
    return [next(queue) if isinstance(arg, Value) else _uniform(arg, op.out.dtype, 0) for arg in op.args[:2]]


def _steps(law: Law, rank: int) -> tuple[Fraction, ...]:
    return (Fraction(0),) * (rank - len(law.steps)) + law.steps


def _scaled(law: Law, factor: Fraction) -> Law:
    if law.kind != "affine":
        return law
    return Law("affine", law.offset * factor, tuple(step * factor for step in law.steps))


def _sum(op: Op, laws: list[Law], factor: Fraction | int) -> Law:
    """First operand plus ``factor`` times the second, either of which may be a number."""
    rank = len(op.out.shape)
    both = _operands(op, laws)
    if all(law.kind == "affine" for law in both):
        one, other = both[0], _scaled(both[1], Fraction(factor))
        steps = tuple(a + b for a, b in zip(_steps(one, rank), _steps(other, rank), strict=True))
        return Law("affine", one.offset + other.offset, steps)
    return _join(both)


def _product(op: Op, laws: list[Law]) -> Law:
    if op.kwargs.get("rounding_mode") is not None:
        raise NotAffine("positions are divided and rounded")
    both = _operands(op, laws)
    one, other = both
    if op.name == "mul" and one.is_uniform:
        one, other = other, one
    kinds = {one.kind, other.kind}
    if one.kind == "affine" and other.is_uniform and (op.name == "mul" or other.offset):
        factor = other.offset if op.name == "mul" else 1 / other.offset
        scaled = _scaled(one, factor)
        steps = _steps(scaled, len(op.out.shape))
        return _in_dtype(Law("affine", scaled.offset, steps), op.out.dtype)
    growing = [law for law in both if law.kind in ("affine", "linear") and not law.is_uniform]
    if len(growing) > 1 or (growing and ((op.name == "div" and both[1] in growing) or "table" in kinds)):
        raise NotAffine("positions are multiplied with each other, or divided by")
    return _join(both)


def _power(op: Op, laws: list[Law]) -> Law:
    """exp of something linear, or a constant to the power of it."""
    operands = _operands(op, laws)
    base, exponent = (None, operands[0]) if op.name != "pow" else (operands[0], operands[1])
    if base is not None and base.kind == "table" and exponent.is_uniform:
        return TABLE
    if base is not None and not (base.kind in ("mask", "fixed") or base.is_uniform):
        raise NotAffine("a power of positions is not affine in them")
    if exponent.kind == "table":
        raise NotAffine("a power of a power of positions")
    return TABLE


def _cumsum(op: Op, law: Law) -> Law:
    dim = op.args[1] % max(1, len(op.out.shape))
    if law.is_uniform:
        steps = tuple(law.offset if index == dim else Fraction(0) for index in range(len(op.out.shape)))
        return _in_dtype(Law("affine", law.offset, steps), op.out.dtype)
    if dim in op.reads[0].uniform and law.kind in ("fixed", "mask"):
        return LINEAR
    raise NotAffine("a running sum of positions is not affine in them")


def _picked(op: Op, law: Law) -> Law:
    shape, steps = op.reads[0].shape, list(law.steps)
    if op.name == "flip":
        offset = law.offset
        for dim in (dim % len(shape) for dim in op.args[1]):
            offset, steps[dim] = offset + steps[dim] * (shape[dim] - 1), -steps[dim]
        return Law("affine", offset, tuple(steps))
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(shape)
    start = op.args[2] if len(op.args) > 2 and op.args[2] is not None else 0
    start = max(0, start + shape[dim]) if start < 0 else min(start, shape[dim])
    offset = law.offset + steps[dim] * start
    if op.name == "select":
        return Law("affine", offset, (*steps[:dim], *steps[dim + 1 :]))
    if len(op.args) > 4:
        steps[dim] *= op.args[4]
    return Law("affine", offset, tuple(steps))


def _viewed(shape: Sequence[int], steps: Sequence[Fraction], out: Sequence[int]) -> tuple[Fraction, ...] | None:
    """The steps of affine numbers in another shape; None where they are not affine in it."""
    found: list[Fraction] = []
    source = [(size, step) for size, step in zip(shape, steps, strict=True) if size != 1]
    for size in reversed(out):
        if size == 1:
            found.append(Fraction(0))
            continue
        if not source:
            return None
        have, step = source.pop()
        while have < size and source:  # merged: the outer one must go on where the inner one ends
            more, outer = source.pop()
            if outer != step * have:
                return None
            have *= more
        if have % size:
            return None
        found.append(step)
        if have > size:
            source.append((have // size, step * size))
    return None if source else tuple(reversed(found))
