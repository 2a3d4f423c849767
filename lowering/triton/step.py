"""From the token program to one Triton kernel: the decoding step, the state read and written once.

One program per sequence, head and block of V. Rows of the token program are vectors here, the state is [K, V]; a
product with one row is a sum, an outer product a broadcast.
"""

from __future__ import annotations

from functools import cache

from ..emitter import TokenEmitter
from ..ir import Op, OpKind, Value
from .placement import is_wide
from .ports import PortText
from .text import docstring
from .variant import Variant


@cache
def step_source(variant: Variant) -> str:
    """The module with ``step`` of a variant."""
    return docstring(variant, None) + _Step(variant).text()


class _Step(TokenEmitter):
    """Text of the one-token kernel: one program a head and block of columns, the state read and written once."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant.program)
        self.variant = variant
        self.ports = PortText(variant, self.lines)

    def text(self) -> str:
        ports = [str(op.attr("port")) for op in self.program.ops if op.kind is OpKind.LOAD]
        self._begin(ports)
        self.emit(self.program.ops)
        carry = self.program.carry
        assert carry is not None
        add = self.lines.add
        self._state_tile("final_state")
        add(f"tl.store(state_tile, {carry.step.name}, mask=live_tile)")
        return self.lines.text()

    def _begin(self, ports: list[str]) -> None:
        states = [*(["initial_state"] if self.variant.state else []), "final_state"]
        self.ports.step_signature(ports, states)
        add = self.lines.add
        add("pid = tl.program_id(0).to(tl.int64)")
        add("blocks = tl.cdiv(V, BV)")
        add("lane, block = pid // blocks, pid % blocks")
        add("batch, head = lane // HV, lane % HV")
        add("d = tl.arange(0, KP)")
        add("c = block * BV + tl.arange(0, BV)")
        add("live_tile = (d < K)[:, None] & (c < V)[None, :]")
        if self.variant.pool:
            add("slot = tl.load(state_indices_ptr + batch).to(tl.int64)")
            add("has_slot = (slot >= 0) & (slot < N)")
            add("live_tile = live_tile & has_slot")

    def _state_tile(self, name: str) -> None:
        at = "slot" if self.variant.pool else "batch"
        self.lines.add(f"state_base = {name}_ptr + {at} * {name}_sn + head * {name}_sh")
        self.lines.add(f"state_tile = state_base + d[:, None] * {name}_sk + c[None, :] * {name}_sv")

    def operand(self, value: Value, op: Op) -> str:
        """A column beside a matrix has to say which way it stands."""
        column = value.type.shape == ("K", 1) and op.result.type.shape == ("K", "V")
        return f"{value.name}[:, None]" if column else value.name

    def on_load(self, op: Op) -> str:
        name, value = str(op.attr("port")), op.result
        head = "(head // GROUP)" if name in ("q", "k") else "head"
        base = f"{name}_ptr + batch * {name}_sb + {head} * {name}_sh"
        if value.type.cols == 1:
            return f"tl.load({base})"
        column, bound = ("c", "V") if is_wide(value) else ("d", "K")
        return f"tl.load({base} + {column} * {name}_sd, mask={column} < {bound}, other=0.0)"

    def on_cast(self, op: Op) -> str:
        """An input in fp32, with what is fused into its load, or o in its dtype."""
        port, variant = op.inputs[0].name, self.variant
        if self.program.producer(op.inputs[0]).kind is not OpKind.LOAD:
            return f"{port}.to({op.result.name}_ptr.dtype.element_ty)"
        x = f"{port}.to(tl.float32)"
        if port in ("q", "k") and variant.l2norm:
            return f"l2norm_vector({x}, l2norm_eps)"
        if port == "beta" and variant.sigmoid_beta:
            return f"sigmoid({x})"
        if port == "g":
            self.ports.gate_parameters()
            x = self.ports.gate(x)
            return f"tl.where(d < K, {x}, 0.0)" if variant.gate == "channel" else x
        return x

    def on_store(self, op: Op) -> str:
        value = op.inputs[0].name
        value = f"tl.where(has_slot, {value}, 0.0)" if self.variant.pool else value
        self.lines.add(f"tl.store(o_ptr + lane * V + c, {value}, mask=c < V)")
        return ""

    def on_carry(self, op: Op) -> str:
        if not self.variant.state:
            return "tl.zeros([KP, BV], tl.float32)"
        self._state_tile("initial_state")
        return "tl.load(state_tile, mask=live_tile, other=0.0).to(tl.float32)"
