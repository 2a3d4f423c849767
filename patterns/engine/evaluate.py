"""Run a region of the functional graph on chosen inputs, in float64; batch and heads are cut down where nothing mixes
them.

Rounding is left out on purpose: every floating dtype becomes float64, so that what is compared with the recurrence is
the function, not its rounding. Constants are computed twice, as the model computes them and in float64: where the two
are the same up to rounding, float64 stands for both; where they are not (a mask from positions in bfloat16), the
model's own numbers are the function. A model's real sizes would make probing slow, so inputs may come with fewer batch
rows and heads than the graph was captured with (``reduced.py``). Sizes written into the graph (views, expands, zeros)
are then scaled along. An operator that looks at one particular row of a reduced dimension raises ``CannotReduce``, and
the region must be run whole. So does a constant that varies along one, but where the caller has looked at it whole
(``tails``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdacompile import compat
from kdacompile.graph.ir import Op, Value, ancestors, map_values
from kdacompile.patterns.engine.reduced import (
    SIZED,
    Cut,
    EvaluationError,
    Factors,
    Operand,
    cut,
    cuts,
    expand_sizes,
    out_dims,
    regrouped,
    view_sizes,
    whole,
)
from kdacompile.patterns.engine.rounded import (
    ROUNDINGS,
    are_same,
    float64,
    keeps_numbers,
    settled,
    widened,
    widened_all,
)
from kdacompile.patterns.engine.vocabulary import ELEMENTWISE

Step = Callable[[list[Tensor]], list[Tensor]]
"""One operator made ready for operands of known sizes."""


@dataclass(frozen=True)
class Planned:
    """A step with where its operands come from (a tensor: a constant) and what is not needed any more after it."""

    op: Op
    sources: list[Value | Tensor]
    step: Step
    where: list[Cut]
    """Operands that are cut down before the operator runs."""
    dead: list[Value]

    @property
    def outs(self) -> list[Value]:
        return self.op.outs


class Region:
    """Operators between ``inputs`` and ``outputs``, ready to run many times."""

    def __init__(
        self,
        ops: Sequence[Op],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        instead: Mapping[Value, Tensor] | None = None,
        tails: frozenset[int] = frozenset(),
        *,
        rounds: bool = False,
    ) -> None:
        """``instead`` gives constants, computed ones too, other data than the graph's. ``tails``: along dimensions of
        these captured sizes a constant may be cut down to its end; whoever allows it knows what the constant is
        elsewhere. ``rounds``: constants are those that the model computes, not what these are rounded from.
        """
        self.rounds = rounds
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
        self.twice: dict[Value, tuple[Tensor, Tensor]] = {}
        """Constants as the model computes them, and in float64, or the same tensor twice where these are one."""
        self.constants: dict[Value, Operand] = {}
        """What stands for them in a run."""
        self.moving = set(self.inputs)
        """What depends on the inputs, one of which may be a constant of the graph (a mask)."""
        for op in self.ops:
            if not self.moving.isdisjoint(op.reads):
                self.moving.update(op.outs)
        self.plans: dict[tuple[torch.Size, ...], list[Planned]] = {}
        """What a run does, by the sizes of its inputs: probes differ in their numbers only."""

    def __call__(
        self, tensors: Sequence[Tensor], factors: Mapping[Value, tuple[Factors, ...]] | None = None
    ) -> list[Tensor]:
        """Outputs for ``tensors``, given in the order of ``inputs`` (any of their dimensions may be reduced).

        ``factors``: dimensions of inputs that are products, only some of whose factors are reduced. They are the same
        in every run of these sizes.
        """
        tensors = [tensor.to(float64(tensor.dtype)) for tensor in tensors]
        sizes = tuple(tensor.shape for tensor in tensors)
        with torch.no_grad():
            if sizes in self.plans:
                return self.again(self.plans[sizes], tensors)
            plan: list[Planned] = []
            results = self.first(tensors, plan, factors or {})
        self.plans[sizes] = plan
        return results

    def first(
        self, tensors: Sequence[Tensor], plan: list[Planned], factors: Mapping[Value, tuple[Factors, ...]]
    ) -> list[Tensor]:
        """Run while working out how each operator is to be run on inputs of these sizes."""
        env: dict[Value, Operand] = {}
        for value, tensor in zip(self.inputs, tensors, strict=True):
            pairs = tuple(((a, b),) for a, b in zip(value.shape, tensor.shape, strict=True))
            env[value] = Operand(tensor, factors.get(value, pairs))
        for op, dead in zip(self.ops, self.dead, strict=True):
            self.step(op, env, dead, plan)
            for value in dead:
                env.pop(value, None)
        return [widened(self.load(value, env).tensor) for value in self.outputs]

    def again(self, plan: list[Planned], tensors: Sequence[Tensor]) -> list[Tensor]:
        env = dict(zip(self.inputs, tensors, strict=True))
        for item in plan:
            operands = [x if isinstance(x, Tensor) else env[x] for x in item.sources]
            results = item.step(widened_all(cut(operands, item.where)) if item.where else operands)
            env.update(zip(item.outs, results, strict=False))
            for value in item.dead:
                env.pop(value, None)
        return [env[value] if value in env else widened(self.load(value, {}).tensor) for value in self.outputs]

    def load(self, value: Value, env: dict[Value, Operand]) -> Operand:
        if value in env:
            return env[value]
        if value not in self.constants:
            own, exact = self.both(value)
            if self.rounds:
                data = own.to(exact.dtype)
            else:
                data = exact if own is exact else settled(own, exact, 16 if self.instead else ROUNDINGS)
            self.constants[value] = Operand(data, tuple(map(whole, data.shape)), const=True)
        return self.constants[value]

    def both(self, value: Value) -> tuple[Tensor, Tensor]:
        """A constant as the model computes it, and in float64."""
        if value not in self.twice:
            if value.payload is None:
                raise EvaluationError(f"{value} is neither an input nor computed in the region")
            own = value.payload.detach().cpu()
            other = self.instead.get(value)
            self.twice[value] = own, own if other is None else other.to(float64(own.dtype))
        return self.twice[value]

    def rounding(self) -> float:
        """How coarse the dtypes are in which the model rounds a constant that stands here as it was before; 0: none."""
        units = [0.0]
        for value, operand in self.constants.items():
            own = self.both(value)[0]
            differs = own.is_floating_point() and own is not operand.tensor
            if differs and not torch.equal(own.double(), operand.tensor.double()):
                units.append(torch.finfo(own.dtype).eps)
        return max(units)

    def misled(self) -> list[Value]:
        """Constants that rounding makes something else of: they stand here as the model computes them."""
        found = {value: operand.tensor for value, operand in self.constants.items()}
        return [value for value, data in found.items() if data is not self.both(value)[1] and not self.rounds]

    def run_constants(self) -> None:
        for op in self.ops:
            self.compute(op)

    def step(self, op: Op, env: dict[Value, Operand], dead: list[Value], plan: list[Planned]) -> None:
        if op.out.const and self.moving.isdisjoint(op.outs):
            self.compute(op)
            return
        operands = [self.load(value, env) for value in op.reads]
        reduced = any(operand.reduced for operand in operands)
        step, where = _reduced(op, operands, self.tails) if reduced else (_call(op), [])
        tensors = widened_all(cut([operand.tensor for operand in operands], where))
        results = step(tensors)
        given = [operand.tensor for operand in operands] if where else tensors
        sources = [value if value in env else tensor for value, tensor in zip(op.reads, given, strict=True)]
        viewed = regrouped(operands[0].dims, op.args[1]) if op.name in SIZED and operands[0].reduced else None
        for value, result in zip(op.outs, results, strict=False):
            env[value] = Operand(result, out_dims(value, result, operands) if viewed is None else viewed)
        plan.append(Planned(op, sources, step, where, dead))

    def compute(self, op: Op) -> None:
        """A constant, once for all runs."""
        if op.out in self.twice:
            return
        operands = [self.both(value) for value in op.reads]
        same = all(own is exact for own, exact in operands)
        narrow = any(out.dtype != float64(out.dtype) for out in op.outs)
        if same and narrow and keeps_numbers(op):  # masks, which may have many
            exact = own = _call(op, own=True)([pair[0] for pair in operands])
        else:
            exact = _call(op)(widened_all([pair[1] for pair in operands]))
            own = _call(op, own=True)([pair[0] for pair in operands]) if narrow or not same else exact
        exact = [self.instead.get(out, b) for out, b in zip(op.outs, exact, strict=False)]
        pairs = [(a, a if a is b or are_same(a, b) else b) for a, b in zip(own, exact, strict=False)]
        self.twice.update(zip(op.outs, pairs, strict=False))


def constant(value: Value) -> Tensor:
    """The data of a value no input reaches; EvaluationError if it cannot be computed here.

    In the model's dtype where that holds them as they are, else in float64.
    """
    region = Region(list(ancestors([value], lambda _: False)), [], [])
    with torch.no_grad():
        region.run_constants()
        return region.load(value, {}).tensor


_FILLERS = {"zeros": 0.0, "ones": 1.0, "zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}


def _call(op: Op, *, own: bool = False) -> Step:
    """The operator itself; devices are the CPU and floating dtypes float64, or with ``own`` the model's."""
    if op.name in _FILLERS or op.name in ("full", "full_like", "new_full", "empty", "empty_like", "new_empty"):
        filled = _filled(op, op.out.dtype if own else float64(op.out.dtype))
        return lambda _: [filled]
    kwargs = {
        name: item
        for name, item in op.kwargs.items()
        if name not in ("device", "layout", "pin_memory", "memory_format")
    }
    if own:
        pass
    elif isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs["dtype"] = float64(kwargs["dtype"])
    elif op.name in ("arange", "eye", "linspace", "scalar_tensor") and op.out.dtype.is_floating_point:
        kwargs["dtype"] = torch.float64
    if op.name in SIZED:
        sizes = op.args[1]
        return lambda tensors: [tensors[0].reshape(sizes)]

    # Of whole numbers torch makes what the default dtype holds (0.9 ** n), unless they come as float64.
    counted = (
        not own and "dtype" not in kwargs and op.out.dtype.is_floating_point and op.name in ELEMENTWISE - {"where"}
    )
    counted = counted and not any(value.dtype.is_floating_point for value in op.reads)

    # The softmax's third argument asks for a dtype that float64 is not rounded to.
    given = (*op.args[:2], False) if op.name == "_softmax" and not own else op.args
    if op.name == "pow" and isinstance(op.args[0], float) and op.out.dtype in (torch.float16, torch.bfloat16):
        given = (torch.tensor(op.args[0], dtype=op.out.dtype).item(), *op.args[1:])  # torch rounds the base first

    def call(tensors: list[Tensor]) -> list[Tensor]:
        queue = iter([tensor.double() for tensor in tensors] if counted else tensors)
        args = [next(queue) if isinstance(x, Value) else map_values(x, lambda _: next(queue)) for x in given]
        named = map_values(kwargs, lambda _: next(queue)) if kwargs else kwargs
        try:
            result = op.target(*args, **named)
        except compat.RUN_ERRORS as error:
            raise EvaluationError(f"{op.name}: {error}") from error
        return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]

    return call


