"""From the token program to one Triton kernel: the decoding step, the state read and written once.

One program per sequence, head and block of V. Rows of the token program are vectors here, the state is [K, V]; a
product with one row is a sum, an outer product a broadcast.
"""

from __future__ import annotations

from functools import cache

from ..dialects import TRITON, row_product
from ..ir import Op, OpKind, Value
from .placement import is_wide
from .ports import PortText
from .text import Lines, docstring
from .variant import Variant


@cache
def step_source(variant: Variant) -> str:
    """The module with ``step`` of a variant."""
    return docstring(variant, None) + _Step(variant).text()


class _Step:
    """Text of the one-token kernel: one program a head and block of columns, the state read and written once."""

    def __init__(self, variant: Variant) -> None:
        self.variant, self.program = variant, variant.program
        self.lines = Lines()
        self.ports = PortText(variant, self.lines)

    def text(self) -> str:
        ports = [str(op.attr("port")) for op in self.program.ops if op.kind is OpKind.LOAD]
        self._begin(ports)
        for op in self.program.ops:
            self._op(op)
        carry = self.program.carry
        assert carry is not None
        add = self.lines.add
        add("state_base = final_state_ptr + batch * final_state_sn + head * final_state_sh")
        add("state_tile = state_base + d[:, None] * final_state_sk + c[None, :] * final_state_sv")
        add(f"tl.store(state_tile, {carry.step.name}, mask=(d < K)[:, None] & (c < V)[None, :])")
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

    def _op(self, op: Op) -> None:
        if op.kind is OpKind.LOAD:
            self._load(op)
        elif op.kind is OpKind.CAST and self.program.producer(op.inputs[0]).kind is OpKind.LOAD:
            self._prepare(op)
        elif op.kind is OpKind.CAST:
            self.lines.add(f"{op.result.name} = {op.inputs[0].name}.to({op.result.name}_ptr.dtype.element_ty)")
        elif op.kind is OpKind.CARRY:
            self._state(op.result)
        elif op.kind is OpKind.STORE:
            self.lines.add(f"tl.store(o_ptr + lane * V + c, {op.inputs[0].name}, mask=c < V)")
        elif op.kind is OpKind.TRANSPOSE:
            self.lines.add(f"{op.result.name} = {op.inputs[0].name}")  # a row and a column are both a vector
        else:
            self.lines.add(f"{op.result.name} = {self._expression(op)}")

    def _expression(self, op: Op) -> str:
        if op.kind is OpKind.DOT:
            return row_product(op, [value.name for value in op.inputs])
        return TRITON.text(op, [self._beside(value, op.result) for value in op.inputs])

    def _beside(self, value: Value, result: Value) -> str:
        """A column beside a matrix has to say which way it stands."""
        column = value.type.shape == ("K", 1) and result.type.shape == ("K", "V")
        return f"{value.name}[:, None]" if column else value.name

    def _load(self, op: Op) -> None:
        name, value = str(op.attr("port")), op.result
        head = "(head // GROUP)" if name in ("q", "k") else "head"
        base = f"{name}_ptr + batch * {name}_sb + {head} * {name}_sh"
        if value.type.cols == 1:
            self.lines.add(f"{value.name} = tl.load({base})")
            return
        column, bound = ("c", "V") if is_wide(value) else ("d", "K")
        self.lines.add(f"{value.name} = tl.load({base} + {column} * {name}_sd, mask={column} < {bound}, other=0.0)")

    def _prepare(self, op: Op) -> None:
        port, variant = op.inputs[0].name, self.variant
        x = f"{port}.to(tl.float32)"
        if port in ("q", "k") and variant.l2norm:
            x = f"l2norm_vector({x}, l2norm_eps)"
        elif port == "beta" and variant.sigmoid_beta:
            x = f"sigmoid({x})"
        elif port == "g":
            self.ports.gate_parameters()
            x = self.ports.gate(x)
            x = f"tl.where(d < K, {x}, 0.0)" if variant.gate == "channel" else x
        self.lines.add(f"{op.result.name} = {x}")

    def _state(self, value: Value) -> None:
        if not self.variant.state:
            self.lines.add(f"{value.name} = tl.zeros([KP, BV], tl.float32)")
            return
        add = self.lines.add
        add("state_base = initial_state_ptr + batch * initial_state_sn + head * initial_state_sh")
        add("state_tile = state_base + d[:, None] * initial_state_sk + c[None, :] * initial_state_sv")
        add(f"{value.name} = tl.load(state_tile, mask=(d < K)[:, None] & (c < V)[None, :], other=0.0).to(tl.float32)")
