"""Run a region of the functional graph on chosen inputs, in float64; batch and heads are cut down where nothing mixes
them.

Rounding is left out on purpose: every floating dtype becomes float64, so that what is compared with the recurrence is
the function, not its rounding. A model's real sizes would make probing slow, so inputs may come with fewer batch rows
and heads than the graph was captured with (``lanes.py``). Sizes written into the graph (views, expands, zeros) are then
scaled along. An operator that looks at one particular row of a reduced dimension raises ``LaneError``, and the region
must be run whole. So does a constant that varies along one, but where the caller has looked at it whole (``tails``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value, ancestors, map_values
from kdacompile.patterns.engine.lanes import (
    SIZED,
    Factors,
    Lane,
    cut,
    cuts,
    expand_sizes,
    out_dims,
    regrouped,
    view_sizes,
    whole,
)


class EvaluationError(Exception):
    """An operator refused its inputs in float64 on the CPU."""


Step = Callable[[list[Tensor]], list[Tensor]]
"""One operator made ready for operands of known sizes."""


@dataclass(frozen=True)
class _Planned:
    """A step with where its operands come from (a tensor: a constant) and what is not needed any more after it."""

    sources: list[Value | Tensor]
    step: Step
    outs: list[Value]
    dead: list[Value]


def _float64(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


class Region:
    """Operators between ``inputs`` and ``outputs``, ready to run many times."""

    def __init__(
        self,
        ops: Sequence[Op],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        instead: Mapping[Value, Tensor] | None = None,
        tails: frozenset[int] = frozenset(),
    ) -> None:
        """``instead`` gives constants other data than the graph's. ``tails``: along dimensions of these captured sizes
        a constant may be cut down to its end; whoever allows it knows what the constant is elsewhere.
        """
        self.instead = instead or {}
        self.tails = tails
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.ops = sorted(ops, key=lambda op: op.outs[0].index)
        last: dict[Value, int] = {}
        for index, op in enumerate(self.ops):
            for value in op.reads:
                last[value] = index
        keep = set(self.outputs)
        self.dead: list[list[Value]] = [[] for _ in self.ops]
        for value, index in last.items():
            if value not in keep and not value.const:
                self.dead[index].append(value)
        self.constants: dict[Value, Lane] = {}
        self.moving = set(self.inputs)
        """What depends on the inputs, one of which may be a constant of the graph (a mask)."""
        for op in self.ops:
            if not self.moving.isdisjoint(op.reads):
                self.moving.update(op.outs)
        self.plans: dict[tuple[torch.Size, ...], list[_Planned]] = {}
        """What a run does, by the sizes of its inputs: probes differ in their numbers only."""

    def __call__(
        self, tensors: Sequence[Tensor], factors: Mapping[Value, tuple[Factors, ...]] | None = None
    ) -> list[Tensor]:
        """Outputs for ``tensors``, given in the order of ``inputs`` (any of their dimensions may be reduced).

        ``factors``: dimensions of inputs that are products, only some of whose factors are reduced. They are the same
        in every run of these sizes.
        """
        tensors = [tensor.to(_float64(tensor.dtype)) for tensor in tensors]
        sizes = tuple(tensor.shape for tensor in tensors)
        with torch.no_grad():
            if sizes in self.plans:
                return self.again(self.plans[sizes], tensors)
            plan: list[_Planned] = []
            results = self.first(tensors, plan, factors or {})
        self.plans[sizes] = plan
        return results

    def first(
        self, tensors: Sequence[Tensor], plan: list[_Planned], factors: Mapping[Value, tuple[Factors, ...]]
    ) -> list[Tensor]:
        """Run while working out how each operator is to be run on inputs of these sizes."""
        env: dict[Value, Lane] = {}
        for value, tensor in zip(self.inputs, tensors, strict=True):
            pairs = tuple(((a, b),) for a, b in zip(value.shape, tensor.shape, strict=True))
            env[value] = Lane(tensor, factors.get(value, pairs))
        for op, dead in zip(self.ops, self.dead, strict=True):
            self.step(op, env, dead, plan)
            for value in dead:
                env.pop(value, None)
        return [self.load(value, env).tensor for value in self.outputs]

    def again(self, plan: list[_Planned], tensors: Sequence[Tensor]) -> list[Tensor]:
        env = dict(zip(self.inputs, tensors, strict=True))
        for item in plan:
            results = item.step([x if isinstance(x, Tensor) else env[x] for x in item.sources])
            env.update(zip(item.outs, results, strict=False))
            for value in item.dead:
                env.pop(value, None)
        return [env[value] if value in env else self.load(value, {}).tensor for value in self.outputs]

    def load(self, value: Value, env: dict[Value, Lane]) -> Lane:
        if value in env:
            return env[value]
        if value.payload is not None:
            data = self.instead.get(value, value.payload).detach().cpu()
            return Lane(data.to(_float64(data.dtype)), tuple(map(whole, data.shape)), const=True)
        if value in self.constants:
            return self.constants[value]
        raise EvaluationError(f"{value} is neither an input nor computed in the region")

    def step(self, op: Op, env: dict[Value, Lane], dead: list[Value], plan: list[_Planned]) -> None:
        if op.out.const and op.out in self.constants:
            return
        lanes = [self.load(value, env) for value in op.reads]
        step = _reduced(op, lanes, self.tails) if any(lane.reduced for lane in lanes) else _call(op)
        results = step([lane.tensor for lane in lanes])
        sources = [value if value in env else lane.tensor for value, lane in zip(op.reads, lanes, strict=True)]
        viewed = regrouped(lanes[0].dims, op.args[1]) if op.name in SIZED and lanes[0].reduced else None
        for value, result in zip(op.outs, results, strict=False):
            dims = out_dims(value, result, lanes) if viewed is None else viewed
            lane = Lane(result, dims, const=value.const and value not in self.moving)
            if lane.const and not lane.reduced:
                self.constants[value] = lane
            else:
                env[value] = lane
        if not all(value in self.constants for value in op.outs):
            plan.append(_Planned(sources, step, op.outs, dead))


def constant(value: Value) -> Tensor:
    """The data of a value no input reaches; EvaluationError if it cannot be computed here."""
    return Region(list(ancestors([value], lambda _: False)), [], [value])([])[0]


_FILLERS = {"zeros": 0.0, "ones": 1.0, "zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}


def _call(op: Op) -> Step:
    """The operator itself; floating dtypes are float64 and devices the CPU."""
    if op.name in _FILLERS or op.name in ("full", "full_like", "new_full", "empty", "empty_like", "new_empty"):
        filled = _filled(op)
        return lambda _: [filled]
    kwargs = {
        name: item
        for name, item in op.kwargs.items()
        if name not in ("device", "layout", "pin_memory", "memory_format")
    }
    if isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs["dtype"] = _float64(kwargs["dtype"])
    elif op.name in ("arange", "eye", "linspace", "scalar_tensor") and op.out.dtype.is_floating_point:
        kwargs["dtype"] = torch.float64
    if op.name in SIZED:
        sizes = op.args[1]
        return lambda tensors: [tensors[0].reshape(sizes)]

    # The softmax's third argument asks for a dtype that float64 is not rounded to.
    given = (*op.args[:2], False) if op.name == "_softmax" else op.args

    def call(tensors: list[Tensor]) -> list[Tensor]:
        queue = iter(tensors)
        args = [next(queue) if isinstance(x, Value) else map_values(x, lambda _: next(queue)) for x in given]
        named = map_values(kwargs, lambda _: next(queue)) if kwargs else kwargs
        try:
            result = op.target(*args, **named)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise EvaluationError(f"{op.name}: {error}") from error
        return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]

    return call


def _filled(op: Op) -> Tensor:
    """A constant tensor without its memory: one element, expanded. ``empty`` is NaN, so that a read of it shows."""
    dtype = _float64(op.out.dtype)
    if op.name in _FILLERS:
        fill: Any = _FILLERS[op.name]
    elif op.name.endswith("empty") or op.name == "empty_like":
        fill = math.nan if dtype.is_floating_point else 0
    else:
        fill = op.args[1] if op.name != "new_full" else op.args[2]
        if isinstance(fill, Value):
            raise EvaluationError("a tensor filled with a computed value")
    return torch.full((), fill, dtype=dtype).expand(op.out.shape)


def _reduced(op: Op, lanes: list[Lane], tails: frozenset[int]) -> Step:
    """An operator some of whose operands have reduced dimensions."""
    if op.name in SIZED:
        sizes = view_sizes(lanes[0].dims, op.args[1])
        return lambda tensors: [tensors[0].reshape(sizes)]
    if op.name == "expand":
        sizes = expand_sizes(lanes[0], op.out.shape)
        return lambda tensors: [tensors[0].expand(sizes)]
    call = _call(op)
    where = cuts(op, lanes, tails)
    return (lambda tensors: call(cut(tensors, where))) if where else call
