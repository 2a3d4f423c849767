"""Where a function changes its mind: the comparisons its sizes take part in, and the sizes at which they turn.

While a function runs, the sizes it asks tensors for are numbers that remember being compared. A comparison that came
out the same way in all runs, with operands that move with the batch or the length, comes out the other way somewhere:
``Watch.turning_points`` says where, so that the function can be compared there, too.
"""

from __future__ import annotations

import math
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Place = tuple[types.CodeType, int]
"""A comparison in a function's code: the code object and the instruction."""

Point = tuple[int, int]
"""(batch, length) of a run."""


@dataclass
class _Seen:
    """What a comparison has come to so far."""

    outcomes: set[bool] = field(default_factory=set[bool])
    gaps: dict[Point, float] = field(default_factory=dict[Point, float])
    """The difference of its operands in each run, the smallest where it was made several times."""


class Watch:
    """What the comparisons of one function came to, over many runs."""

    def __init__(self) -> None:
        self.seen: dict[Place, _Seen] = {}
        self.now: Point = (0, 0)

    def note(self, place: Place, gap: float, outcome: bool) -> None:
        seen = self.seen.setdefault(place, _Seen())
        seen.outcomes.add(outcome)
        if abs(gap) <= abs(seen.gaps.get(self.now, math.inf)):
            seen.gaps[self.now] = gap

    def run(self, fn: Callable[..., Any], inputs: Sequence[Any], batch: int, length: int) -> Any:
        """``fn(*inputs)``, watched."""
        self.now = (batch, length)
        with _Sizes(self):
            return fn(*inputs)

    def turning_points(self) -> Iterator[tuple[str, int]]:
        """("B" or "T", size): where comparisons that have had one outcome would have the other."""
        for seen in self.seen.values():
            if len(seen.outcomes) == 1:
                yield from _zeros(seen.gaps)


def _zeros(gaps: dict[Point, float]) -> Iterator[tuple[str, int]]:
    """Sizes around which the operands meet, going by how the gap moves with either size alone."""
    for axis, letter in enumerate("BT"):
        points = sorted(gaps)
        for one in points:
            others = [other for other in points if other[axis] > one[axis] and other[1 - axis] == one[1 - axis]]
            if not others:
                continue
            slope = (gaps[others[-1]] - gaps[one]) / (others[-1][axis] - one[axis])
            if slope:
                meet = one[axis] - gaps[one] / slope
                yield from ((letter, round(meet) + step) for step in (-1, 0, 1) if meet > 1)
            break


class _Sizes(TorchFunctionMode):
    """Sizes of tensors come as watched numbers."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func == Tensor.size or func == _SHAPE:
            return _Number.of(out, self.watch) if isinstance(out, int) else _numbers(out, self.watch)
        return out


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


def _numbers(sizes: torch.Size, watch: Watch) -> tuple[Any, ...]:
    return tuple(_Number.of(size, watch) for size in sizes)


class _Number(int):
    """A size, or what was computed from sizes."""

    watch: Watch

    @staticmethod
    def of(value: int, watch: Watch) -> _Number:
        number = _Number(value)
        number.watch = watch
        return number

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self._noted(int(self), int(self) != 0)

    def _noted(self, gap: float, outcome: bool) -> bool:
        frame = sys._getframe(2)
        self.watch.note((frame.f_code, frame.f_lasti), gap, outcome)
        return outcome


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    compute = getattr(operator, name)

    def compare(self: _Number, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        plain = other if isinstance(other, float) else int(other)
        return self._noted(int(self) - plain, compute(int(self), plain))

    return compare


def _arithmetic(name: str) -> Callable[..., Any]:
    compute = getattr(int, name)

    def arithmetic(self: _Number, *others: Any) -> Any:
        value = compute(int(self), *others)
        return _Number.of(value, self.watch) if type(value) is int else value

    return arithmetic


for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(_Number, f"__{_name}__", _comparison(_name))
for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Number, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(_Number, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in ("neg", "pos", "abs"):
    setattr(_Number, f"__{_name}__", _arithmetic(f"__{_name}__"))
