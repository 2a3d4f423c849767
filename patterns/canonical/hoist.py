"""What a loop does to every token (or chunk) alike, done to all of them at once: before the loop, or behind it.

    for t: beta_t = sigmoid(b[:, t])    becomes    beta = sigmoid(b);    for t: beta_t = beta[:, t]

    for t: q_t = W x[:, t]                becomes    q = W x;              for t: q_t = q[:, t]

    for t: rows.append(norm(S_t^T q_t) + d * v[:, t])    becomes    for t: reads.append(S_t^T q_t)
    o = stack(rows)                                                 o = norm(stack(reads)) + d * v

Inside the loop an activation cuts a region at every token: no tensor holds all of beta, or all that was read from the
states. So operators that differ only in the piece they read, or in the row they work on (``rows``), are brought
together, and each becomes its piece of the whole.

Only operators that work on each piece by itself take part: pointwise functions, norms and sums along other dimensions,
projections, rearrangements. Nothing they read may be written in place.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Value
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.pieces import Piece
from kdacompile.patterns.canonical.proof import agrees
from kdacompile.patterns.canonical.rows import Loops, Rows, Sink, line_of
from kdacompile.patterns.engine.values import number


def may_help(functional: Graph) -> bool:
    """True if there is something to bring together, as far as the operators alone tell."""
    return Loops(functional).worth_it


def apply_across(edit: Edit) -> None:
    """The same where tokens of chunks of several lengths are those of one loop, as the last chunk of a sequence may be
    shorter; gates of keys too. First they are taken for loops of their own: packed sequences are that.
    """
    apply(edit, across=True)


def apply(edit: Edit, *, across: bool = False) -> None:
    """Bring together what is wanted in front of loops and behind them; nothing, if a call does not take all pieces at
    once, if a gradient is cut within (``detach_`` leaves no operator), or if the graph cannot be shown to compute what
    it did.
    """
    found = Loops(edit.functional, edit.fixed, across=across)
    if found.worth_it:
        with contextlib.suppress(CannotEdit):
            pairs = Hoist(edit, found).pairs()
            if agrees(edit, pairs, found.inside()):
                edit.redefine_all([(old, new) for new, old in pairs])


class Hoist:
    """The calls for all rows at once, made on values of the functional graph."""

    def __init__(self, edit: Edit, found: Loops) -> None:
        self.edit = edit
        self.found = found
        self.whole: dict[Rows, Value] = {}
        """All rows, along a dimension of their own in front."""
        self.joined: dict[Rows, Value] = {}
        """Slices side by side again."""

    def pairs(self) -> list[tuple[Value, Value]]:
        """(new, old): pieces of what was brought together, and rows that were worked on after they were gathered."""
        for rows in self.found.wanted:
            self.together(rows, rows.line)
        gathered = [(self.gathered(sink), sink.value) for sink in self.found.sinks]
        pieces = [
            (self.piece(rows, turn, value), value)
            for value, (rows, turn) in self.found.member.items()
            if rows in self.whole and rows.piece is None and self.is_read(value)
        ]
        return [*gathered, *pieces]

    def is_read(self, value: Value) -> bool:
        """Whether a member is read by others than members that are brought together, too."""
        made = [self.found.member.get(user.out) for user in value.users]
        return value.node is not None or any(place is None or place[0] not in self.whole for place in made)

    def together(self, rows: Rows, like: fx.Node) -> Value:
        """All rows at once."""
        if rows not in self.whole:
            self.whole[rows] = self.made(rows, like)
        return self.whole[rows]

    def made(self, rows: Rows, like: fx.Node) -> Value:
        op = rows.op
        if rows.piece is not None:
            return self.source(rows.piece, like)
        if not rows.parts or op is None:
            return self.edit.call(torch.stack, rows.values, like=rows.members[0].node)
        like = op.node or like
        if rows.cut is not None:
            (part,) = rows.parts.values()
            return self.edit.call("narrow", self.together(part, like), *rows.cut, like=like)
        parts = {read: self.together(part, like) for read, part in rows.parts.items()}
        return rules.made(self.edit, op, parts, like, self.operand)

    def operand(self, value: Value) -> Value | float:
        """What stands for another operand: the first that is the same, or the number it is where the model has no name
        for it (``where(x, 0.0, 1.0)``).
        """
        first = self.found.first_of(value)
        known = number(first) if first.node is None else None
        return first if known is None else known

    def source(self, piece: Piece, like: fx.Node) -> Value:
        """All pieces at once."""
        value = self.found.first_of(piece.source)
        if piece.width:
            value = self.edit.call("unflatten", value, piece.dim, (piece.count, piece.width), like=like)
        return self.edit.call("movedim", value, piece.dim, 0, like=like) if piece.dim else value

    def piece(self, rows: Rows, turn: int, old: Value) -> Value:
        """What one of the rows is of the whole."""
        whole, like = self.whole[rows], rows.line
        if rows.behind is None:
            return self.edit.call("select", whole, 0, turn, like=like)
        dim, width = rows.behind + len(old.shape), old.shape[rows.behind]
        if rows not in self.joined:
            self.joined[rows] = self.side_by_side(whole, dim, like)
        return self.edit.call("narrow", self.joined[rows], dim, turn * width, width, like=like)

    def gathered(self, sink: Sink) -> Value:
        """What gathered the rows."""
        like, dim, dtype = line_of(sink.how.ops), sink.how.dim, sink.value.dtype  # that of the buffer
        for each in sink.rows.walk() if sink.how.joined else ():
            if not each.is_made and each.members[0].shape == sink.how.rows[0].shape:
                self.whole[each] = self.taken_apart(each, dim, like)
        rows = self.together(sink.rows, like)
        if sink.how.joined:
            rows = self.side_by_side(rows, dim, like)
        elif dim:
            rows = self.edit.call("movedim", rows, 0, dim, like=like)
        return rows if rows.dtype == dtype else self.edit.call("to", rows, dtype, like=like)

    def taken_apart(self, rows: Rows, dim: int, like: fx.Node) -> Value:
        """All rows of several tokens, put side by side first: that is what a recurrence yields."""
        whole = self.edit.call(torch.cat, rows.values, dim, like=like)
        each = self.edit.call("unflatten", whole, dim, (rows.count, -1), like=like)
        return self.edit.call("movedim", each, dim, 0, like=like) if dim else each

    def side_by_side(self, whole: Value, dim: int, like: fx.Node) -> Value:
        """Slices along a dimension of theirs."""
        moved = self.edit.call("movedim", whole, 0, dim, like=like) if dim else whole
        return self.edit.call("flatten", moved, dim, dim + 1, like=like)
