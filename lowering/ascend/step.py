"""The one-token step for Ascend: the token program of a row as one kernel on Vec.

A step reads and writes the whole state and computes next to nothing, so there is nothing for Cube to do: products
with a single row are sums over the rows of the state.
"""

from __future__ import annotations

from functools import cache

from ..dialects import TRITON, row_product
from ..ir import DType, Op, OpKind, Value
from ..linear_attention import linear_attention_program
from ..plan.units import is_widening
from .kernel import Argument, Domain, Kernel, Kind, Module, assemble, definition, indent, used_constants


@cache
def step_module(gate: str, delta: bool, beta: bool = True) -> Module:
    """The kernel of one token of a row of the family."""
    program = linear_attention_program(gate, delta, beta=beta, form="token")
    step = _Step(program.carry.step.name if program.carry is not None else "")
    for op in program.ops:
        step.op(op)
    start = [
        "column = task % (V // BV) * BV",
        "lane = task // (V // BV)",
        "head = lane % HV",
        "group = lane // HV * H + head // (HV // H)",
        "S = tl.zeros([K, BV], tl.float32)",
        "if INITIAL:",
        "    S = tl.load(tile_at(initial_state_ptr, lane, column, K, V, BV))",
    ]
    end = [f"tl.store(tile_at(final_state_ptr, lane, column, K, V, BV), {step.after})"]
    pointers = [(name, Kind.F32) for name in ("initial_state_ptr", "final_state_ptr")]
    arguments = [Argument(*pair) for pair in (*step.arguments.items(), *pointers, ("tasks", Kind.COUNT))]
    lines = ["    for task in range(core, tasks, cores):", *indent([*start, *step.lines, *end], 2)]
    constants = used_constants("\n".join(lines))
    head = [*definition("step", arguments, constants), "    core = tl.program_id(0)", "    cores = tl.num_programs(0)"]
    name = "_".join([program.name, *([] if beta else ["nobeta"]), "step"])
    text = "\n".join([*head, *lines])
    kernel = Kernel("step", Domain.LANE_COLUMNS, tuple(arguments), constants, text)
    return Module(name, assemble(f"{program.name}, one token.", [text]), (kernel,))


class _Step:
    """Lines for the ops of a token program. Rows of K or V are vectors; S and what has its shape are tiles."""

    def __init__(self, after: str) -> None:
        self.after = after
        self.lines: list[str] = []
        self.arguments: dict[str, Kind] = {}

    def op(self, op: Op) -> None:
        if op.kind in (OpKind.LOAD, OpKind.CARRY):
            return
        if op.kind is OpKind.STORE:
            name = f"{op.attr('port')}_ptr"
            self.arguments[name] = Kind.IO
            self.lines.append(f"tl.store(part_at({name}, lane, column, V, BV), {op.inputs[0].name})")
            return
        self.lines.append(f"{op.result.name} = {self._text(op)}")

    def _text(self, op: Op) -> str:
        x = op.inputs[0].name
        match op.kind:
            case OpKind.CAST if is_widening(op):
                return self._load(op)
            case OpKind.CAST if op.result.type.dtype is DType.IO:
                return f"{x}.to(o_ptr.dtype.element_ty)"
            case OpKind.SCALE:
                self.arguments[str(op.attr("by"))] = Kind.NUMBER
                return TRITON.text(op, [x])
            case OpKind.TRANSPOSE:
                return x
            case OpKind.DOT:
                return row_product(op, [value.name for value in op.inputs])
            case _:
                return TRITON.text(op, [self._fitted(v, op.result) for v in op.inputs])

    def _load(self, op: Op) -> str:
        """A port as fp32: rows of K by key head or value head, columns of V, or one number of the head."""
        port, (_, cols) = op.inputs[0].name, op.result.type.shape
        pointer = f"{port}_ptr"
        self.arguments[pointer] = Kind.F32 if port in ("g", "beta") else Kind.IO
        if cols == 1:
            return self._gate(port, f"load_one({pointer}, lane, {'K' if port == 'g' else 'BV'})")
        if cols == "V":
            return f"tl.load(part_at({pointer}, lane, column, V, BV)).to(tl.float32)"
        at = "group" if port in ("q", "k") else "lane"
        return self._gate(port, f"tl.load(vector_at({pointer}, {at}, K)).to(tl.float32)")

    def _gate(self, port: str, text: str) -> str:
        return f"floor_gate({text})" if port == "g" else text

    def _fitted(self, value: Value, result: Value) -> str:
        """A vector takes its axis where it meets the state."""
        if 1 in result.type.shape or 1 not in value.type.shape:
            return value.name
        return f"{value.name}[:, None]"
