"""Rows: what the turns of a loop make alike, one value per turn.

They are found from two ends. From pieces of a tensor downwards: operators that differ only in the piece they read. From
the ``stack`` or ``cat`` that gathers rows, or the buffer they are assigned to, upwards: operators that differ only in
the row they work on, until a row is made by another kind (the product with the state). ``rules`` tell which operators
can be one for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from kdacompile.graph.ir import Graph, Op, Value, map_values, reach
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.choices import bit
from kdacompile.patterns.canonical.pieces import Gathered, Piece, gathered, in_whole, piece_of
from kdacompile.patterns.engine.values import Numbering, cut_of, is_divided, root
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING

ENTRIES = frozenset({"select", "unbind"})
"""Operators that take entries out of a tensor, whose dimension goes."""


@dataclass(eq=False)
class Rows:
    """One value per turn of the loop: made alike of other rows, pieces of one tensor, or neither."""

    count: int
    members: dict[int, Value] = field(default_factory=dict[int, Value])
    """By turn."""
    parts: dict[Value, Rows] = field(default_factory=dict["Value", "Rows"])
    """What the first of them reads -> the rows it is the first of."""
    piece: Piece | None = None
    cut: tuple[int, int, int] | None = None
    """Of entries of other rows: the dimension they lie along, counted from the right, the first and how many."""
    early: bool = False
    """Found from pieces: they do not depend on the loop."""
    entry: bool = False
    """Made of one entry of a tensor, whose dimension is gone; other rows are made of several."""
    behind: int | None = None
    """Of slices: the dimension that they are cut along, counted from the right."""

    @property
    def values(self) -> list[Value]:
        return [self.members[turn] for turn in range(self.count)]

    @property
    def op(self) -> Op | None:
        """What makes the first of them."""
        return self.members[0].op

    @property
    def line(self) -> fx.Node:
        return line_of(value.op for value in self.members.values() if value.op is not None)

    def walk(self) -> Iterator[Rows]:
        """These and the rows they are made of, as far as the loop makes them."""
        yield self
        for part in () if self.early else self.parts.values():
            yield from part.walk()

    @property
    def is_made(self) -> bool:
        """False for rows that are read where they are."""
        return self.early or bool(self.parts)

    def before_loop(self) -> bool:
        """True for what does not depend on the loop."""
        return self.early or (bool(self.parts) and all(part.before_loop() for part in self.parts.values()))


@dataclass(eq=False)
class Sink:
    """A value that gathers rows, and how."""

    value: Value
    how: Gathered
    rows: Rows

    def made(self) -> list[Rows]:
        """The rows of it that operators of the loop make."""
        return [rows for rows in self.rows.walk() if rows.parts and not rows.early]

    def worth_it(self) -> bool:
        """True if something is sunk that no region holds row by row: it needs more than reads and numbers."""
        for rows in self.made():
            op = rows.op
            mixed = any(part.before_loop() for part in rows.parts.values())
            if op is None:
                continue
            divided = op.name == "div" or (op.name == "mul" and any(map(is_divided, rows.parts)))
            if rules.is_activation(op) or rules.takes_together(op) or mixed or (divided and len(rows.parts) > 1):
                return True
        return False

    def inside(self) -> set[Op]:
        """The operators whose work is done otherwise."""
        return {*self.how.ops, *(value.op for rows in self.made() for value in rows.values if value.op is not None)}


class Loops:
    """The rows of a graph: ``wanted`` are those to be worked on before the loop, ``sinks`` gather those to be worked on
    behind it.
    """

    def __init__(self, graph: Graph, fixed: AbstractSet[fx.Node] = frozenset(), *, across: bool = False) -> None:
        """``fixed``: nodes that share memory with something the graph writes. ``across``: tokens of chunks of several
        lengths are those of one loop.
        """
        self.graph, self.fixed, self.across = graph, fixed, across
        self.early: dict[Any, Rows] = {}
        """Rows found from pieces, by what makes them."""
        self.late: dict[tuple[Value, ...], Rows | None] = {}
        """Rows looked for from where they are gathered."""
        self.member: dict[Value, tuple[Rows, int]] = {}
        """Which of the early rows a value is in, and its turn."""
        self.cut_from: dict[Rows, set[Any]] = {}
        """Which kinds of columns early rows are made of."""
        self.columns: set[Any] = set()
        """Kinds of columns that are no turns: queries, keys and values, cut out of one projection."""
        self.numbering = Numbering(everything=True)
        self.same: dict[int, Value] = {}
        """The first value of each number."""

        self.runs: dict[Any, set[int]] = {}
        """The turns that there are of each kind of slices: where some are missing, they are no pieces."""
        for op in graph.ops:
            for piece in filter(None, map(piece_of, op.outs) if across else ()):
                if piece.width:
                    self.turns(piece).add(piece.index)
        for op in graph.ops:
            for value in op.outs:
                self.same.setdefault(self.numbering.of(value), value)
        self.outer = {self.key(piece) for piece in self.taken_apart()}
        """Kinds of pieces of a loop around another: requests or heads, one by one."""
        self.read_all()
        self.columns = self.unlike()
        if self.columns:
            self.read_all()
        for rows in self.early.values():
            if rows.piece is None and 0 in rows.members and rows.op is not None:
                rows.parts = {read: self.member[read][0] for read in rows.op.reads if read in self.member}
        found = [self.sink(op.out) for op in graph.ops if len(op.outs) == 1]
        self.sinks = [sink for sink in found if sink is not None and sink.worth_it()]
        needed = self.needed()
        self.wanted = [rows for rows in self.early.values() if rows in needed]

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
        cut = reach(values, lambda value: [read for read in value.op.reads if cut_of(read)] if value.op else [])
        return sunk | {value.op for value in cut if value.op is not None}

    def first_of(self, value: Value) -> Value:
        """The first value that is the same by construction."""
        return self.same.get(self.numbering.of(value), value)

    # -- from pieces downwards --------------------------------------------------------------------------------------
    def read_all(self) -> None:
        self.early.clear()
        self.member.clear()
        self.cut_from.clear()
        for op in self.graph.ops:
            for value in op.outs:
                if not self.is_fixed(value):
                    self.read(op, value)

    def unlike(self) -> set[Any]:
        """Kinds of columns some of which are cut once more, or worked on by a rule, and others are not."""
        found = set[Any]()
        for rows in self.early.values():
            value = next(iter(rows.members.values()))
            again = piece_of(value) is not None or (value.op is not None and self.is_new(value.op))
            if rows.piece is None and again and len(rows.members) < rows.count:
                found |= self.cut_from[rows]
        return found

    def taken_apart(self) -> Iterator[Piece]:
        """Entries that are only read entry by entry: the tokens of a head. What the tokens make alike is one value for
        all of these; heads make everything alike, their states too.
        """
        for value in (value for op in self.graph.ops for value in op.outs):
            piece = piece_of(value) if value.users and all(user.name in ENTRIES for user in value.users) else None
            if piece is not None and not piece.width and (len(value.users) > 1 or value.users[0].name == "unbind"):
                yield piece

    def read(self, op: Op, value: Value) -> None:
        members = [read for read in dict.fromkeys(op.reads) if read in self.member]
        piece = piece_of(value) if not members else None
        if piece is not None:
            piece = in_whole(piece) if self.across else piece
            key = self.key(piece)
            whole = piece.count > 1 and len(self.turns(piece)) in (0, piece.count)
            if whole and not self.is_fixed(piece.source) and key not in self.columns | self.outer:
                behind = piece.dim - len(value.shape) if piece.width else None
                rows = Rows(piece.count, piece=piece, behind=behind, entry=not piece.width, early=True)
                rows = self.join(value, key, piece.index, rows)
                self.cut_from[rows] = {key} if piece.width and behind == -1 else set()
            return
        places = [self.member[read] for read in members]
        found = cut_of(value)
        if found is not None and members == op.reads and places[0][0].entry:
            (rows, turn), (dim, start) = places[0], found
            cut = dim - len(value.shape), start, value.shape[dim]
            if not self.is_fixed(members[0]):
                new = self.join(value, ("cut", id(rows), cut), turn, Rows(rows.count, cut=cut, entry=True, early=True))
                self.cut_from[new] = self.cut_from[rows]
            return
        counts, behind = ({getattr(rows, name) for rows, _ in places} for name in ("count", "behind"))
        if value is not op.out or len({turn for _, turn in places}) != 1 or len(counts) != 1:
            return
        if not any(map(self.is_fixed, op.reads)) and rules.batched(op, members) is not None:
            kept = behind.pop() if len(behind) == 1 and _stays(op, members) else None
            text = tuple(str(map_values(tree, self.label)) for tree in (op.args, op.kwargs))
            entry = all(rows.entry for rows, _ in places)
            rows = Rows(counts.pop(), behind=kept, entry=entry, early=True)
            rows = self.join(value, (op.target, text), places[0][1], rows)
            self.cut_from[rows] = set[Any]().union(*(self.cut_from[each] for each, _ in places))

    def key(self, piece: Piece) -> Any:
        """What all pieces of one kind have in common."""
        return "piece", self.numbering.of(piece.source), piece.dim, piece.count, piece.width

    def turns(self, piece: Piece) -> set[int]:
        return self.runs.setdefault(self.key(piece), set()) if piece.width else set()

    def label(self, value: Value) -> str:
        """What stands for an operand in an operator's text: the rows it is in, or its number."""
        return f"<{id(self.member[value][0])}>" if value in self.member else f"%{self.numbering.of(value)}"

    def join(self, value: Value, key: Any, turn: int, new: Rows) -> Rows:
        rows = self.early.setdefault(key, new)
        rows.members.setdefault(turn, value)
        self.member[value] = rows, turn
        return rows

    def moves(self, rows: Rows) -> bool:
        """False for rows that lack one, or one of which leaves the graph: they are left in the loop."""
        return len(rows.members) == rows.count and self.graph.outputs.isdisjoint(rows.members.values())

    def needed(self) -> set[Rows]:
        """Early rows that no region can hold one by one, the pointwise ones that follow them, and what all these are
        computed from.
        """
        active, spread, exponentials = set[Rows](), set[Rows](), set[Rows]()
        for rows in self.early.values():
            op = rows.op if rows.piece is None and self.moves(rows) else None
            if op is None:
                continue
            pointwise = rules.is_pointwise(op) or op.name == "_to_copy"
            below = not (active | spread).isdisjoint(rows.parts.values())
            if below and (op.name in LAYOUT or rows.cut):
                spread.add(rows)
            masked = op.name == "mul" and self.stands_in(rows, op)
            gated = masked or (self.across and _takes_in(rows, op)) or (pointwise and self.is_new(op))
            alone = rules.is_activation(op) or rules.is_offset(op) or (rules.is_factor(op) and self.is_small(rows))
            alone = alone or rules.is_projection(op, list(rows.parts))
            laid_out = (below and rows.cut) or rules.takes_apart(op) or op.name in rules.JOINS
            if (below and pointwise) or alone or gated or laid_out:
                active.add(rows)
            if op.name in rules.EXPONENTIALS:
                exponentials.add(rows)
        if len(exponentials) > 1:  # a region has one, the gate's: another is a weight of its own
            active |= exponentials
        active |= {rows for sink in self.sinks for rows in sink.rows.walk() if rows.early}
        return set(reach(active, lambda rows: rows.parts.values()))

    def is_small(self, rows: Rows) -> bool:
        """Whether others have several numbers where these have one: they are gates, and no queries or keys."""
        size = math.prod(rows.members[0].shape)
        return any(math.prod(value.shape) > size for each in self.early.values() for value in each.members.values())

    def stands_in(self, rows: Rows, op: Op) -> bool:
        """True for a product in the place of a factor that nothing else reads: of write gates, of what becomes a gate,
        of anything with a mask.
        """
        factors = [self.member[read][0] for read in op.reads if read in self.member]
        wholes = [part for part in factors if part.members[0].shape == op.out.shape]
        if len(factors) < 2 or not any(len(set(v.users)) == 1 for p in wholes for v in p.members.values()):
            return False
        masks = any(_is_counted(part.members[0]) for part in factors)
        return masks or _becomes_a_gate(op)

    def is_new(self, op: Op) -> bool:
        """Whether a rule has made the call."""
        return self.graph.calls is not None and self.graph.calls.owns(op.node)

    # -- from what gathers them upwards -----------------------------------------------------------------------------
    def sink(self, value: Value) -> Sink | None:
        how = gathered(value)
        if how is None or (how.made and self.is_fixed(value)):
            return None
        rows = self.rows(how.rows)
        return None if rows is None else Sink(value, how, rows)

    def rows(self, values: tuple[Value, ...]) -> Rows | None:
        """None where they can be read nowhere in the model's graph, as they are."""
        if values not in self.late:
            found = self.pieces(values) or self.calls(values)
            readable = all(value.node is not None and not self.is_fixed(value) for value in values)
            self.late[values] = found or (_rows(values) if readable else None)
        return self.late[values]

    def pieces(self, values: tuple[Value, ...]) -> Rows | None:
        """The early rows that these are, in order."""
        rows, _ = self.member.get(values[0], (None, 0))
        if any(self.member.get(value) != (rows, turn) for turn, value in enumerate(values)):
            return None
        return rows if rows is not None and len(values) == rows.count else None

    def calls(self, values: tuple[Value, ...]) -> Rows | None:
        """The same operator in every turn, on the same but for rows; None if it cannot be one call."""
        ops = [value.op for value in values if value.op is not None and value is value.op.out]
        if len(set(ops)) < len(values) or len({_text(op) for op in ops}) > 1:
            return None
        columns = dict.fromkeys(zip(*(op.reads for op in ops), strict=True))
        varying = [column for column in columns if len(set(map(self.numbering.of, column))) > 1]
        if not varying or any(self.is_fixed(read) for op in ops for read in op.reads):
            return None
        first, pieces = ops[0], [column[0] for column in varying]
        ranks = {len(value.shape) for value in (first.out, *pieces)}  # a sum may read more than a row
        spread = first.name in LAYOUT or rules.is_pointwise(first)  # a row may be divided by one number
        if (len(ranks) > 1 and not spread) or rules.batched(first, pieces) is None:
            return None
        parts = {column[0]: self.rows(column) for column in varying}
        known = {value: part for value, part in parts.items() if part is not None}
        if first.name in LAYOUT and not rules.takes_together(first) and not any(p.is_made for p in known.values()):
            return None  # what is only laid out is a row as it is
        return _rows(values, known) if len(known) == len(parts) else None


