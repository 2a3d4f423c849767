"""Stages and buffers: a program as runs of work on one unit, and the tensors that cross between them.

The coarsest split is useful to every target: **prologue** (free of the carry, all steps in parallel), **scan** (what
the next carry waits for) and **epilogue** (reads the carry but nothing waits for it, so again all steps in parallel). A
carry that walks from the end has a scan of its own, **reverse**, which neither reads the other nor is read by it.
``partition.py`` places ops in it, and the torch executor runs the three as they are. Where products
and everything else live on different cores, ``lowering/plan`` cuts each of them further, by unit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import cast

import sympy
from sympy.parsing.sympy_parser import parse_expr

from .ir import Dim, DType, Op, OpKind, Value
from .target import Unit

VIEWS = (OpKind.TRANSPOSE, OpKind.CARRY, OpKind.STORE, OpKind.LOAD)


class Section(str, Enum):
    PROLOGUE = "prologue"
    SCAN = "scan"
    REVERSE = "reverse"
    EPILOGUE = "epilogue"
    SUMS = "sums"  # over tokens, of what the epilogue makes: only where a target wants them in a kernel of their own


SCANS = (Section.SCAN, Section.REVERSE)
"""The sections that go step by step."""


class Scope(str, Enum):
    """How long a buffer's contents matter, and so where it is kept."""

    PORT = "port"  # the caller's tensor
    CARRY = "carry"  # the carried tile, resident on its unit for the whole scan
    TENSOR = "tensor"  # one tile per lane and step, written by one section and read by another
    WORKSPACE = "workspace"  # one tile per core group, overwritten every step: where two units meet inside a section
    LOCAL = "local"  # made and read by one unit inside one section (with addresses: on its way through a workspace)


@dataclass(frozen=True)
class Buffer:
    """A tensor that crosses a stage.

    ``shape`` and ``dtype`` are those of one tile; ``layout`` says what there is one tile of: "tokens", "step" or
    "lane" as for ports, "group" for a workspace. ``reason`` says why a buffer is kept in the accumulation dtype.
    ``producer`` and ``consumers`` are stage names. A workspace has ``copies`` (two where a step's tile is still read
    while the next step's is written), ``tiles`` along the value columns, a ``lifetime`` (first write and last read, as
    positions in the step) and, per tile and copy, a byte ``addresses`` entry. ``streamed``: handed over row by row.
    """

    name: str
    shape: tuple[Dim, Dim]
    dtype: DType
    layout: str
    scope: Scope = Scope.TENSOR
    producer: str = ""
    consumers: tuple[str, ...] = ()
    reason: str = ""
    tiles: int = 1
    copies: int = 1
    lifetime: tuple[int, int] | None = None
    addresses: tuple[int, ...] = ()
    streamed: bool = False

    @property
    def elements(self) -> sympy.Expr:
        return size(self.shape[0]) * size(self.shape[1])

    def bytes(self, sizes: Mapping[str, int], width: int) -> int:
        """Bytes of one tile, with ``sizes`` for the symbols and ``width`` bytes an element."""
        return evaluate(self.elements, sizes) * width


@dataclass(frozen=True)
class Task:
    """One op, or one part of a macro-op, on one unit.

    ``part`` is empty for a whole op. ``inputs`` are what it reads with lossless widening left out: a tile that was
    loaded narrow is read narrow and widened on arrival.
    """

    op: Op
    unit: Unit
    inputs: tuple[Value, ...]
    output: Value
    part: str = ""

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def kind(self) -> OpKind:
        return self.op.kind

    def __str__(self) -> str:
        if not self.part:
            return str(self.op)
        words = ", ".join(str(value) for value in self.inputs)
        return f"{self.output} = {self.op.kind.value}.{self.part}({words}) : {self.output.type}"


@dataclass(frozen=True)
class Stage:
    """A run of tasks on one unit with one domain.

    ``domain``: ("lane", "step") where all steps run at once, ("lane",) inside the scan. ``rounding``: values rounded
    to the inputs' dtype here. ``flops`` and ``bytes`` per lane and step, in the program's symbols, io_bytes and
    acc_bytes. ``shift``: tasks (by name) that work for a step this many steps after the stage's own.
    """

    name: str
    section: Section
    unit: Unit
    tasks: tuple[Task, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    domain: tuple[str, ...]
    rounding: tuple[str, ...]
    flops: sympy.Expr
    bytes: sympy.Expr
    shift: Mapping[str, int]

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(dict.fromkeys(task.op for task in self.tasks))


def op_flops(op: Op) -> sympy.Expr:
    """Multiplies and adds of one op on one tile, counted as the algorithm needs them (triangles as triangles)."""
    if op.kind in (*VIEWS, OpKind.CAST, OpKind.EYE, OpKind.MASK):
        return sympy.Integer(0)
    if op.kind is OpKind.DOT:
        a = op.inputs[0].type
        inner = a.rows if op.attr("trans_a", False) else a.cols
        rows, cols = op.result.type.shape
        return 2 * size(rows) * size(cols) * size(inner)
    if op.kind is OpKind.GATED_GRAM:
        rows, cols = op.inputs[0].type.shape
        pairs = size(rows) * (size(rows) + (-1 if op.attr("strict", False) else 1)) / 2
        return 2 * pairs * size(cols)
    if op.kind is OpKind.GATED_DOT:
        rows, cols = op.result.type.shape
        return size(rows) * (size(rows) + 1) * size(cols)
    if op.kind is OpKind.UNIT_LOWER_INVERSE:
        n = size(op.result.type.rows)
        return n * (n - 1) * (n - 2) / 3
    reduces = op.kind in (OpKind.REDUCE, OpKind.ROW_SUM, OpKind.ROW_MAX)
    source = op.inputs[0].type if reduces else op.result.type
    return size(source.rows) * size(source.cols)


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


@functools.cache
def size(dim: Dim) -> sympy.Expr:
    """A dimension as a formula; a macro-op's own buffers have dimensions like ``C*(C/16 - 1)/2``."""
    if isinstance(dim, int):
        return sympy.Integer(dim)
    if dim.isidentifier():
        return symbol(dim)
    names = {name: symbol(name) for name in re.findall(r"[A-Za-z_]\w*", dim) if name != "log"}
    return cast(sympy.Expr, parse_expr(dim, local_dict=names))


def evaluate(formula: sympy.Expr, sizes: Mapping[str, int]) -> int:
    """A formula's value, rounded up."""
    if formula.is_Integer:
        return int(formula)
    if formula.is_Symbol:
        return sizes[str(formula)]
    return _value(formula, tuple(sizes.items()))


@functools.cache
def _value(formula: sympy.Expr, sizes: tuple[tuple[str, int], ...]) -> int:
    return int(sympy.ceiling(formula.subs({symbol(name): n for name, n in sizes})))
