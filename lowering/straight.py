"""A carry-free tile program as one Python function over ``[B, heads, rows, cols]`` tensors.

The attention programs run this way: the driver walks over blocks of the cache and hands each block in as it lies in
memory, so nothing is laid out anew. A port that all heads share has one head and is read once.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from . import tiles
from .codegen import expression
from .dialects import IN_PLACE, TRITON
from .errors import TileProgramError
from .ir import Op, OpKind, Program, Value


@cache
def compiled(program: Program) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the program's input ports and scalars, by name, that returns its outputs in their order."""
    source = generate(program)
    filename = f"<kdacompile {program.name} {len(linecache.cache)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, object] = {"torch": torch, "tiles": tiles}
    exec(compile(source, filename, "exec"), namespace)
    return cast("Callable[..., tuple[Tensor, ...]]", namespace["run"])


def generate(program: Program) -> str:
    """The function's source. What dies in an elementwise op is overwritten; inputs never are."""
    if program.carry is not None:
        raise TileProgramError("a straight program has no carry", program.name)
    last = {value: index for index, op in enumerate(program.ops) for value in op.inputs}
    ports = {op.output for op in program.ops if op.kind is OpKind.LOAD}
    stored = {op.inputs[0]: str(op.attr("port")) for op in program.ops if op.kind is OpKind.STORE}
    names = (*(port.name for port in program.inputs), *program.scalars)
    lines = [f"def run(*, {', '.join(names)}):"]
    for index, op in enumerate(program.ops):
        if op.kind is OpKind.STORE or (op.kind is OpKind.LOAD and op.result.name == op.attr("port")):
            continue
        overwritable = op.inputs and op.inputs[0] not in ports and op.inputs[0] not in stored
        dies = bool(overwritable) and last[op.inputs[0]] == index and op.inputs.count(op.inputs[0]) == 1
        lines.append(f"    {op.result.name} = {_line(op, dies)}")
    by_port = {port: value.name for value, port in stored.items()}
    lines.append(f"    return {', '.join(by_port[port.name] for port in program.outputs)},")
    return "\n".join(lines) + "\n"


def _line(op: Op, dies: bool) -> str:
    refs = [value.name for value in op.inputs]
    if op.kind is OpKind.LOAD:
        return str(op.attr("port"))
    if op.kind is OpKind.DOT:
        return _product(op, refs)
    if dies and op.kind in IN_PLACE and _keeps_shape(op):
        return f"{refs[0]}.{IN_PLACE[op.kind]}({', '.join(refs[1:])})"
    if op.kind is OpKind.SCALE:
        return TRITON.text(op, refs)  # a scalar is an argument of its own here, as in Triton
    if op.kind in (OpKind.REDUCE, OpKind.CUMSUM):
        raise TileProgramError("no straight form for this op", str(op))
    return expression(op, refs)


def _product(op: Op, refs: list[str]) -> str:
    a, b = (f"{ref}.mT" if op.attr(f"trans_{i}", False) else ref for i, ref in zip("ab", refs[:2], strict=True))
    text = f"tiles.shared_product({a}, {b})"
    if op.attr("negate", False):
        text += ".neg_()"
    return text if len(refs) == 2 else f"{text}.add_({refs[2]})"


def _keeps_shape(op: Op) -> bool:
    first: Value = op.inputs[0]
    return first.type.shape == op.result.type.shape
