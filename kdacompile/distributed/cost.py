"""What context parallelism of linear attention sends and computes: formulas, on paper for any number of GPUs.

One layer, one call. With the maps, each rank sends its fragments' (A, B) in float32, whatever T is. It computes one
pass, with the delta rule of V + K columns, and a product with the states that enter; the backward call adds another
such product. Over heads, each rank sends its operands and gets o back. A ring carries an all-gather of n bytes a rank
in ``(ranks - 1) n / bandwidth``, an all-to-all in ``(ranks - 1) / ranks n / bandwidth``; both take a latency a message.
Above 16 ranks maps are composed in steps, one map a message.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kdacompile.distributed.fragments import GATHERED
from kdacompile.lowering.plan import Plan
from kdacompile.lowering.plan.cost import total_flops
from kdacompile.lowering.stages import evaluate
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

HOST = 8
"""GPUs of one host."""


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
        return STATE_BYTES * self.batch * self.value_heads * self.keys * (width + self.values)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's operands and output."""
        gate = self.keys if self.channel_gate else 1
        columns = 2 * self.heads * self.keys + self.value_heads * (2 * self.values + gate + 1)
        return self.element * self.batch * columns


@dataclass(frozen=True)
class Cost:
    """``sent`` bytes by each rank in one forward call, ``seconds`` of it, ``held`` bytes of what all ranks sent."""

    method: str
    sent: int
    held: int
    seconds: float


def communication(
    layer: Layer, ranks: int, *, method: str = "maps", order: str = "zigzag", link: Link = NVLINK
) -> Cost:
    """What one forward call sends. A backward call sends as much again (with maps, B' alone: less)."""
    if method == "maps":
        mine = layer.map_bytes * (2 if order == "zigzag" else 1)
        if ranks > GATHERED:
            messages = (ranks - 1).bit_length() + 1
            seconds = messages * (mine / link.bandwidth + link.latency * (2 if order == "zigzag" else 1))
            return Cost(method, mine * messages, mine, seconds)
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
class ParallelPlan(Plan):
    """The plan of a rank's pass over its own tokens (with K more columns under the delta rule), and what ranks send."""

    ranks: int
    order: str
    layer: Layer

    @property
    def rank_flops(self) -> int:
        """Multiplies and adds of a rank in one forward call."""
        return self._flops(self.sizes["V"], self.sizes["T"]) + self._product(self.sizes["T"])

    @property
    def alone_flops(self) -> int:
        """Those of one GPU that has all tokens."""
        return self._flops(self.layer.values, self.layer.tokens)

    @property
    def costs(self) -> tuple[Cost, ...]:
        """What a forward call sends: with the maps and, if the ranks divide the heads, over heads."""
        given: Any = {"order": self.order, "link": link_between(self.ranks)}
        methods = ("maps",) if self.layer.value_heads % self.ranks else ("maps", "heads")
        return tuple(communication(self.layer, self.ranks, method=method, **given) for method in methods)

    def as_data(self) -> dict[str, Any]:
        """What it adds to a plan, as plain data."""
        flops = {"rank_flops": self.rank_flops, "alone_flops": self.alone_flops}
        return {"ranks": self.ranks, "order": self.order, **flops, "sends": [asdict(cost) for cost in self.costs]}

    def __str__(self) -> str:
        link = link_between(self.ranks)
        share = self.alone_flops / self.rank_flops
        computed = f"a rank computes {self.rank_flops:.3g} multiplies and adds, one GPU {self.alone_flops:.3g}"
        lines = [f"on {self.ranks} ranks, {self.order}, {self.layer.tokens} tokens in all"]
        lines.append(f"  {computed}: {share:.2f} times as many")
        for cost in self.costs:
            lines.append(
                f"  {cost.method}: a rank sends {cost.sent / 1e6:,.1f} MB in a forward call and holds "
                f"{cost.held / 1e6:,.1f} MB, {cost.seconds * 1e6:,.0f} us at {link.bandwidth / 1e9:.0f} GB/s"
            )
        return super().__str__() + "\n" + "\n".join(lines) + "\n"

    def _flops(self, columns: int, tokens: int) -> int:
        return evaluate(total_flops(self), {**self.sizes, "V": columns, "T": tokens})

    def _product(self, tokens: int) -> int:
        """Of the readers with the states that enter."""
        return 2 * self.layer.batch * self.layer.value_heads * tokens * self.layer.keys * self.layer.values
