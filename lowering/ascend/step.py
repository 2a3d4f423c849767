"""A step of one token or a few for Ascend: the token program of a row as one kernel on Vec.

A step reads and writes the whole state and computes next to nothing, so there is nothing for Cube to do: products
with a single row are sums over the rows of the state. A task holds its columns of the state over all tokens.
"""

from __future__ import annotations

from functools import cache

from ..emitter import TokenEmitter
from ..ir import DType, Op, Program, Value
from ..linear_attention import linear_attention_program
from .kernel import Argument, Domain, Kernel, Kind, Module, assemble, definition, indent, used_constants
from .prepare import PLAIN, Fused


@cache
def step_module(gate: str, delta: bool, beta: bool = True, fused: Fused = PLAIN, *, pool: bool = False) -> Module:
    """The kernel of ``TOKENS`` tokens of a row of the family; ``pool``: states lie in one (lowering/pools.py)."""
    program = linear_attention_program(gate, delta, beta=beta, form="token")
    assert program.carry is not None
    step = _Step(program, fused)
    step.emit(program.ops)
    state = "slot * HV + head" if pool else "lane"
    place = [
        "column = task % (V // BV) * BV",
        "lane = task // (V // BV)",
        "head = lane % HV",
        "request = lane // HV",
    ]
    start = [
        "S = tl.zeros([K, BV], tl.float32)",
        "if INITIAL:",
        f"    S = tl.load(tile_at(initial_state_ptr, {state}, column, K, V, BV))",
    ]
    end = [f"tl.store(tile_at(final_state_ptr, {state}, column, K, V, BV), {program.carry.name})"]
    others = [(name, Kind.F32) for name in ("initial_state_ptr", "final_state_ptr")]
    others += [("state_indices_ptr", Kind.I32), ("slots", Kind.COUNT)] * pool
    arguments = [Argument(*pair) for pair in (*step.arguments.items(), *others, ("tasks", Kind.COUNT))]
    turn = [
        "token = request * TOKENS + t",
        "at = token * HV + head",
        *(["group = token * H + head // (HV // H)"] if "group" in "\n".join(step.lines) else []),
        *step.lines,
        f"{program.carry.name} = {program.carry.step.name}",
    ]
    body = [*start, "for t in range(TOKENS):", *indent(turn, 1), *end]
    body = [*place, *(_with_slot(body) if pool else body)]
    lines = ["    for task in range(core, tasks, cores):", *indent(body, 2)]
    constants = used_constants("\n".join(lines))
    head = [*definition("step", arguments, constants), "    core = tl.program_id(0)", "    cores = tl.num_programs(0)"]
    words = ["" if beta else "nobeta", "step", fused.name, "pool" * pool]
    name = "_".join([program.name, *filter(None, words)])
    text = "\n".join([*head, *lines])
    kernel = Kernel("step", Domain.LANE_COLUMNS, tuple(arguments), constants, text)
    return Module(name, assemble(f"{program.name}, a step.", [text]), (kernel,))


def _with_slot(body: list[str]) -> list[str]:
    """``body`` where the request has a slot, else zeros."""
    return [
        "slot = tl.load(state_indices_ptr + request)",
        "if (slot >= 0) & (slot < slots):",
        *indent(body, 1),
        "else:",
        "    for t in range(TOKENS):",
        "        at = (request * TOKENS + t) * HV + head",
        "        tl.store(part_at(o_ptr, at, column, V, BV), tl.zeros([BV], o_ptr.dtype.element_ty))",
    ]


class _Step(TokenEmitter):
    """Lines for the ops of a token program; collects the arguments they need."""

    def __init__(self, program: Program, fused: Fused) -> None:
        super().__init__(program)
        self._fused = fused
        self.arguments: dict[str, Kind] = {}

    def operand(self, value: Value, op: Op) -> str:
        """A vector takes its axis where it meets the state."""
        if 1 in op.result.type.shape or 1 not in value.type.shape:
            return value.name
        return f"{value.name}[:, None]"

    def on_load(self, op: Op) -> str:
        return ""  # with the cast behind it

    def on_carry(self, op: Op) -> str:
        return ""  # loaded before

    def on_store(self, op: Op) -> str:
        name = f"{op.attr('port')}_ptr"
        self.arguments[name] = Kind.IO
        self.lines.add(f"tl.store(part_at({name}, at, column, V, BV), {op.inputs[0].name})")
        return ""

    def on_scale(self, op: Op) -> str:
        self.arguments[str(op.attr("by"))] = Kind.NUMBER
        return self.dialect.text(op, [op.inputs[0].name])

    def on_cast(self, op: Op) -> str:
        """o in its dtype, or a port as fp32: rows of K by key head or value head, columns of V, one number a head."""
        if op.result.type.dtype is DType.IO:
            return f"{op.inputs[0].name}.to(o_ptr.dtype.element_ty)"
        port, (_, cols) = op.inputs[0].name, op.result.type.shape
        pointer = f"{port}_ptr"
        self.arguments[pointer] = Kind.F32 if port in ("g", "beta") else Kind.IO
        if cols == 1:
            text = f"load_one({pointer}, at, {'K' if port == 'g' else 'BV'})"
        elif cols == "V":
            text = f"tl.load(part_at({pointer}, at, column, V, BV)).to(tl.float32)"
        else:
            text = f"tl.load(vector_at({pointer}, {'group' if port in ('q', 'k') else 'at'}, K)).to(tl.float32)"
        return self._gate(text, int(cols != 1)) if port == "g" else self._used(port, text)

    def _used(self, port: str, text: str) -> str:
        """q, k and beta as the recurrence has them."""
        if port in ("q", "k") and self._fused.norm:
            return f"l2norm({text}, {self._given('l2norm_eps', Kind.NUMBER)}, K)"
        return f"sigmoid({text})" if port == "beta" and self._fused.sigmoid_beta else text

    def _gate(self, text: str, channels: int) -> str:
        fused = self._fused
        if fused.bias:
            bias = self._given("dt_bias_ptr", Kind.F32)
            text += f" + tl.load(vector_at({bias}, head, K))" if channels else f" + load_one({bias}, head, K)"
        if fused.gate_fn == "log":
            return f"floor_gate({text})"
        self.lines.add(f"x = {text}")
        if "gate_scale" in fused.formula:
            self._given("gate_scale", Kind.NUMBER)
        if fused.rate:
            self.lines.add(f"rate = tl.exp(load_one({self._given('A_log_ptr', Kind.F32)}, head, K))")
        return fused.formula

    def _given(self, name: str, kind: Kind) -> str:
        self.arguments[name] = kind
        return name
