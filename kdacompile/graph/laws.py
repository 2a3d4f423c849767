"""The laws of constants made of positions, operator by operator: see :mod:`kdacompile.graph.positions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import segments

EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that hold every position there will be."""

_GRAIN, _OFFSET = 256, 1 << 20
"""Numbers of this fineness, and offsets below this, are computed with exactly in each of them."""
_STEP = {torch.int32: 1 << 14, torch.float32: 1 << 12}
"""So are steps below these, for 2^12 positions and more; in other dtypes steps are held to the bound of offsets."""


class NotAffine(Exception):
    """A constant of the region is not known at other sizes; the message says why."""


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


def uniform(number: Any, rank: int) -> Law:
    if isinstance(number, (bool, complex)) or not math.isfinite(number):
        return MASK
    return Law("affine", Fraction(number), (Fraction(0),) * rank)


def in_dtype(law: Law, dtype: torch.dtype) -> Law:
    """The law of affine numbers in a dtype: exact, or only linear."""
    if law.kind != "affine" or law.is_uniform:
        return law
    if dtype is torch.bool or dtype not in EXACT:
        raise NotAffine(f"positions in {str(dtype).removeprefix('torch.')} are exact for short sequences only")
    if not dtype.is_floating_point and any(each.denominator != 1 for each in (law.offset, *law.steps)):
        raise NotAffine("positions are rounded")
    steep = any(abs(step) >= _STEP.get(dtype, _OFFSET) for step in law.steps)
    if steep and dtype is torch.int32:
        raise NotAffine("positions times a number that large do not fit 32 bits")
    fine = all(_GRAIN % number.denominator == 0 for number in (law.offset, *law.steps))
    return law if fine and not steep and abs(law.offset) < _OFFSET else LINEAR


def _filled(position: int | None, number: float | None = None) -> Callable[[Op, int], Law]:
    def law(op: Op, rank: int) -> Law:
        filler = number if position is None else op.args[position]
        return MASK if isinstance(filler, Value) or filler is None else uniform(filler, rank)

    return law


def _arange(op: Op, rank: int) -> Law:
    numbers = [number for number in op.args if isinstance(number, (int, float))]
    start, step = (numbers[0] if len(numbers) > 1 else 0), (numbers[2] if len(numbers) > 2 else 1)
    return in_dtype(Law("affine", Fraction(start), (Fraction(step),)), op.out.dtype)


MAKERS: dict[str, Callable[[Op, int], Law]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filled(None, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filled(None, 1)),
    **dict.fromkeys(("full", "full_like"), _filled(1)),
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "eye"), lambda op, rank: MASK),
    "arange": _arange,
}


def join(laws: Sequence[Law]) -> Law:
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
    return [next(queue) if isinstance(arg, Value) else uniform(arg, 0) for arg in op.args[:2]]


def _steps(law: Law, rank: int) -> tuple[Fraction, ...]:
    return (Fraction(0),) * (rank - len(law.steps)) + law.steps


def scaled(law: Law, factor: Fraction) -> Law:
    if law.kind != "affine":
        return law
    return Law("affine", law.offset * factor, tuple(step * factor for step in law.steps))


def summed(op: Op, laws: list[Law], factor: Fraction | int) -> Law:
    """First operand plus ``factor`` times the second, either of which may be a number."""
    rank = len(op.out.shape)
    both = _operands(op, laws)
    if all(law.kind == "affine" for law in both):
        one, other = both[0], scaled(both[1], Fraction(factor))
        steps = tuple(a + b for a, b in zip(_steps(one, rank), _steps(other, rank), strict=True))
        return Law("affine", one.offset + other.offset, steps)
    return join(both)


def product(op: Op, laws: list[Law]) -> Law:
    if op.kwargs.get("rounding_mode") is not None:
        raise NotAffine("positions are divided and rounded")
    both = _operands(op, laws)
    one, other = both
    if op.name == "mul" and one.is_uniform:
        one, other = other, one
    kinds = {one.kind, other.kind}
    if one.kind == "affine" and other.is_uniform and (op.name == "mul" or other.offset):
        factor = other.offset if op.name == "mul" else 1 / other.offset
        law = scaled(one, factor)
        return in_dtype(Law("affine", law.offset, _steps(law, len(op.out.shape))), op.out.dtype)
    growing = [law for law in both if law.kind in ("affine", "linear") and not law.is_uniform]
    if len(growing) > 1 or (growing and ((op.name == "div" and both[1] in growing) or "table" in kinds)):
        raise NotAffine("positions are multiplied with each other, or divided by")
    return join(both)


def power(op: Op, laws: list[Law]) -> Law:
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


def running_sum(op: Op, law: Law) -> Law:
    dim = op.args[1] % max(1, len(op.out.shape))
    if law.is_uniform:
        steps = tuple(law.offset if index == dim else Fraction(0) for index in range(len(op.out.shape)))
        return in_dtype(Law("affine", law.offset, steps), op.out.dtype)
    if dim in op.reads[0].uniform and law.kind in ("fixed", "mask"):
        return LINEAR
    raise NotAffine("a running sum of positions is not affine in them")


def continued(op: Op, laws: list[Law]) -> Law | None:
    """Of affine parts of which each goes on where the one before ends; None where they do not."""
    rank, parts = len(op.out.shape), op.args[0]
    if len(laws) != len(parts) or any(law.kind != "affine" or len(law.steps) != rank for law in laws):
        return None
    dim = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % rank
    sizes = [value.shape[dim] for value in parts]
    along = next((law.steps[dim] for law, size in zip(laws, sizes, strict=True) if size > 1), None)
    if along is None:
        return None
    steps, at = list(laws[0].steps), laws[0].offset
    steps[dim] = along
    for law, size in zip(laws, sizes, strict=True):
        own = list(law.steps)
        if size == 1:
            own[dim] = along
        if own != steps or law.offset != at:
            return None
        at += along * size
    return Law("affine", laws[0].offset, tuple(steps))


def picked(op: Op, law: Law) -> Law:
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


def indexed(op: Op, laws: list[Law]) -> Law:
    """Affine numbers at affine places: affine, where no place is counted from the end."""
    places, rank = op.args[1], len(op.out.shape)
    if len(places) != len(laws[0].steps) or len(laws) != len(places) + 1:
        return LINEAR
    offset, steps = laws[0].offset, [Fraction(0)] * rank
    for step, law, place in zip(laws[0].steps, laws[1:], places, strict=True):
        reach = [each * (size - 1) for each, size in zip(law.steps, place.shape, strict=False)]
        if law.kind != "affine" or law.offset + sum(each for each in reach if each < 0) < 0:
            return LINEAR
        offset += step * law.offset
        for index, each in enumerate(_steps(law, rank)):
            steps[index] += step * each
    return Law("affine", offset, tuple(steps))


def viewed(shape: Sequence[int], steps: Sequence[Fraction], out: Sequence[int]) -> tuple[Fraction, ...] | None:
    """The steps of affine numbers in another shape; None where they are not affine in it."""
    found, runs = [Fraction(0)] * len(out), segments(shape, out)
    if runs is None:
        return None
    for before, after in runs:
        if any(steps[outer] != steps[inner] * shape[inner] for outer, inner in pairwise(before)):
            return None  # dimensions that are merged must go on where the inner one ends
        step = steps[before[-1]]
        for dim in reversed(after):
            found[dim], step = step, step * out[dim]
    return tuple(found)
