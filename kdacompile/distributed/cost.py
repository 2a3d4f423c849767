"""What context parallelism of linear attention sends and computes: formulas, on paper for any number of GPUs.

One layer, one call. With the maps, each rank sends its fragments' (A, B) in float32, whatever T is, and backward B'. It
prepares its chunks once and scans them twice, or makes one pass, with the delta rule of V + K columns, and a product
with the states that enter; the backward call adds a scan or such a product. Over heads, each rank sends its operands
and gets o back. A ring carries an all-gather of n bytes a rank in ``(ranks - 1) n / bandwidth``, an all-to-all in
``(ranks - 1) / ranks n / bandwidth``; both take a latency a message.
Above 16 ranks maps are composed in steps, one map a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import sympy

from kdacompile.distributed.fragments import GATHERED, HOST
from kdacompile.lowering.ir import Op, Program
from kdacompile.lowering.plan import Plan
from kdacompile.lowering.plan.cost import all_steps, total_flops
from kdacompile.lowering.stages import evaluate, op_flops
from kdacompile.ops.errors import ContextParallelError

STATE_BYTES = 4


@dataclass(frozen=True)
class Link:
    """Between ranks: bytes a second in one direction for each rank, and seconds a message."""

    bandwidth: float
    latency: float


NVLINK = Link(bandwidth=450e9, latency=10e-6)
"""Between the GPUs of one H100 or H200 host, by the data sheet: 900 GB/s in both directions together."""

INFINIBAND = Link(bandwidth=50e9, latency=20e-6)
"""400 Gb/s for each GPU."""


@dataclass(frozen=True)
class Layer:
    """Sizes of one call: tokens T of all ranks, and bytes of one element of q, k, v and o."""

    tokens: int
    heads: int
    value_heads: int
    keys: int
    values: int
    batch: int = 1
    delta: bool = True
    channel_gate: bool = True
    element: int = 2

    @property
    def map_bytes(self) -> int:
        """Bytes of one fragment's (A, B)."""
        width = self.keys if self.delta else 1
        return self.state_bytes // self.values * (width + self.values)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states, B' of one fragment."""
        return STATE_BYTES * self.batch * self.value_heads * self.keys * self.values

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's operands and output."""
        gate = self.keys if self.channel_gate else 1
        columns = 2 * self.heads * self.keys + self.value_heads * (2 * self.values + gate + 1)
        return self.element * self.batch * columns


@dataclass(frozen=True)
class Cost:
    """``sent`` bytes by each rank in one call, ``seconds`` of it, ``held`` bytes of what all ranks sent."""

    method: str
    sent: int
    held: int
    seconds: float


def communication(
    layer: Layer,
    ranks: int,
    *,
    method: str = "maps",
    order: str = "zigzag",
    link: Link = NVLINK,
    backward: bool = False,
) -> Cost:
    """What one call sends. With the maps, a backward call sends B' alone, in steps A as well; over heads the same."""
    if method == "maps":
        several = 2 if order == "zigzag" else 1
        if ranks > GATHERED:
            mine, messages = layer.map_bytes * several, (ranks - 1).bit_length() + 1
            seconds = messages * (mine / link.bandwidth + link.latency * several)
            return Cost(method, mine * messages, mine, seconds)
        mine = (layer.state_bytes if backward else layer.map_bytes) * several
        sent = mine * (ranks - 1)
        return Cost(method, sent, mine * ranks, sent / link.bandwidth + (ranks - 1) * link.latency)
    if layer.value_heads % ranks:
        problem = f'method "heads" cannot divide the {layer.value_heads} heads of v by {ranks} ranks'
        raise ContextParallelError(problem=problem)
    mine = layer.token_bytes * layer.tokens // ranks
    sent = mine * (ranks - 1) // ranks
    return Cost(method, sent, mine, sent / link.bandwidth + (ranks - 1) * link.latency)


def link_between(ranks: int) -> Link:
    """What joins so many GPUs."""
    return NVLINK if ranks <= HOST else INFINIBAND


@dataclass(frozen=True)
class Direction:
    """A forward or a backward call: multiplies and adds of a rank and of one GPU that has all tokens, and what is sent,
    with the maps and, if the ranks divide the heads, over heads.

    ``beside_flops``: of half a call, which run while maps of the other half of the heads are on their way
    (:attr:`.parallel_call.ParallelCall.turns`). Over heads a rank waits.
    """

    rank_flops: int
    alone_flops: int
    sends: tuple[Cost, ...]

    @property
    def beside_flops(self) -> int:
        return self.rank_flops // 2


