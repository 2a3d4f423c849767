"""What a loop does to every token (or chunk) alike, done to all of them at once before the loop.

    for t: beta_t = sigmoid(b[:, t])    becomes    beta = sigmoid(b);    for t: beta_t = beta[:, t]

Inside the loop an activation cuts a region at every token: no tensor holds all of beta. So operators that differ only
in the piece they read are brought together, and each becomes its piece of the whole.

Only operators that work on each piece by itself take part: pointwise functions, norms and sums along other dimensions,
projections, rearrangements. Nothing they read may be written in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Op, Value, map_values, reach
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.pieces import Piece, piece_of
from kdacompile.patterns.canonical.proof import agrees
from kdacompile.patterns.canonical.sink import Builder, Finder, Place, line_of
from kdacompile.patterns.engine.numbering import Numbering
from kdacompile.patterns.engine.vocabulary import LAYOUT


def may_help(functional: Graph) -> bool:
    """True if there is something to bring together, as far as the operators alone tell."""
    return Families(functional).worth_it


def apply(edit: Edit) -> None:
    """Bring together what is wanted in front of loops and behind them; nothing, if a call does not take all pieces at
    once or if the graph cannot be shown to compute what it did.
    """
    found = Families(edit.functional, edit.fixed)
    if found.worth_it:
        with contextlib.suppress(CannotEdit):
            pairs = Hoist(edit, found).pairs()
            if agrees(edit, pairs, found.inside()):
                for new, old in pairs:
                    edit.redefine(old, new)


@dataclass
class Family:
    """Operators that differ only in the piece they read: ``members[i]`` reads piece ``i`` of each of ``sources``."""

    count: int
    behind: int | None
    """Of slices: the dimension that they are cut along, counted from the right."""
    piece: Piece | None = None
    sources: list[int] = field(default_factory=list)
    members: dict[int, Value] = field(default_factory=dict)

    @property
    def first(self) -> Value:
        return self.members[0]

    @property
    def op(self) -> Op:
        assert self.first.op is not None  # members are made
        return self.first.op

    @property
    def line(self) -> fx.Node:
        return line_of(value.op for value in self.members.values() if value.op is not None)


class Families:
    """Operators of a graph that differ only in the piece they read, and the rows they end in."""

    def __init__(self, graph: Graph, fixed: AbstractSet[fx.Node] = frozenset()) -> None:
        """``fixed``: nodes that share memory with something the graph writes."""
        self.graph, self.fixed = graph, fixed
        self.families: list[Family] = []
        self.known: dict[Any, int] = {}
        self.member: dict[Value, Place] = {}
        self.numbering = Numbering(everything=True)
        self.same: dict[int, Value] = {}
        """The first value of each number."""

        for op in graph.ops:
            for value in op.outs:
                self.same.setdefault(self.numbering.of(value), value)
                if not self.is_fixed(value):
                    self.read(op, value)
        counts = [family.count for family in self.families]
        self.sinks = Finder(counts, self.member, self.numbering, self.is_fixed).sinks(graph)
        self.wanted = self.needed()

    @property
    def worth_it(self) -> bool:
        return bool(self.wanted or self.sinks)

    def is_fixed(self, value: Value) -> bool:
        return value.node is not None and value.node in self.fixed

    def inside(self) -> set[Op]:
        """Operators whose work is done otherwise, or was done before."""
        sunk = {op for sink in self.sinks for op in sink.inside()}
        again = [value for op in self.graph.ops for value in op.outs if self.first_of(value) is not value]
        values = [*self.member, *again, *map(self.first_of, again)]
        return sunk | {value.op for value in values if value.op is not None}

    def first_of(self, value: Value) -> Value:
        """The first value that is the same by construction."""
        return self.same.get(self.numbering.of(value), value)

    # -- finding families -----------------------------------------------------------------------------------------
    def read(self, op: Op, value: Value) -> None:
        members = [read for read in dict.fromkeys(op.reads) if read in self.member]
        piece = piece_of(value) if not members else None
        if piece is not None:
            if piece.count > 1 and not self.is_fixed(piece.source):
                key = ("piece", self.numbering.of(piece.source), piece.dim, piece.count, piece.width)
                behind = piece.dim - len(value.shape) if piece.width else None
                self.join(value, key, piece.index, Family(piece.count, behind, piece))
            return
        places = [self.member[read] for read in members]
        families = [self.families[family] for family, _ in places]
        if value is not op.out or len({index for _, index in places}) != 1 or len({f.count for f in families}) != 1:
            return
        if not any(map(self.is_fixed, op.reads)) and rules.batched(op, members) is not None:
            behind = {family.behind for family in families}
            kept = behind.pop() if len(behind) == 1 and _stays(op, members) else None
            new = Family(families[0].count, kept, sources=[family for family, _ in places])
            text = tuple(str(map_values(tree, self.label)) for tree in (op.args, op.kwargs))
            self.join(value, (op.target, text), places[0][1], new)

    def label(self, value: Value) -> str:
        """What stands for an operand in an operator's text: its family, or its number."""
        return f"<{self.member[value][0]}>" if value in self.member else f"%{self.numbering.of(value)}"

    def join(self, value: Value, key: Any, index: int, new: Family) -> None:
        place = self.known.setdefault(key, len(self.families))
        if place == len(self.families):
            self.families.append(new)
        self.families[place].members.setdefault(index, value)
        self.member[value] = place, index

    def moves(self, family: Family) -> bool:
        """False for a family that lacks a piece, or one of whose results leaves the graph: it is left in the loop."""
        return len(family.members) == family.count and self.graph.outputs.isdisjoint(family.members.values())

    def needed(self) -> set[int]:
        """Complete families that no region can hold one by one, the pointwise ones that follow them, and what all
        these are computed from.
        """
        active: set[int] = set()
        spread: set[int] = set()
        exponentials: set[int] = set()
        for index, family in enumerate(self.families):
            if family.piece is not None or not self.moves(family):
                continue
            op = family.op
            pointwise = rules.is_pointwise(op) or op.name == "_to_copy"
            below = not (active | spread).isdisjoint(family.sources)
            if below and op.name == "expand":
                spread.add(index)
            if (below and pointwise) or rules.is_activation(op) or rules.is_offset(op):
                active.add(index)
            if op.name in rules.EXPONENTIALS:
                exponentials.add(index)
        if len(exponentials) > 1:  # a region has one, the gate's: another is a weight of its own
            active |= exponentials
        active |= {rows.family for sink in self.sinks for rows in sink.rows.walk() if rows.family is not None}
        return set(reach(active, lambda index: self.families[index].sources))


