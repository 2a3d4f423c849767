"""Several sequences whose rows one list gathers, taken apart: tensors and a list of its own for each. A loop over some
of the tokens reads a tensor of these alone.

    for t: .. q[:, t] .. rows.append(o_t)       becomes     for t < n:  .. q[:, :n][:, t] ..
    o = stack(rows, 1)                                      for t >= n: .. q[:, n:][:, t - n] ..
                                                            o = cat([stack(rows[:n], 1), stack(rows[n:], 1)], 1)

    for t < n:  .. q[:, t] .. rows.append(o_t)  becomes     for t < n:  .. q[:, :n][:, t] ..

A packed batch in one loop, or a loop that empties its state where a sequence begins: rows of two sequences share no
product of activations. Both texts are the same function whatever the rows are, so there is nothing to prove.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.canonical.pieces import Gathered, gathered, piece_of
from kdacompile.patterns.recurrence.regions import find_groups

LEAST = 4
"""Rows that may be two sequences."""


def apply(edit: Edit) -> None:
    """Take apart what rows gather that share nothing with the rows before them."""
    made = [(op.out, gathered(op.out)) for op in edit.functional.ops if len(op.outs) == 1]
    rows = {value: how for value, how in made if how is not None and len(how.rows) >= LEAST}
    masks = _masks(edit.functional) if rows else {}
    bounds = {value: _bounds([masks.get(row.op, 0) for row in how.rows]) for value, how in rows.items()}
    apart = {value: how for value, how in rows.items() if len(bounds[value]) > 2}
    with contextlib.suppress(CannotEdit):
        runs = _runs(edit.functional, {len(how.rows) for how in rows.values()})
        pairs = [*_pieces(edit, runs | {bounds[value][-1]: bounds[value] for value in apart})]
        pairs += [(value, _joined(edit, value, how, bounds[value])) for value, how in apart.items()]
        edit.redefine_all(pairs)


def _masks(functional: Graph) -> dict[Op | None, int]:
    """The products of activations each operator depends on, as bits."""
    groups = find_groups(functional)
    return dict(groups[0].masks.items()) if groups else {}


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


def _runs(functional: Graph, lengths: set[int]) -> dict[int, tuple[int, int]]:
    """Where a loop with one row for each piece that it reads begins and ends, by how many pieces there are."""
    read: dict[int, set[int]] = {}
    for value in (value for op in functional.ops for value in op.outs if value.users and not value.const):
        piece = piece_of(value) if lengths else None
        if piece is not None:
            read.setdefault(piece.count, set()).add(piece.index)
    runs = {count: (min(found), max(found) + 1) for count, found in read.items()}
    return {count: run for count, run in runs.items() if run[1] - run[0] in lengths - {count}}


def _pieces(edit: Edit, bounds: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[Value, Value]]:
    """Pieces of as many as there are rows, with the pieces of their sequence's share that they become: (old, new)."""
    pieces = [(value, piece_of(value)) for op in edit.functional.ops for value in op.outs]
    for old, piece in pieces:
        op = old.op
        if op is None or op.node is None or piece is None or piece.count not in bounds or old.const:
            continue
        if not edit.fixed.isdisjoint((old.node, piece.source.node)):
            continue
        start, stop = next(ends for ends in pairwise(bounds[piece.count]) if ends[0] <= piece.index < ends[1])
        width, index = max(1, piece.width), piece.index - start
        share = edit.call("narrow", piece.source, piece.dim, start * width, (stop - start) * width, like=op.node)
        which = ("narrow", index * width, width) if piece.width else ("select", index)
        yield old, edit.call(which[0], share, piece.dim, *which[1:], like=op.node)


def _joined(edit: Edit, value: Value, how: Gathered, bounds: tuple[int, ...]) -> Value:
    """The sequences' own rows side by side."""
    call, like = torch.cat if how.joined else torch.stack, next(op.node for op in how.ops if op.node is not None)
    parts = [edit.call(call, list(how.rows[start:stop]), how.dim, like=like) for start, stop in pairwise(bounds)]
    whole = edit.call(torch.cat, parts, how.dim, like=like)
    return whole if whole.dtype == value.dtype else edit.call("to", whole, value.dtype, like=like)