@dataclass(frozen=True)
class ParallelPlan(Plan):
    """The plan of a rank's pass over its own tokens, and what ranks compute and send forward and backward.

    ``two_passes``: kernels scan the chunks twice (:mod:`.two_passes`). Elsewhere one pass has K more columns under the
    delta rule, which are in this plan (:class:`.local.Readers`). ``adjoint``: the program of the gradients.
    ``overlap``: whether halves of the heads take turns.
    """

    ranks: int
    order: str
    layer: Layer
    adjoint: Program
    two_passes: bool
    overlap: bool

    @property
    def forward(self) -> Direction:
        columns = self.layer.values + self.layer.delta * self.layer.keys
        more = self._scan(self.program, columns) if self.two_passes else self._product
        alone = self._total(total_flops(self), self.layer.values, self.layer.tokens)
        return Direction(self._total(total_flops(self), self.sizes["V"]) + more, alone, self._sends(backward=False))

    @property
    def backward(self) -> Direction:
        step = all_steps(self, _flops(self.adjoint.ops))
        more = self._scan(self.adjoint, self.layer.values) if self.two_passes else self._product
        alone = self._total(step, self.layer.values, self.layer.tokens)
        return Direction(self._total(step, self.layer.values) + more, alone, self._sends(backward=True))

    def as_data(self) -> dict[str, Any]:
        """What it adds to a plan, as plain data."""
        calls = {
            name: {**asdict(call), "beside_flops": call.beside_flops if self.overlap else 0}
            for name, call in (("forward", self.forward), ("backward", self.backward))
        }
        more = {"order": self.order, "two_passes": self.two_passes, "overlap": self.overlap}
        return {"ranks": self.ranks, **more, **calls}

    def __str__(self) -> str:
        speed = link_between(self.ranks).bandwidth / 1e9
        how = (
            "two scans of chunks that are prepared once"
            if self.two_passes
            else "one pass, and a product with what enters"
        )
        lines = [f"on {self.ranks} ranks, {self.order}, {self.layer.tokens} tokens in all: {how}"]
        for name, call in (("forward", self.forward), ("backward", self.backward)):
            computed = f"a rank computes {call.rank_flops:.3g} multiplies and adds, one GPU {call.alone_flops:.3g}"
            lines.append(f"  {name}: {computed}, {call.alone_flops / call.rank_flops:.2f} times as many")
            for cost in call.sends:
                sent = f"a rank sends {cost.sent / 1e6:,.1f} MB and holds {cost.held / 1e6:,.1f} MB"
                waits = "" if cost.method == "maps" else ", and waits for it"
                lines.append(f"    {cost.method}: {sent}, {cost.seconds * 1e6:,.0f} us at {speed:.0f} GB/s{waits}")
            lines.append(f"    {self._hidden(call)}")
        lines.append(
            "  not counted: the halo of a short convolution before it, width - 1 tokens; a rank waits for that, too"
        )
        return super().__str__() + "\n" + "\n".join(lines) + "\n"

    def _hidden(self, call: Direction) -> str:
        if not self.overlap:
            return "it waits for the maps; ContextParallel(overlap=True) computes half of the heads meanwhile"
        beside = f"beside {call.beside_flops:.3g} multiplies and adds of the other"
        if self.ranks > GATHERED:
            return f"the first message of each half of the heads is sent {beside}; later ones wait for each other"
        rate = call.beside_flops / call.sends[0].seconds / 1e12
        return f"the maps of each half of the heads are sent {beside}: hidden below {rate:,.0f}e12 a second"

    def _sends(self, *, backward: bool) -> tuple[Cost, ...]:
        given: Any = {"order": self.order, "link": link_between(self.ranks), "backward": backward}
        methods = ("maps",) if self.layer.value_heads % self.ranks else ("maps", "heads")
        return tuple(communication(self.layer, self.ranks, method=method, **given) for method in methods)

    def _total(self, formula: sympy.Expr, columns: int, tokens: int | None = None) -> int:
        return evaluate(formula, {**self.sizes, "V": columns, "T": tokens or self.sizes["T"]})

    def _scan(self, program: Program, columns: int) -> int:
        """Of a scan that makes states alone."""
        return self._total(all_steps(self, _flops(_of_states(program))), columns)

    @property
    def _product(self) -> int:
        """Of the readers with the states that enter, or with the gradient of o."""
        return 2 * self.layer.batch * self.layer.value_heads * self.sizes["T"] * self.layer.keys * self.layer.values


def _flops(ops: Iterable[Op]) -> sympy.Expr:
    return sum((op_flops(op) for op in ops), sympy.Integer(0))


def _of_states(program: Program) -> list[Op]:
    """The ops that lead from a program's last carry to its next step."""
    carry = program.reverse or program.carry
    assert carry is not None
    moved = {carry.name}
    behind = list[Op]()
    for op in program.ops:
        if op.output is not None and any(value.name in moved for value in op.inputs):
            moved.add(op.output.name)
            behind.append(op)
    wanted, found = {carry.step.name}, list[Op]()
    for op in reversed(behind):
        if op.output is not None and op.output.name in wanted:
            found.append(op)
            wanted |= {value.name for value in op.inputs}
    return found