def _stays(op: Op, members: list[Value]) -> bool:
    """Whether the dimensions of what an operator yields are those of what it reads."""
    return op.name not in LAYOUT and all(read.shape == op.out.shape for read in members)


class Hoist:
    """The calls for all pieces, made on values of the functional graph."""

    def __init__(self, edit: Edit, found: Families) -> None:
        self.edit = edit
        self.found = found
        self.whole: dict[int, Value] = {}
        """All pieces of a family, along a dimension of their own in front."""
        self.joined: dict[int, Value] = {}
        """Slices side by side again."""

    def pairs(self) -> list[tuple[Value, Value]]:
        """(new, old): pieces of what was brought together, and rows that were worked on after they were gathered."""
        for index in sorted(self.found.wanted):
            self.bring_together(index)
        builder = Builder(self.edit, self.whole)
        gathered = [(builder.build(sink), sink.value) for sink in self.found.sinks]
        pieces = [
            (self.piece(index, place, value), value)
            for value, (index, place) in self.found.member.items()
            if index in self.whole and self.found.families[index].piece is None and self.is_read(value)
        ]
        return [*gathered, *pieces]

    def is_read(self, value: Value) -> bool:
        """Whether a member is read by others than members that are brought together, too."""
        made = [self.found.member.get(user.out) for user in value.users]
        return value.node is not None or any(place is None or place[0] not in self.whole for place in made)

    def bring_together(self, index: int) -> None:
        family = self.found.families[index]
        op, like = family.op, family.line
        if family.piece is not None:
            self.whole[index] = self.source(family.piece, like)
            return
        members = [read for read in dict.fromkeys(op.reads) if read in self.found.member]
        whole = {read: self.whole[self.found.member[read][0]] for read in members}
        self.whole[index] = rules.made(self.edit, op, whole, like, self.found.first_of)

    def source(self, piece: Piece, like: fx.Node) -> Value:
        """All pieces at once."""
        value = self.found.first_of(piece.source)
        if piece.width:
            value = self.edit.call("unflatten", value, piece.dim, (piece.count, piece.width), like=like)
        return self.edit.call("movedim", value, piece.dim, 0, like=like) if piece.dim else value

    def piece(self, index: int, place: int, old: Value) -> Value:
        family, whole, rank = self.found.families[index], self.whole[index], len(old.shape)
        like = family.line
        if family.behind is None:
            return self.edit.call("select", whole, 0, place, like=like)
        dim, width = family.behind + rank, old.shape[family.behind]
        if index not in self.joined:
            moved = self.edit.call("movedim", whole, 0, dim, like=like) if dim else whole
            self.joined[index] = self.edit.call("flatten", moved, dim, dim + 1, like=like)
        return self.edit.call("narrow", self.joined[index], dim, place * width, width, like=like)
