"""From a program to stages: what runs for all steps at once, and what has to wait for the carry.

The split is the simplest one that is useful to every target: **prologue** (free of the carry, all steps in parallel),
**scan** (what the next carry waits for) and **epilogue** (reads the carry but nothing waits for it, so again all
steps in parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import sympy

from .ir import Dim, DType, Op, OpKind, Program, Value

VIEWS = (OpKind.TRANSPOSE, OpKind.CARRY, OpKind.STORE, OpKind.LOAD)


class Section(str, Enum):
    PROLOGUE = "prologue"
    SCAN = "scan"
    EPILOGUE = "epilogue"


@dataclass(frozen=True)
class Buffer:
    """A tensor that crosses a stage: one tile per element of ``layout``'s leading axes."""

    name: str
    shape: tuple[Dim, Dim]
    dtype: DType
    layout: str

    @property
    def elements(self) -> sympy.Expr:
        return _dim(self.shape[0]) * _dim(self.shape[1])


@dataclass(frozen=True)
class Stage:
    """A run of ops with one domain; ``flops`` and ``bytes`` per lane and step, in C, K, V, io_bytes and acc_bytes."""

    name: Section
    ops: tuple[Op, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    domain: tuple[str, ...]
    rounding: tuple[str, ...]
    flops: sympy.Expr
    bytes: sympy.Expr


@cache
def sections(program: Program) -> dict[Op, Section]:
    """The section of every op."""
    dependent: set[Value] = set()
    for op in program.ops:
        if op.output is not None and (op.kind is OpKind.CARRY or any(v in dependent for v in op.inputs)):
            dependent.add(op.output)
    awaited: set[Value] = set() if program.carry is None else {program.carry.step}
    for op in reversed(program.ops):
        if op.output is not None and op.output in awaited:
            awaited.update(op.inputs)
    placed: dict[Op, Section] = {}
    for op in program.ops:
        if op.kind is OpKind.STORE:
            placed[op] = Section.EPILOGUE
        elif op.result not in dependent:
            placed[op] = Section.PROLOGUE
        elif op.kind is OpKind.CARRY or op.result in awaited:
            placed[op] = Section.SCAN
        else:
            placed[op] = Section.EPILOGUE
    return placed


@cache
def stages(program: Program) -> tuple[Stage, ...]:
    """The non-empty sections as stages, with what crosses them."""
    placed = sections(program)
    return tuple(_stage(program, section) for section in Section if section in placed.values())


def _stage(program: Program, section: Section) -> Stage:
    placed = sections(program)
    ops = tuple(op for op in program.ops if placed[op] is section)
    made = {op.output for op in ops if op.output is not None}
    reads: dict[str, Buffer] = {}
    writes: dict[str, Buffer] = {}
    for op in ops:
        if op.kind in (OpKind.LOAD, OpKind.STORE):
            port = program.port(str(op.attr("port")))
            target = reads if op.kind is OpKind.LOAD else writes
            target[port.name] = Buffer(port.name, port.type.shape, port.type.dtype, port.per.value)
        for value in op.inputs:
            if value not in made:
                reads[value.name] = _buffer(value)
    used_outside = {value for op in program.ops if placed[op] is not section for value in op.inputs}
    for value in made & used_outside:
        writes[value.name] = _buffer(value)
    carry = program.carry
    if carry is not None and section is Section.SCAN:
        reads[carry.init] = Buffer(carry.init, carry.type.shape, carry.type.dtype, "lane")
        writes[carry.final] = Buffer(carry.final, carry.type.shape, carry.type.dtype, "lane")
    crossing = tuple(sorted(reads.values(), key=_name)), tuple(sorted(writes.values(), key=_name))
    moved = sum((_bytes(buffer) for side in crossing for buffer in side), sympy.Integer(0))
    rounding = tuple(op.result.name for op in ops if op.kind is OpKind.CAST)
    domain = ("lane",) if section is Section.SCAN else ("lane", "step")
    flops = sum((op_flops(op) for op in ops), sympy.Integer(0))
    return Stage(section, ops, *crossing, domain, rounding, sympy.expand(flops), sympy.expand(moved))


def op_flops(op: Op) -> sympy.Expr:
    """Multiplies and adds of one op on one tile, counted as the algorithm needs them (triangles as triangles)."""
    if op.kind in (*VIEWS, OpKind.CAST, OpKind.EYE, OpKind.MASK):
        return sympy.Integer(0)
    if op.kind is OpKind.DOT:
        a = op.inputs[0].type
        inner = a.rows if op.attr("trans_a", False) else a.cols
        rows, cols = op.result.type.shape
        return 2 * _dim(rows) * _dim(cols) * _dim(inner)
    if op.kind is OpKind.GATED_GRAM:
        rows, cols = op.inputs[0].type.shape
        pairs = _dim(rows) * (_dim(rows) + (-1 if op.attr("strict", False) else 1)) / 2
        return 2 * pairs * _dim(cols)
    if op.kind is OpKind.UNIT_LOWER_INVERSE:
        n = _dim(op.result.type.rows)
        return n * (n - 1) * (n - 2) / 3
    source = op.inputs[0].type if op.kind is OpKind.REDUCE else op.result.type
    return _dim(source.rows) * _dim(source.cols)


def _dim(dim: Dim) -> sympy.Expr:
    return sympy.Symbol(dim, positive=True, integer=True) if isinstance(dim, str) else sympy.Integer(dim)


def _bytes(buffer: Buffer) -> sympy.Expr:
    return buffer.elements * sympy.Symbol(f"{buffer.dtype.value}_bytes", positive=True, integer=True)


def _buffer(value: Value) -> Buffer:
    return Buffer(value.name, value.type.shape, value.type.dtype, "step")


def _name(buffer: Buffer) -> str:
    return buffer.name
