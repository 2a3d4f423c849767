"""Several sequences whose rows one list gathers, taken apart: tensors and a list of its own for each.

    for t: .. q[:, t] .. rows.append(o_t)       becomes     for t < n:  .. q[:, :n][:, t] ..
    o = stack(rows, 1)                                      for t >= n: .. q[:, n:][:, t - n] ..
                                                            o = cat([stack(rows[:n], 1), stack(rows[n:], 1)], 1)

A packed batch in one loop, or a loop that empties its state where a sequence begins: rows of two sequences share no
product of activations. Both texts are the same function whatever the rows are, so there is nothing to prove.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.ir import Graph
from kdacompile.patterns.canonical.assigned import Writes, written
from kdacompile.patterns.canonical.change import Change, overwritten
from kdacompile.patterns.canonical.pieces import Piece, piece_of
from kdacompile.patterns.canonical.proof import RUN_ERRORS
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


def attempt(graph: fx.Graph, functional: Callable[[], Graph]) -> Packed | None:
    """What comes apart in ``graph``; None if nothing does."""
    rows = [item for item in _rows(graph) if len(item.nodes) >= LEAST]
    if not rows or compat.switches_modes(graph):
        return None
    found = functional()
    fixed = overwritten(found)
    masks = _masks(found)
    apart: list[Rows] = []
    for item in rows:
        if item.writes is not None and not fixed.isdisjoint(item.nodes):
            continue  # they are read later than they are written, and must not change in between
        item.bounds = _bounds([masks.get(node, 0) for node in item.nodes])
        if len(item.bounds) > 2:
            apart.append(item)
    return Packed(graph, apart, fixed) if apart else None


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


class Packed(Change):
    """Sequences taken apart."""

    def __init__(self, graph: fx.Graph, rows: list[Rows], fixed: set[fx.Node]) -> None:
        """``fixed``: nodes that share memory with something the graph writes; they are left as they are."""
        super().__init__(graph)
        self.rows = rows
        self.fixed = fixed

    def apply(self, functional: Callable[[], Graph]) -> bool:
        """False, with nothing changed, if what comes out would be laid out otherwise."""
        bounds = {item.bounds[-1]: item.bounds for item in self.rows}
        try:
            self.take_apart(bounds)
            for item in self.rows:
                self.gather_apart(item)
        except RUN_ERRORS:
            self.undo()
            return False
        old, new = ([compat.example_value(pair[i]).stride() for pair in self.replaced] for i in (2, 1))
        if old != new:
            self.undo()
            return False
        return True

    def take_apart(self, bounds: dict[int, tuple[int, ...]]) -> None:
        """Pieces of as many as there are rows become pieces of their sequence's share."""
        shares: dict[tuple[fx.Node, int, int], fx.Node] = {}
        for node in list(self.graph.nodes):
            piece = piece_of(node) if node.op in ("call_function", "call_method") and node not in self.fixed else None
            if piece is None or piece.count not in bounds or piece.source in self.fixed:
                continue
            start, stop = next(ends for ends in pairwise(bounds[piece.count]) if ends[0] <= piece.index < ends[1])
            key = piece.source, piece.dim, start
            width = max(1, piece.width)
            with self.graph.inserting_before(node):
                if key not in shares:
                    shares[key] = self.method(
                        node, piece.source, "narrow", piece.dim, start * width, (stop - start) * width
                    )
                self.replace(node, self.piece(node, shares[key], piece, piece.index - start), list(node.users))

    def piece(self, like: fx.Node, share: fx.Node, piece: Piece, index: int) -> fx.Node:
        if piece.width:
            return self.method(like, share, "narrow", piece.dim, index * piece.width, piece.width)
        node = self.method(like, share, "select", piece.dim, index)
        return self.made(self.graph.call_function(operator.getitem, (node, piece.rest)), like) if piece.rest else node

    def gather_apart(self, rows: Rows) -> None:
        node = rows.node
        if rows.writes is not None:
            node = rows.writes.gather()
            self.new.append(node)
        call = torch.cat if rows.joined else torch.stack
        with self.graph.inserting_before(node):
            parts = [
                self.made(self.graph.call_function(call, (list(rows.nodes[start:stop]), rows.dim)), rows.nodes[start])
                for start, stop in pairwise(rows.bounds)
            ]
            whole = self.made(self.graph.call_function(torch.cat, (parts, rows.dim)), rows.nodes[0])
            self.replace(node, whole, list(node.users))

    def undo(self) -> None:
        self.put_back()
        for rows in self.rows:
            if rows.writes is not None:
                rows.writes.undo()
        self.erase_new()

    def finish(self) -> None:
        self.erase_unread(old for _, _, old in self.replaced)