def _filled(op: Op, dtype: torch.dtype) -> Tensor:
    """A constant tensor without its memory: one element, expanded. ``empty`` is NaN, so that a read of it shows."""
    if op.name in _FILLERS:
        fill: Any = _FILLERS[op.name]
    elif op.name.endswith("empty") or op.name == "empty_like":
        fill = math.nan if dtype.is_floating_point else 0
    else:
        fill = op.args[1] if op.name != "new_full" else op.args[2]
        if isinstance(fill, Value):
            raise EvaluationError("a tensor filled with a computed value")
    return torch.full((), fill, dtype=dtype).expand(op.out.shape)


def _reduced(op: Op, operands: list[Operand], tails: frozenset[int]) -> tuple[Step, list[Cut]]:
    """An operator some of whose operands have reduced dimensions, and where its operands are cut down before."""
    if op.name in SIZED:
        sizes = view_sizes(operands[0].dims, op.args[1])
        return lambda tensors: [tensors[0].reshape(sizes)], []
    if op.name == "expand":
        sizes = expand_sizes(operands[0], op.out.shape)
        return lambda tensors: [tensors[0].expand(sizes)], []
    return _call(op), cuts(op, operands, tails)


# -- two computations of one function ---------------------------------------------------------------------------------

TOLERANCE = 1e-8
"""Relative error per token, in float64, up to which two computations count as the same function."""

PRECISE = 1e-12
"""The same where nothing but numbers speaks for them. Spellings of one function differ by 1e-13 at most, and by 2e-12
under strong gates, which make what is left of a number small.
"""


def token_error(have: Tensor, want: Tensor) -> float:
    """Largest relative error of a token [B, T, ...] where ``have`` is finite; tokens far below the rest count less."""
    finite = torch.isfinite(have)
    if not finite.any():
        return float("inf")
    gap = torch.where(finite, have - want, 0.0).flatten(2).norm(dim=-1)
    size = want.flatten(2).norm(dim=-1)
    floor = 1e-6 * size.square().mean().sqrt() + 1e-30
    return float((gap / (size + floor)).max())


@contextmanager
def one_thread() -> Generator[None]:
    """Probes are many small operators: waking other threads for each costs more than it brings, tenfold on a busy
    machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
