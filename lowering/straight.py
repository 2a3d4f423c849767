"""A carry-free tile program as one Python function over ``[B, heads, rows, cols]`` tensors.

The attention programs run this way: the driver walks over blocks of the cache and hands each block in as it lies in
memory, so nothing is laid out anew. A port that all heads share has one head and is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from . import tiles
from .emitter import TorchEmitter, python_function
from .errors import TileProgramError
from .ir import Op, OpKind, Program, Value

_IN_PLACE = {
    OpKind.ADD: "add_",
    OpKind.SUB: "sub_",
    OpKind.MUL: "mul_",
    OpKind.EXP: "exp_",
    OpKind.LOG: "log_",
    OpKind.NEG: "neg_",
}
"""The methods of a torch tensor that overwrite it with the op's result."""


@cache
def compiled(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the program's input ports and scalars, by name, that returns its outputs in their order."""
    return python_function(generate(program), program.name, torch=torch, tiles=tiles)


def generate(program: Program) -> str:
    """The function's source. What dies in an elementwise op is overwritten; inputs never are."""
    if program.carry is not None:
        raise TileProgramError("a straight program has no carry", program.name)
    return _Straight(program).source()


class _Straight(TorchEmitter):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._last = {value: op for op in program.ops for value in op.inputs}
        self._stored = {str(op.attr("port")): op.inputs[0] for op in program.ops if op.kind is OpKind.STORE}
        loaded = {op.result for op in program.ops if op.kind is OpKind.LOAD}
        self._kept = loaded | set(self._stored.values())

    def source(self) -> str:
        names = (*(port.name for port in self.program.inputs), *self.program.scalars)
        self.lines.add(f"def run(*, {', '.join(names)}):")
        self.lines.open()
        self.emit(self.program.ops)
        self.lines.add(f"return {', '.join(self._stored[port.name].name for port in self.program.outputs)},")
        return self.lines.text()

    def plain(self, op: Op) -> str:
        if op.kind not in _IN_PLACE or not self.overwrites(op.inputs[0], op):
            return super().plain(op)
        first, *others = self.operands(op)
        return f"{first}.{_IN_PLACE[op.kind]}({', '.join(others)})"

    def overwrites(self, value: Value, op: Op) -> bool:
        """Whether ``op`` may form its result in the memory of its first operand."""
        alone = op.inputs.count(value) == 1 and value.type.shape == op.result.type.shape
        return alone and value not in self._kept and self._last[value] is op

    def on_load(self, op: Op) -> str:
        port = str(op.attr("port"))
        return "" if port == op.result.name else port

    def on_store(self, op: Op) -> str:
        return ""

    def on_scale(self, op: Op) -> str:
        return f"{self.operand(op.inputs[0], op)} * {op.attr('by')}"  # a scalar is an argument of its own here

    def on_dot(self, op: Op) -> str:
        a, b = self.factors(op)
        text = f"tiles.shared_product({a}, {b})"
        if op.attr("negate", False):
            text += ".neg_()"
        return text if len(op.inputs) == 2 else f"{text}.add_({self.operand(op.inputs[2], op)})"

    def on_reduce(self, op: Op) -> str:
        raise TileProgramError("no straight form for this op", str(op))

    on_cumsum = on_reduce
