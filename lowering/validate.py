"""The validator: what every pass and target may take for granted about a tile program."""

from __future__ import annotations

from .errors import (
    CarryError,
    SingleAssignmentError,
    TileDtypeError,
    TileProgramError,
    TileShapeError,
    UndefinedValueError,
)
from .ir import Carry, Combine, DType, Op, OpKind, Per, Program, Value, infer


def validate(program: Program) -> None:
    """Raise a :class:`TileProgramError` unless the program is well formed.

    Checked: ports and values are named once; every operand is defined before it is read; every recorded type is the
    type its op infers; loads, stores and carry reads agree with their ports; every output is written exactly once;
    a carry's init, step and final types agree, its combine programs fit each other, and no step reads the other carry.
    """
    _check_ports(program)
    defined: dict[str, Value] = {}
    stored: set[str] = set()
    for op in program.ops:
        for value in op.inputs:
            if defined.get(value.name) != value:
                raise UndefinedValueError(f"{value} is read before it is written", str(op))
        if op.kind is OpKind.STORE:
            _check_store(program, op, stored)
            continue
        value = op.result
        if value.name in defined:
            raise SingleAssignmentError(f"{value} is defined twice", str(op))
        _check_type(program, op)
        defined[value.name] = value
    _check_outputs(program, stored)
    for carry in program.carries:
        _check_carry(program, carry, defined)
    _check_directions(program)


def _check_ports(program: Program) -> None:
    names = [port.name for port in (*program.inputs, *program.outputs)]
    for name in names:
        if names.count(name) > 1:
            raise SingleAssignmentError("port declared twice", name)


def _check_store(program: Program, op: Op, stored: set[str]) -> None:
    name = str(op.attr("port"))
    port = next((p for p in program.outputs if p.name == name), None)
    if port is None:
        raise TileProgramError("store to an undeclared output", str(op))
    if name in stored:
        raise SingleAssignmentError("output stored twice", str(op))
    value = op.inputs[0]
    if value.type.shape != port.type.shape:
        raise TileShapeError(f"{name} is {port.type}, the value is {value.type}", str(op))
    if value.type.dtype is not port.type.dtype:
        raise TileDtypeError(f"{name} is {port.type}, the value is {value.type}", str(op))
    stored.add(name)


def _check_type(program: Program, op: Op) -> None:
    if op.kind is OpKind.LOAD:
        name = str(op.attr("port"))
        port = next((p for p in program.inputs if p.name == name), None)
        if port is None:
            raise UndefinedValueError("load from an undeclared input", str(op))
        expected = port.type
    elif op.kind is OpKind.CARRY:
        carry = next((carry for carry in program.carries if carry.name == op.attr("carry")), None)
        if carry is None:
            raise CarryError("read of an undeclared carry", str(op))
        expected = carry.type
    else:
        expected = infer(op.kind, op.inputs, dict(op.attrs), str(op))
    if expected.shape != op.result.type.shape:
        raise TileShapeError(f"recorded {op.result.type}, the op makes {expected}", str(op))
    if expected.dtype is not op.result.type.dtype:
        raise TileDtypeError(f"recorded {op.result.type}, the op makes {expected}", str(op))
    if op.kind in (OpKind.SCALE, OpKind.NORMALISE) and op.attr("by") not in program.scalars:
        raise UndefinedValueError("undeclared scalar", str(op))


def _check_outputs(program: Program, stored: set[str]) -> None:
    final = {carry.final for carry in program.carries}
    for port in program.outputs:
        if port.name not in stored | final:
            raise TileProgramError("output is never stored", str(port))


def _check_carry(program: Program, carry: Carry, defined: dict[str, Value]) -> None:
    if defined.get(carry.step.name) != carry.step:
        raise UndefinedValueError("the carry's step is not a value of the program", carry.name)
    if carry.step.type != carry.type:
        raise CarryError(f"carried as {carry.type}, stepped to {carry.step.type}", carry.name)
    if carry.type.dtype is not DType.ACC:
        raise CarryError("a carry stays in the accumulation dtype", carry.name)
    for name in (carry.init, carry.final):
        port = program.port(name)
        if port.type != carry.type or port.per is not Per.LANE:
            raise CarryError(f"port {port} does not fit the carry {carry.type}", carry.name)
    if carry.combine is not None:
        _check_combine(carry, carry.combine)


def _check_directions(program: Program) -> None:
    """The two carries of a program are independent, so that their scans may run in any order, or at once."""
    needed = {carry.name: {carry.step} for carry in program.carries}
    for op in reversed(program.ops):
        for name, values in needed.items():
            if op.output not in values:
                continue
            if op.kind is OpKind.CARRY and op.attr("carry") != name:
                raise CarryError(f"its step reads {op.output}, which walks the other way", name)
            values.update(op.inputs)


def _check_combine(carry: Carry, combine: Combine) -> None:
    """``merge`` takes an earlier and a later summary, as ``x0`` and ``x1`` for every output ``x``, and returns one."""
    if combine.summary.carries or combine.merge.carries:
        raise CarryError("combine programs have no carry of their own", carry.name)
    made = {port.name: port.type for port in combine.summary.outputs}
    merged = {port.name: port.type for port in combine.merge.outputs}
    taken = {port.name: port.type for port in combine.merge.inputs}
    expected = {f"{name}{side}": type for name, type in made.items() for side in (0, 1)}
    if merged != made or taken != expected:
        raise CarryError("merge does not map two summaries to one", carry.name)
