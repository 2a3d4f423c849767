"""A scan that carries several values: a block's summary and the merge of two, as one program that carries what it has
merged so far, or a step that is written so.

The first is softmax attention over blocks of the cache: nothing of a summary depends on what came before. It stays in
the scan all the same, or every block's accumulator would be written to memory; what overlaps it with the merge is that
tasks of neighbouring blocks share stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir import Combine, DType, Op, OpKind, Per, Port, Program, TileType, Value

Carried = tuple[tuple[Value, Value], ...]


@dataclass(frozen=True)
class Folded:
    """``program`` loads what was merged before and stores what is merged after; ``carried`` ties the two together."""

    program: Program
    carried: Carried


def fold(combine: Combine) -> Folded:
    """One step of the scan: a block's summary, merged into ports ``x0`` to give outputs ``x``.

    Per-token and per-lane inputs of the summary that only feed products come in the inputs' own dtype.
    """
    summary, merge = combine.summary, combine.merge
    narrow = {port.name for port in summary.inputs if _only_multiplied(summary, port)}
    ops, made = _summary(summary, narrow)
    names = {op.result.name for op in ops}
    renamed: dict[Value, Value] = {}
    for op in merge.ops:
        if op.kind is OpKind.LOAD and str(op.attr("port")).endswith("1"):
            renamed[op.result] = made[str(op.attr("port"))[:-1]]
            continue
        output = None if op.output is None else replace(op.output, name=_fresh(op.output.name, names))
        if op.output is not None and output is not None:
            renamed[op.output] = output
        ops.append(Op(op.kind, tuple(renamed[v] for v in op.inputs), output, op.attrs))
    inputs = [_retyped(port, narrow) for port in summary.inputs]
    inputs += [replace(port, per=Per.LANE) for port in merge.inputs if port.name.endswith("0")]
    outputs = tuple(replace(port, per=Per.LANE) for port in merge.outputs)
    name = summary.name.removesuffix("_block")
    program = Program(name, tuple(inputs), outputs, tuple(ops), axis=summary.axis, scalars=summary.scalars)
    return Folded(program, _carried(program))


def step(program: Program) -> Folded:
    """A program without a carry of its own whose inputs ``x0`` are what its outputs ``x`` were a step before; what only
    feeds products comes in the inputs' own dtype. Any other program is left as it is."""
    names = {port.name for port in program.inputs}
    if program.carry is not None or not all(f"{port.name}0" in names for port in program.outputs):
        return Folded(program, ())
    narrow = {port.name for port in program.inputs if _only_multiplied(program, port)}
    new: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        output = op.output
        if op.kind is OpKind.LOAD and str(op.attr("port")) in narrow:
            output = new[op.result] = replace(op.result, type=_narrow(op.result.type))
        ops.append(Op(op.kind, tuple(new.get(v, v) for v in op.inputs), output, op.attrs))
    inputs = tuple(_retyped(port, narrow) for port in program.inputs)
    made = replace(program, inputs=inputs, ops=tuple(ops))
    return Folded(made, _carried(made))


def _carried(program: Program) -> Carried:
    loads = {str(op.attr("port")): op.result for op in program.ops if op.kind is OpKind.LOAD}
    stores = {str(op.attr("port")): op.inputs[0] for op in program.ops if op.kind is OpKind.STORE}
    return tuple((loads[f"{name}0"], value) for name, value in stores.items())


def _summary(summary: Program, narrow: set[str]) -> tuple[list[Op], dict[str, Value]]:
    """The summary's ops with narrow ports, and what it would have stored, by output."""
    ops: list[Op] = []
    new: dict[Value, Value] = {}
    stored: dict[str, Value] = {}
    for op in summary.ops:
        inputs = tuple(new[v] for v in op.inputs)
        if op.kind is OpKind.STORE:
            stored[str(op.attr("port"))] = inputs[0]
            continue
        output = op.result
        if op.kind is OpKind.LOAD and str(op.attr("port")) in narrow:
            output = replace(output, type=_narrow(output.type))
        new[op.result] = output
        ops.append(Op(op.kind, inputs, output, op.attrs))
    return ops, stored


def _only_multiplied(program: Program, port: Port) -> bool:
    value = next(op.result for op in program.ops if op.kind is OpKind.LOAD and op.attr("port") == port.name)
    return all(op.kind is OpKind.DOT and value in op.inputs[:2] for op in program.ops if value in op.inputs)


def _retyped(port: Port, narrow: set[str]) -> Port:
    return replace(port, type=_narrow(port.type)) if port.name in narrow else port


def _narrow(type: TileType) -> TileType:
    return replace(type, dtype=DType.IO)


def _fresh(name: str, names: set[str]) -> str:
    fresh = name if name not in names else f"{name}_next"
    names.add(fresh)
    return fresh
