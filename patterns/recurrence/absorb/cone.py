"""Cones: the operators between a role's value and a tensor further up, and what they compute.

A rule that absorbs a function (l2norm, a gate activation) looks for the smallest cone above the role's value that has
one data source and computes the rule's definition. Whether it does is decided by running the cone in float64 on
probes, with the operators a cone may hold fixed by the rule: nothing with a threshold that the rule's probes do not
cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine.evaluate import PRECISE, Region
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import CannotReduce, EvaluationError
from kdacompile.patterns.recurrence.absorb.axes import POINTWISE, SAME_DATA, above, broadcast
from kdacompile.patterns.recurrence.absorb.scope import Scope

MAX_VALUES = 48
"""Values looked at above a role; activations and norms are far smaller."""

WHOLE_LIMIT = 1 << 22
"""Elements up to which a cone that cannot be cut down is run whole."""

Allowed = Callable[[Op], bool]


@dataclass(frozen=True)
class Cone:
    """Operators between ``sources`` (data first) and ``bottom``."""

    bottom: Placement
    sources: tuple[Placement, ...]
    ops: frozenset[Op]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(op.name for op in self.ops)


def upstream(value: Value, allowed: Allowed) -> list[Value]:
    """Values above ``value`` that allowed operators reach, nearest first."""
    seen: set[Value] = set()
    stack = [value]
    while stack and len(seen) < MAX_VALUES:
        op = stack.pop(0).op
        if op is None or not allowed(op):
            continue
        fresh = [read for read in op.reads if not read.const and read not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return sorted(seen, key=lambda found: -found.index)


def between(value: Value, sources: set[Value], allowed: Allowed) -> frozenset[Op] | None:
    """The operators from ``sources`` to ``value``, None if something else enters or a source is not read."""
    ops: set[Op] = set()
    stack = [value]
    met: set[Value] = set()
    while stack:
        current = stack.pop()
        if current in sources:
            met.add(current)
            continue
        op = current.op
        if current.const or op in ops:
            continue
        if op is None or not allowed(op):
            return None
        ops.add(op)
        stack.extend(op.reads)
    return frozenset(ops) if met == sources else None


def label(bottom: Placement, ops: frozenset[Op], sizes: dict[str, int]) -> dict[Value, str] | None:
    """Axes of every value of a cone that layouts and pointwise operators lead to."""
    found = {bottom.value: bottom.axes}
    for op in sorted(ops, key=lambda op: -op.out.index):
        if op.out not in found:
            continue
        axes = found[op.out]
        for read in op.reads:
            if op.name in SAME_DATA:
                text = above(op, axes, sizes)
                if text is None:
                    return None
            elif op.name in POINTWISE:
                text = broadcast(op, axes, read)
            else:
                continue
            if found.setdefault(read, text) != text:
                return None
    return found


def cones(
    bottom: Placement,
    scope: Scope,
    sizes: dict[str, int],
    names: frozenset[str],
    others: Sequence[Value | None] = (None,),
) -> Iterator[Cone]:
    """Cones above ``bottom`` with one data source and one of ``others`` (None: no other), smallest first."""
    allowed = allows(scope, names)
    for value in upstream(bottom.value, allowed):
        if not scope.holds(value) or not scope.same_device(value, bottom.value):
            continue
        for other in others:
            sources = [value] if other is None else [value, other]
            ops = between(bottom.value, set(sources), allowed) if other is not value else None
            axes = label(bottom, ops, sizes) if ops else None
            if not ops or axes is None or any(source not in axes for source in sources):
                continue
            if scope.lets_gradients_through(ops, sources):
                placements = tuple(replace(bottom, value=source, axes=axes[source]) for source in sources)
                yield Cone(bottom, placements, ops)


def allows(scope: Scope, names: frozenset[str]) -> Allowed:
    return lambda op: op.name in names and scope.computes(op)


# -- running one
# --------------------------------------------------------------------------------------------------------


class Runner:
    """A cone ready to run on canonical tensors, with batch rows and tokens cut down where it lets them be."""

    def __init__(self, cone: Cone, sizes: dict[str, int], *, at_most: dict[str, int]) -> None:
        self.cone = cone
        stop = {placement.value for placement in cone.sources}
        self.region = Region(
            list(ancestors([cone.bottom.value], stop.__contains__)),
            [placement.value for placement in cone.sources],
            [cone.bottom.value],
        )
        self.full = sizes
        self.sizes = {axis: min(size, at_most.get(axis, size)) for axis, size in sizes.items()}

    def shape(self, index: int) -> list[int]:
        """Canonical shape of a source in this run: size one for axes it lacks."""
        placement = self.cone.sources[index]
        axes = placement.axes.replace("*", "HK")
        return [self.sizes[axis] if axis in axes else 1 for axis in placement.order]

    def whole(self) -> bool:
        """Give up on cutting down; False if that is too much."""
        largest = max(math.prod(out.shape) for op in self.cone.ops for out in op.outs)
        if self.sizes == self.full or largest > WHOLE_LIMIT:
            return False
        self.sizes = self.full
        return True

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The cone's result in the role's canonical order; raises CannotReduce or EvaluationError."""
        given = zip(self.cone.sources, tensors, strict=True)
        result = self.region([source.from_canonical(tensor) for source, tensor in given])[0]
        for name, args in self.cone.bottom.steps(self.sizes):
            result = getattr(result, name)(*args)
        return result


def agrees(have: Tensor, want: Tensor, *, absolute: float = 1e-14) -> bool:
    """Equal in float64 up to rounding, where ``have`` is finite (a spelling may overflow where the op does not)."""
    have, want = torch.broadcast_tensors(have, want)
    finite = torch.isfinite(have)
    close = (have - want).abs() <= PRECISE * want.abs() + absolute
    return bool(finite.any()) and bool((close | ~finite).all())


def holds_for(runner: Runner, check: Callable[[Runner], bool]) -> bool:
    """``check`` on a runner, run whole if it cannot be cut down, False if it does not run at all."""
    while True:
        try:
            return check(runner)
        except CannotReduce:
            if not runner.whole():
                return False
        except EvaluationError:
            return False
