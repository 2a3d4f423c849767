"""What a loop does to every token's result alike, done to all of them at once after the loop.

    for t: rows.append(norm(S_t^T q_t) + d * v[:, t])    becomes    for t: reads.append(S_t^T q_t)
    o = stack(rows)                                                 o = norm(stack(reads)) + d * v

The counterpart of a hoist, and part of one: inside the loop no tensor holds all that was read from the states. From the
``stack`` or ``cat`` that gathers the rows, or the buffer they are assigned to, operators that differ only in the row
they work on are followed upwards, by ``rules``, until a row is made by another kind (the product with the state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Graph, Op, Value, map_values
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.pieces import Gathered, gathered
from kdacompile.patterns.engine.numbering import Numbering
from kdacompile.patterns.engine.vocabulary import LAYOUT

Place = tuple[int, int]
"""A family of a hoist, and which of its pieces."""


@dataclass(eq=False)
class Rows:
    """One value per turn of the loop: made alike of other rows, pieces that a hoist brings together, or neither."""

    values: tuple[Value, ...]
    parts: dict[Value, Rows] = field(default_factory=dict["Value", "Rows"])
    """What the first of them reads -> the rows it is the first of."""
    family: int | None = None
    """For pieces: the hoist's family."""

    @property
    def op(self) -> Op | None:
        return self.values[0].op

    def walk(self) -> Iterator[Rows]:
        yield self
        for part in self.parts.values():
            yield from part.walk()

    def pieces_only(self) -> bool:
        """True for what does not depend on the loop."""
        if self.parts:
            return all(part.pieces_only() for part in self.parts.values())
        return self.family is not None


@dataclass(eq=False)
class Sink:
    """A value that gathers rows, and how."""

    value: Value
    how: Gathered
    rows: Rows

    def worth_it(self) -> bool:
        """True if something is sunk that no region holds row by row: it needs more than reads and numbers."""
        for rows in self.rows.walk():
            op = rows.op
            if op is None or not rows.parts:
                continue
            mixed = any(part.pieces_only() for part in rows.parts.values())
            if rules.is_activation(op) or mixed or (op.name == "div" and len(rows.parts) > 1):
                return True
        return False

    def inside(self) -> set[Op]:
        """The operators whose work is done otherwise."""
        sunk = [rows for rows in self.rows.walk() if rows.parts]
        return {*self.how.ops, *(value.op for rows in sunk for value in rows.values if value.op is not None)}


class Finder:
    """Sinks of a graph, given the pieces that a hoist knows."""

    def __init__(
        self,
        counts: Sequence[int],
        member: Mapping[Value, Place],
        numbering: Numbering,
        is_fixed: Callable[[Value], bool],
    ) -> None:
        self.counts, self.member, self.numbering, self.is_fixed = counts, member, numbering, is_fixed
        self.known: dict[tuple[Value, ...], Rows | None] = {}

    def sinks(self, graph: Graph) -> list[Sink]:
        found = [self.sink(op.out) for op in graph.ops if len(op.outs) == 1]
        return [sink for sink in found if sink is not None and sink.worth_it()]

    def sink(self, value: Value) -> Sink | None:
        how = gathered(value)
        if how is None or (how.made and self.is_fixed(value)):
            return None
        rows = self.rows(how.rows)
        return None if rows is None else Sink(value, how, rows)

    def rows(self, values: tuple[Value, ...]) -> Rows | None:
        """None where they can be read nowhere in the model's graph, as they are."""
        if values not in self.known:
            found = self.pieces(values) or self.calls(values)
            readable = all(value.node is not None and not self.is_fixed(value) for value in values)
            self.known[values] = found or (Rows(values) if readable else None)
        return self.known[values]

    def pieces(self, values: tuple[Value, ...]) -> Rows | None:
        """All members of one family, in order."""
        family, _ = self.member.get(values[0], (-1, 0))
        if any(self.member.get(value) != (family, turn) for turn, value in enumerate(values)):
            return None
        return Rows(values, family=family) if len(values) == self.counts[family] else None

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
        if (len(ranks) > 1 and first.name not in LAYOUT) or rules.batched(first, pieces) is None:
            return None
        parts = {column[0]: self.rows(column) for column in varying}
        known = {value: part for value, part in parts.items() if part is not None}
        return Rows(values, known) if len(known) == len(parts) else None


def _text(op: Op) -> str:
    """The operator, its operands by their place among those it reads."""
    places = {value: f"<{place}>" for place, value in enumerate(op.reads)}
    args, kwargs = (map_values(tree, lambda value: places.get(value)) for tree in (op.args, op.kwargs))
    return f"{op.target} {args} {kwargs}"


class Builder:
    """Makes sunk calls behind the loop, on all its rows."""

    def __init__(self, edit: Edit, whole: Mapping[int, Value]) -> None:
        self.edit, self.whole = edit, whole
        self.built: dict[Rows, Value] = {}

    def build(self, sink: Sink) -> Value:
        """What gathered the rows."""
        like = line_of(sink.how.ops)
        rows, dim = self.rows(sink.rows, like), sink.how.dim
        if dim:
            rows = self.edit.call("movedim", rows, 0, dim, like=like)
        if sink.how.joined:
            rows = self.edit.call("flatten", rows, dim, dim + 1, like=like)
        dtype = sink.value.dtype  # that of the buffer
        return rows if rows.dtype == dtype else self.edit.call("to", rows, dtype, like=like)

    def rows(self, rows: Rows, like: fx.Node) -> Value:
        """All rows at once, along a dimension of their own in front."""
        if rows not in self.built:
            self.built[rows] = self.made(rows, like)
        return self.built[rows]

    def made(self, rows: Rows, like: fx.Node) -> Value:
        op = rows.op
        if rows.family is not None:
            return self.whole[rows.family]
        if not rows.parts or op is None:
            return self.edit.call(torch.stack, list(rows.values), like=rows.values[0].node)
        like = op.node or like
        parts = {read: self.rows(part, like) for read, part in rows.parts.items()}
        return rules.made(self.edit, op, parts, like)


def line_of(ops: Iterable[Op]) -> fx.Node:
    """A node that stands for the line of code of operators."""
    return next(op.node for op in ops if op.node is not None)
