"""What no input reaches, computed as the model computes it and in float64.

Where the two are the same up to rounding, float64 stands for both; where they are not (a mask from positions in
bfloat16), the model's own numbers are the function.

A prompt of 4096 tokens has masks of 16 million entries, each of which follows from few numbers at its place. Such a
constant waits until it is asked for, and then it is made only where it is looked at: part by part, or its end alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine.reduced import Cut, EvaluationError, Operand, whole
from kdacompile.patterns.engine.rounded import ROUNDINGS, are_same, float64, keeps_numbers, settled, widened_all
from kdacompile.patterns.engine.steps import call

PART = 1 << 18
"""Numbers of a constant that are looked at together: what is made of them stays in a processor's caches."""

Place = tuple[int, int, int]
"""A dimension, counted from the last, where a part begins along it, and how long it is."""

Pair = tuple[Tensor, Tensor]
"""A constant as the model computes it, and in float64, or the same tensor twice where these are one."""


class Constants:
    """Those of one region."""

    def __init__(self, instead: Mapping[Value, Tensor], *, rounds: bool) -> None:
        """``instead``, ``rounds``: as for ``evaluate.Region``."""
        self.instead, self.rounds = instead, rounds
        self.pairs: dict[Value, Pair] = {}
        self.loaded: dict[Value, Operand] = {}
        """What stands for them in a run."""
        self.waiting: dict[Value, Op] = {}

    def both(self, value: Value) -> Pair:
        if value not in self.pairs:
            if value in self.waiting:
                self.compute(self.waiting[value])
            elif value.payload is None:
                raise EvaluationError(f"{value} is neither an input nor computed in the region")
            else:
                own = value.payload.detach().cpu()
                other = self.instead.get(value)
                self.pairs[value] = own, own if other is None else other.to(float64(own.dtype))
        return self.pairs[value]

    def load(self, value: Value) -> Operand:
        if value not in self.loaded:
            own, exact = self.both(value)
            if self.rounds:
                data = own.to(exact.dtype)
            else:
                data = exact if own is exact else settled(own, exact, 16 if self.instead else ROUNDINGS)
            self.loaded[value] = Operand(data, tuple(map(whole, data.shape)), const=True)
        return self.loaded[value]

    def prepare(self, op: Op) -> None:
        """Compute what an operator makes of constants, once for all runs, unless it can wait."""
        if self.can_wait(op):
            self.waiting[op.out] = op
        else:
            self.compute(op)

    def compute(self, op: Op) -> None:
        if op.out not in self.pairs:
            self.pairs.update(zip(op.outs, self.computed(op, [self.both(value) for value in op.reads]), strict=False))

    def computed(self, op: Op, operands: Sequence[Pair]) -> list[Pair]:
        same = all(own is exact for own, exact in operands)
        narrow = any(out.dtype != float64(out.dtype) for out in op.outs)
        if same and narrow and keeps_numbers(op):  # masks, which may have many
            exact = own = call(op, own=True)([pair[0] for pair in operands])
        else:
            exact = call(op)(widened_all([pair[1] for pair in operands]))
            own = call(op, own=True)([pair[0] for pair in operands]) if narrow or not same else exact
        exact = [self.instead.get(out, b) for out, b in zip(op.outs, exact, strict=False)]
        return [(a, a if a is b or are_same(a, b) else b) for a, b in zip(own, exact, strict=False)]

    # -- large ones

    def can_wait(self, op: Op) -> bool:
        """Whether a constant is large, one and the same in the model's dtype and in float64, and each of its numbers
        follows from those at its place.
        """
        if math.prod(op.out.shape) <= PART or len(op.outs) > 1 or self.rounds or op.out in self.instead:
            return False
        if op.name != "expand" and torch.Tag.pointwise not in op.target.tags:
            return False
        if op.out.dtype.is_floating_point and not keeps_numbers(op):
            return False
        return all(self.waits(value) or self.both(value)[0] is self.both(value)[1] for value in op.reads)

    def waits(self, value: Value) -> bool:
        return value in self.waiting and value not in self.pairs

    def part(self, value: Value, places: Sequence[Place]) -> Tensor:
        """A constant at some places; one that waits is made there alone."""
        if not self.waits(value):
            return _narrowed(self.both(value)[1], places)
        op = self.waiting[value]
        parts = [self.part(read, places) for read in op.reads]
        if op.name == "expand":
            return parts[0].expand(_narrowed(torch.empty(()).expand(op.out.shape), places).shape)
        return self.computed(op, [(part, part) for part in parts])[0][0]

    def stand_in(self, value: Value) -> Operand:
        """The shape of one that waits, without its memory."""
        shape = torch.empty((), dtype=value.dtype).expand(value.shape)
        return Operand(shape, tuple(map(whole, value.shape)), const=True)

    def read(self, value: Value, cuts: Sequence[Cut]) -> Tensor:
        """The numbers of one that waits, where an operator cuts it down so; its end alone, if that is all it reads."""
        if not cuts or not all(tail for *_, tail in cuts):
            return self.load(value).tensor
        return self.part(value, [(dim - len(value.shape), value.shape[dim] - size, size) for _, dim, size, _ in cuts])


def _narrowed(data: Tensor, places: Sequence[Place]) -> Tensor:
    for dim, start, size in places:
        if -dim <= data.dim() and data.shape[dim] != 1:
            data = data.narrow(dim, start, size)
    return data


def _alone(value: Value) -> Constants:
    constants = Constants({}, rounds=False)
    for op in sorted(ancestors([value], lambda _: False), key=lambda op: op.outs[0].index):
        constants.prepare(op)
    return constants


def constant(value: Value) -> Tensor:
    """The data of a value no input reaches; EvaluationError if it cannot be computed here.

    In the model's dtype where that holds them as they are, else in float64.
    """
    with torch.no_grad():
        return _alone(value).load(value).tensor


def parts_of_constant(value: Value) -> Iterator[tuple[Place, Tensor]]:
    """The same in parts along one dimension."""
    with torch.no_grad():
        constants = _alone(value)
        if not constants.waits(value):
            yield from parts(constants.load(value).tensor)
            return
        for place in places_of(value.shape):
            yield place, constants.part(value, [place])


def parts(data: Tensor) -> Iterator[tuple[Place, Tensor]]:
    return ((place, _narrowed(data, [place])) for place in places_of(data.shape))


def places_of(shape: Sequence[int]) -> Iterator[Place]:
    """Where the parts of a tensor are: along the first dimension that has several places."""
    dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    sizes, entries = shape or [1], math.prod(shape)
    step = max(1, PART * sizes[dim] // max(1, entries))
    for start in range(0, sizes[dim], step) if entries else ():
        yield dim - len(sizes), start, min(step, sizes[dim] - start)
