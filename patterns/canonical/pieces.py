"""Pieces of a tensor along one dimension, and what gathers them again: how loops over tokens and chunks spell that.

x[:, t]    x.select(1, t)    x.unbind(1)[t]    for x_t in x                     one entry: the dimension goes
x[:, i:j]    x.narrow(1, i, n)    x.split(n, 1)[i]    x.chunk(n, 1)[i]          several: it stays
stack(rows, 1)    cat(rows, 1)    out = zeros(...);  for t: out[:, t] = row_t   rows side by side
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kdacompile import compat
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import cut_of, root
from kdacompile.patterns.engine.vocabulary import MAKERS, ORDERED


@dataclass(frozen=True)
class Piece:
    """Piece ``index`` of the ``count`` equal ones that ``source`` consists of along ``dim``."""

    source: Value
    dim: int
    index: int
    count: int
    width: int
    """Entries in each; 0 where the dimension goes."""


@dataclass(frozen=True)
class Gathered:
    """At least two rows of one size, along which dimension they lie, and whether they have that dimension themselves.

    ``ops`` are those that put them there.
    """

    rows: tuple[Value, ...]
    dim: int
    joined: bool
    ops: tuple[Op, ...]

    @property
    def made(self) -> bool:
        """Whether that makes a tensor; else rows are written to one."""
        return len(self.ops) == 1


def piece_of(value: Value) -> Piece | None:
    """The piece a value is; None if it is none, or one that is not like the others."""
    op = value.op
    if op is None or not op.reads:
        return None
    source = op.reads[0]
    rank = len(source.shape)
    if op.name == "select":
        return _piece(source, op.args[1] % rank, op.args[2], 0)
    if op.name == "unbind":
        return _piece(source, (*op.args, 0)[1] % rank, op.outs.index(value), 0)
    found = cut_of(value)
    return None if found is None else _piece(source, *found, value.shape[found[0]])


def in_whole(piece: Piece) -> Piece:
    """An entry of a run of entries as one of what the run is cut from: of 10 tokens in chunks of 4."""
    found = cut_of(piece.source)
    if piece.width or found is None or found[0] != piece.dim or piece.source.op is None:
        return piece
    outer = _piece(piece.source.op.reads[0], piece.dim, found[1] + piece.index, 0)
    return piece if outer is None else in_whole(outer)


def _piece(source: Value, dim: int, start: int, width: int) -> Piece | None:
    """Of an open size entries alone are pieces: a loop that reads each of them has counted them, and the match is for
    that number.
    """
    size, step = source.shape[dim], max(1, width)
    if (width and not _is_fixed(source, dim)) or size % step or start % step or not -size <= start < size:
        return None
    return Piece(source, dim, start % size // step, size // step, width)


def _is_fixed(value: Value, dim: int) -> bool:
    """False for a size that is open in the model's graph."""
    return value.node is None or isinstance(compat.example_value(value.node).shape[dim], int)


def gathered(value: Value) -> Gathered | None:
    """The rows that a value gathers."""
    op = value.op
    if op is None:
        return None
    if op.name in ("stack", "cat"):
        rows = tuple(op.args[0])
        joined = op.name == "cat"
        found = Gathered(rows, (*op.args, 0)[1] % len(value.shape), joined, (op,))
    else:
        found = _assigned(op)
    if found is None or len(found.rows) < 2:
        return None
    return found if len({(_sizes(row), row.dtype) for row in found.rows}) == 1 else None


def _sizes(value: Value) -> str:
    """Open sizes are compared by their names: to compare the sizes puts a guard on them."""
    shape = value.shape if value.node is None else compat.example_value(value.node).shape
    return str(tuple(shape))


def _assigned(last: Op) -> Gathered | None:
    """Rows assigned to all pieces of a buffer that the graph makes, which nothing reads before the last is there."""
    ops: list[Op] = []
    rows: dict[int, Value] = {}
    first: Piece | None = None
    op: Op | None = last
    while op is not None and op.name in ("select_scatter", "slice_scatter"):
        buffer, row = op.args[:2]
        piece = _place(op)
        if piece is None or piece.index in rows or (op is not last and op.out.users != [ops[-1]]):
            return None
        first = first or piece
        if (piece.dim, piece.width) != (first.dim, first.width) or not _on_one_device(op):
            return None
        ops.append(op)
        rows[piece.index] = row
        if len(rows) == piece.count:
            start = root(buffer, ORDERED).op
            made = start is not None and start.name in MAKERS and buffer.users == [op]
            ordered = tuple(rows[index] for index in range(piece.count))
            return Gathered(ordered, first.dim, bool(first.width), tuple(ops)) if made else None
        op = buffer.op
    return None


def _place(op: Op) -> Piece | None:
    """The piece of a buffer that is written."""
    buffer, row, *place = op.args
    dim = (*place, 0)[0] % len(buffer.shape)
    if op.name == "select_scatter":
        return _piece(buffer, dim, place[1], 0)
    if place[3:] not in ([], [1]) or math.prod(row.shape) == 0:
        return None
    start: int = (*place, None, None)[1] or 0
    return _piece(buffer, dim, start + (buffer.shape[dim] if start < 0 else 0), row.shape[dim])


def _on_one_device(op: Op) -> bool:
    """False for a row that comes from another device: the functional graph knows none."""
    read = [] if op.node is None else [compat.example_value(arg) for arg in op.node.all_input_nodes]
    return len({value.device for value in read if hasattr(value, "device")}) == 1