def _rows(values: tuple[Value, ...], parts: dict[Value, Rows] | None = None) -> Rows:
    return Rows(len(values), dict(enumerate(values)), parts or {})


def _is_counted(value: Value) -> bool:
    """Whether a number was made of booleans or whole numbers."""
    return bit(value) is not None or not root(value, LAYOUT | PICKING).dtype.is_floating_point


def _becomes_a_gate(op: Op) -> bool:
    while len(op.out.users) == 1 and (op.out.users[0].name in LAYOUT or rules.is_factor(op.out.users[0])):
        op = op.out.users[0]
    return all(user.name in rules.EXPONENTIALS for user in op.out.users)


def _takes_in(rows: Rows, op: Op) -> bool:
    """True for a product of two of one size, one of which nothing else reads: a gate of keys is no role of its own."""
    parts = [part for part in rows.parts.values() if part.members[0].shape == op.out.shape]
    alone = any(all(len(value.users) == 1 for value in part.members.values()) for part in parts)
    return op.name == "mul" and len(parts) == 2 and alone


def _stays(op: Op, members: list[Value]) -> bool:
    """Whether the dimensions of what an operator yields are those of what it reads."""
    return op.name not in LAYOUT and all(read.shape == op.out.shape for read in members)


def _text(op: Op) -> str:
    """The operator, its operands by their place among those it reads."""
    places = {value: f"<{place}>" for place, value in enumerate(op.reads)}
    args, kwargs = (map_values(tree, lambda value: places.get(value)) for tree in (op.args, op.kwargs))
    return f"{op.target} {args} {kwargs}"


def line_of(ops: Iterable[Op]) -> fx.Node:
    """A node that stands for the line of code of operators."""
    return next(op.node for op in ops if op.node is not None)
