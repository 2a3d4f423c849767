"""Several sequences whose rows one list gathers, taken apart: tensors and a list of its own for each.

    for t: .. q[:, t] .. rows.append(o_t)       becomes     for t < n:  .. q[:, :n][:, t] ..
    o = stack(rows, 1)                                      for t >= n: .. q[:, n:][:, t - n] ..
                                                            o = cat([stack(rows[:n], 1), stack(rows[n:], 1)], 1)

A packed batch in one loop, or a loop that empties its state where a sequence begins: rows of two sequences share no
product of activations. Both texts are the same function whatever the rows are, so there is nothing to prove.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Value
from kdacompile.patterns.canonical.assigned import Writes, written
from kdacompile.patterns.canonical.pieces import Piece, piece_of
from kdacompile.patterns.canonical.sink import gathered
from kdacompile.patterns.recurrence.regions import find_groups

LEAST = 4
"""Rows that may be two sequences."""


@dataclass(eq=False)
class Rows:
    """What gathers rows (nothing yet, where they are assigned to a buffer), and where sequences begin and end."""

    node: fx.Node
    nodes: tuple[fx.Node, ...]
    dim: int
    joined: bool
    writes: Writes | None
    bounds: tuple[int, ...] = ()


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Take apart what rows gather that share nothing with the rows before them."""
    rows = [item for item in _rows(graph) if len(item.nodes) >= LEAST]
    masks = _masks(edit.functional) if rows else {}
    apart: list[Rows] = []
    for item in rows:
        if item.writes is not None and not edit.fixed.isdisjoint(item.nodes):
            continue  # they are read later than they are written, and must not change in between
        item.bounds = _bounds([masks.get(node, 0) for node in item.nodes])
        if len(item.bounds) > 2:
            apart.append(item)
    with contextlib.suppress(CannotEdit):
        pairs = [*_pieces(edit, graph, {item.bounds[-1]: item.bounds for item in apart})]
        pairs += [_gathered(edit, item) for item in apart]
        for old, new in pairs:
            edit.redefine(old, new)


def _rows(graph: fx.Graph) -> list[Rows]:
    found = [(node, gathered(node)) for node in graph.nodes if node.op == "call_function"]
    rows = [Rows(node, *what, None) for node, what in found if what is not None]
    return rows + [Rows(item.nodes[-1], item.rows, item.dim, item.joined, item) for item in written(graph)]


def _masks(functional: Graph) -> dict[fx.Node, int]:
    """The products of activations each node depends on, as bits."""
    groups = find_groups(functional)
    masks = groups[0].masks if groups else {}
    return {
        node: masks[value.op]
        for value, names in functional.names.items()
        for node, _ in names
        if value.op is not None and value.op in masks
    }


def _bounds(masks: list[int]) -> tuple[int, ...]:
    """Where rows begin to share nothing with the run before them; with both ends. Empty if a row has no products, or if
    most stand alone.
    """
    if not all(masks):
        return ()
    bounds, seen = [0], 0
    for index, mask in enumerate(masks):
        if index and not mask & seen:
            bounds.append(index)
            seen = 0
        seen |= mask
    return (*bounds, len(masks)) if 2 * len(bounds) <= len(masks) else ()


def _pieces(edit: Edit, graph: fx.Graph, bounds: dict[int, tuple[int, ...]]) -> Iterator[tuple[Value, Value]]:
    """Pieces of as many as there are rows, with the pieces of their sequence's share that they become: (old, new)."""
    for node in graph.nodes:
        piece = piece_of(node) if node.op in ("call_function", "call_method") and node not in edit.fixed else None
        if piece is None or piece.count not in bounds or piece.source in edit.fixed:
            continue
        start, stop = next(ends for ends in pairwise(bounds[piece.count]) if ends[0] <= piece.index < ends[1])
        width = max(1, piece.width)
        source, sizes = edit.value(piece.source), (start * width, (stop - start) * width)
        share = edit.call("narrow", source, piece.dim, *sizes, like=node)
        yield edit.value(node), _piece(edit, node, share, piece, piece.index - start)


def _piece(edit: Edit, like: fx.Node, share: Value, piece: Piece, index: int) -> Value:
    if piece.width:
        return edit.call("narrow", share, piece.dim, index * piece.width, piece.width, like=like)
    value = edit.call("select", share, piece.dim, index, like=like)
    return edit.call(operator.getitem, value, piece.rest, like=like) if piece.rest else value


def _gathered(edit: Edit, rows: Rows) -> tuple[Value, Value]:
    """What holds the rows, and the sequences' own rows side by side: (old, new)."""
    old = edit.value(rows.node) if rows.writes is None else edit.written(rows.writes.buffer, rows.node)
    call = torch.cat if rows.joined else torch.stack
    values = list(map(edit.value, rows.nodes))
    parts = [edit.call(call, values[start:stop], rows.dim, like=rows.node) for start, stop in pairwise(rows.bounds)]
    whole = edit.call(torch.cat, parts, rows.dim, like=rows.node)
    return old, whole if whole.dtype == old.dtype else edit.call("to", whole, old.dtype, like=rows.node)
