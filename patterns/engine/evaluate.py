"""Run a region of the functional graph on chosen inputs, in float64; batch and heads are cut down where nothing mixes
them.

Rounding is left out on purpose: every floating dtype becomes float64, so that what is compared with the recurrence is
the function, not its rounding (of constants: ``constants.py``). A model's real sizes would make probing slow, so inputs
may come with fewer batch rows and heads than the graph was captured with (``reduced.py``). Sizes written into the graph
(views, expands, zeros) are then scaled along. An operator that looks at one particular row of a reduced dimension
raises ``CannotReduce``, and the region must be run whole. So does a constant that varies along one, but where the
caller has looked at it whole (``tails``).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.constants import Constants
from kdacompile.patterns.engine.reduced import (
    SIZED,
    Cut,
    Factors,
    Operand,
    cut,
    cuts,
    expand_sizes,
    out_dims,
    regrouped,
    view_sizes,
)
from kdacompile.patterns.engine.rounded import float64, widened, widened_all
from kdacompile.patterns.engine.steps import Step, call


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
        self.constants = Constants(instead or {}, rounds=rounds)
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
        return self.constants.load(value)

    def both(self, value: Value) -> tuple[Tensor, Tensor]:
        """A constant as the model computes it, and in float64."""
        return self.constants.both(value)

    def rounding(self) -> float:
        """How coarse the dtypes are in which the model rounds a constant that stands here as it was before; 0: none."""
        units = [0.0]
        for value, operand in self.constants.loaded.items():
            own = self.both(value)[0]
            differs = own.is_floating_point() and own is not operand.tensor
            if differs and not torch.equal(own.double(), operand.tensor.double()):
                units.append(torch.finfo(own.dtype).eps)
        return max(units)

    def misled(self) -> list[Value]:
        """Constants that rounding makes something else of: they stand here as the model computes them."""
        found = {value: operand.tensor for value, operand in self.constants.loaded.items()}
        return [value for value, data in found.items() if data is not self.both(value)[1] and not self.rounds]

    def step(self, op: Op, env: dict[Value, Operand], dead: list[Value], plan: list[Planned]) -> None:
        if op.out.const and self.moving.isdisjoint(op.outs):
            self.constants.prepare(op)
            return
        waits = self.constants.waits
        operands = [self.constants.stand_in(x) if x not in env and waits(x) else self.load(x, env) for x in op.reads]
        reduced = any(operand.reduced for operand in operands)
        step, where = _reduced(op, operands, self.tails) if reduced else (call(op), [])
        given = [operand.tensor for operand in operands]
        for index, value in enumerate(op.reads):
            if value not in env and waits(value):
                given[index] = self.constants.read(value, [place for place in where if place[0] == index])
        tensors = widened_all(cut(given, where))
        results = step(tensors)
        given = given if where else tensors
        sources = [value if value in env else tensor for value, tensor in zip(op.reads, given, strict=True)]
        viewed = regrouped(operands[0].dims, op.args[1]) if op.name in SIZED and operands[0].reduced else None
        for value, result in zip(op.outs, results, strict=False):
            env[value] = Operand(result, out_dims(value, result, operands) if viewed is None else viewed)
        plan.append(Planned(op, sources, step, where, dead))


def _reduced(op: Op, operands: list[Operand], tails: frozenset[int]) -> tuple[Step, list[Cut]]:
    """An operator some of whose operands have reduced dimensions, and where its operands are cut down before."""
    if op.name in SIZED:
        sizes = view_sizes(operands[0].dims, op.args[1])
        return lambda tensors: [tensors[0].reshape(sizes)], []
    if op.name == "expand":
        sizes = expand_sizes(operands[0], op.out.shape)
        return lambda tensors: [tensors[0].expand(sizes)], []
    return call(op), cuts(op, operands, tails)


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
