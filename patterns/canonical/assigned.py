"""Rows that a loop writes into a buffer, which is what a ``stack`` (or ``cat``) of them after the loop would be.

    out = zeros(...);  for t: out[:, t] = row_t    is    out = stack(rows, 1)

where the buffer is made in the graph, nothing reads it before the last row is there, and the rows fill it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.patterns.canonical.pieces import Piece, piece_at

FRESH = frozenset(
    "zeros empty full zeros_like empty_like full_like ones ones_like new_zeros new_empty new_full new_ones".split()
)
"""Functions whose result nothing else can see."""


@dataclass(frozen=True)
class Writes:
    """Assignments to all pieces of one buffer."""

    buffer: fx.Node
    dim: int
    joined: bool
    nodes: list[fx.Node]
    """In the order of the graph."""
    rows: tuple[fx.Node, ...]
    """In the order of the pieces."""


def written(graph: fx.Graph) -> Iterator[Writes]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and name in FRESH and node.kwargs.get("out") is None:
            found = _filled(node, sorted(node.users, key=place.__getitem__))
            if found is not None:
                yield found


def _filled(buffer: fx.Node, users: list[fx.Node]) -> Writes | None:
    """The assignments that fill a buffer, if its first users are nothing else."""
    nodes: list[fx.Node] = []
    by_piece: dict[int, fx.Node] = {}
    first: Piece | None = None
    for user in users:
        if user.target is not operator.setitem or user.args[0] is not buffer:
            break
        piece, row = piece_at(buffer, user.args[1]), user.args[2]
        if piece is None or not isinstance(row, fx.Node) or row is buffer or piece.index in by_piece:
            return None
        first = first or piece
        if (piece.dim, piece.width, piece.rest) != (first.dim, first.width, ()) or not _fills(row, buffer, piece):
            return None
        nodes.append(user)
        by_piece[piece.index] = row
    if first is None or len(by_piece) != first.count or first.count == 1:
        return None
    rows = [by_piece[index] for index in range(first.count)]
    same = len({_kind(row) for row in rows}) == 1
    return Writes(buffer, first.dim, bool(first.width), nodes, tuple(rows)) if same else None


def _fills(row: fx.Node, buffer: fx.Node, piece: Piece) -> bool:
    """True if nothing is broadcast: the row is as large as its place, and lies on the same device."""
    value, whole = compat.example_value(row), compat.example_value(buffer)
    if not isinstance(value, torch.Tensor) or not isinstance(whole, torch.Tensor) or value.device != whole.device:
        return False
    wanted: list[Any] = list(whole.shape)
    wanted[piece.dim : piece.dim + 1] = [piece.width] if piece.width else []
    return all(type(size) is int for size in (*wanted, *value.shape)) and list(value.shape) == wanted


def _kind(row: fx.Node) -> torch.dtype:
    """Rows of different dtypes would be promoted by a stack before they are cast to the buffer's."""
    return compat.example_value(row).dtype
