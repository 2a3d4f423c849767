"""What a loop does to every token's result alike, done to all of them at once after the loop.

    for t: rows.append(norm(S_t^T q_t) + d * v[:, t])    becomes    for t: reads.append(S_t^T q_t)
    o = stack(rows)                                                 o = norm(stack(reads)) + d * v

The counterpart of a hoist, and part of one: inside the loop no tensor holds all that was read from the states. From the
``stack`` or ``cat`` that gathers the rows, or the buffer they are assigned to, calls that differ only in the row they
work on are followed upwards, by ``rules``, until a row is made by another kind of call (the product with the state).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.graph.edit import Edit, map_nodes
from kdacompile.graph.ir import Value
from kdacompile.patterns.canonical.assigned import Writes, written
from kdacompile.patterns.canonical.rules import ACTIVATIONS, MOVES, Family, name_of
from kdacompile.patterns.canonical.rules import arguments as for_all

LEAST = 2
"""Rows that make a loop."""


@dataclass(eq=False)
class Rows:
    """One node per turn of the loop: calls on other rows, pieces that a hoist brings together, or neither (leaves)."""

    nodes: tuple[fx.Node, ...]
    parts: dict[fx.Node, Rows] = field(default_factory=dict["fx.Node", "Rows"])
    """For calls: what the first of them reads -> the rows it is the first of."""
    family: int | None = None
    """For pieces: the hoist's family."""

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
    """The call that gathers rows, along which dimension, and whether rows have that dimension themselves (``cat``)."""

    node: fx.Node
    dim: int
    joined: bool
    rows: Rows
    writes: Writes | None = None
    """Rows are assigned to a buffer: ``node`` is the last assignment until they are gathered."""

    @property
    def nodes(self) -> list[fx.Node]:
        return [self.node] if self.writes is None else self.writes.nodes

    def value(self, edit: Edit) -> Value:
        """What holds the rows in the functional graph."""
        return edit.value(self.node) if self.writes is None else edit.written(self.writes.buffer, self.node)

    def worth_it(self) -> bool:
        """True if a call is sunk that no region holds row by row: it needs more than reads and numbers."""
        for rows in self.rows.walk():
            name = name_of(rows.nodes[0])
            mixed = any(part.pieces_only() for part in rows.parts.values())
            if rows.parts and (name in ACTIVATIONS or mixed or (name in ("div", "truediv") and len(rows.parts) > 1)):
                return True
        return False


def gathered(node: fx.Node) -> tuple[tuple[fx.Node, ...], int, bool] | None:
    """At least two rows of one size that a call gathers, along which dimension, and whether they have it already."""
    name = name_of(node)
    items = node.args[0] if name in ("stack", "cat", "concat") and node.args else None
    if not isinstance(items, (list, tuple)) or len(items) < LEAST or set(node.kwargs) - {"dim"}:
        return None
    rows = tuple(item for item in items if isinstance(item, fx.Node))
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if len(rows) < len(items) or not isinstance(dim, int):
        return None
    values = [compat.example_value(row) for row in rows]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    if len(shapes) < len(rows) or len(set(map(str, shapes))) > 1:  # symbols are not compared: that puts a guard on them
        return None
    joined = name != "stack"
    return rows, dim % max(1, len(shapes[0]) + (not joined)), joined


class Finder:
    """Sinks of a graph, given what a hoist knows of it."""

    def __init__(
        self,
        families: Sequence[Family],
        member: Mapping[fx.Node, tuple[int, int]],
        equal: Mapping[fx.Node, fx.Node],
        fixed: AbstractSet[fx.Node],
    ) -> None:
        self.families = families
        self.member = member
        self.equal = equal
        self.fixed = fixed
        self.known: dict[tuple[fx.Node, ...], Rows] = {}

    def sinks(self, graph: fx.Graph) -> list[Sink]:
        found = [self.sink(node) for node in graph.nodes if node.op == "call_function" and node not in self.fixed]
        found += [self.assigned(writes) for writes in written(graph)]
        return [sink for sink in found if sink is not None and sink.worth_it()]

    def assigned(self, writes: Writes) -> Sink | None:
        """Rows that are read later than they are written must not change in between."""
        if not self.fixed.isdisjoint(writes.rows):
            return None
        return Sink(writes.nodes[-1], writes.dim, writes.joined, self.rows(writes.rows), writes)

    def sink(self, node: fx.Node) -> Sink | None:
        found = gathered(node)
        if found is None:
            return None
        rows, dim, joined = found
        return Sink(node, dim, joined, self.rows(rows))

    def rows(self, nodes: tuple[fx.Node, ...]) -> Rows:
        if nodes not in self.known:
            found = self.pieces(nodes) or self.calls(nodes)
            self.known[nodes] = found or Rows(nodes)
        return self.known[nodes]

    def pieces(self, nodes: tuple[fx.Node, ...]) -> Rows | None:
        """All members of one family, in order."""
        places = [self.member.get(node) for node in nodes]
        if places[0] is None or any(place != (places[0][0], turn) for turn, place in enumerate(places)):
            return None
        index = places[0][0]
        return Rows(nodes, family=index) if len(nodes) == self.families[index].count else None

    def calls(self, nodes: tuple[fx.Node, ...]) -> Rows | None:
        """The same call in every turn, with the same arguments but for rows; None if it cannot be one call."""
        if len(set(nodes)) < len(nodes) or len({self.text(node) for node in nodes}) > 1:
            return None
        if any(node.op not in ("call_function", "call_method") or node in self.fixed for node in nodes):
            return None
        columns = zip(*(node.all_input_nodes for node in nodes), strict=True)
        varying = [column for column in columns if len({self.equal.get(node, node) for node in column}) > 1]
        pieces = [column[0] for column in varying]
        if not pieces or any(arg in self.fixed for node in nodes for arg in node.all_input_nodes):
            return None
        if not self.keeps_rank(nodes[0], pieces) or self.arguments(nodes[0], pieces, len(nodes)) is None:
            return None
        return Rows(nodes, {column[0]: self.rows(column) for column in varying})

    def text(self, node: fx.Node) -> str:
        """The call, its arguments by their place among those it reads."""
        places = {arg: index for index, arg in enumerate(node.all_input_nodes)}
        return repr((node.op, str(node.target), map_arg((node.args, node.kwargs), lambda arg: f"<{places[arg]}>")))

    def keeps_rank(self, node: fx.Node, pieces: Sequence[fx.Node]) -> bool:
        """False for sums that take a dimension away: what they read is larger than a row."""
        values = [compat.example_value(arg) for arg in (node, *pieces)]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return False
        return name_of(node) in MOVES or len({value.dim() for value in values}) == 1

    def arguments(self, node: fx.Node, pieces: Sequence[fx.Node], count: int) -> tuple[object, object] | None:
        if node.kwargs.get("out") is not None:
            return None
        return for_all(node, pieces, Family(count, 0, 0))


class Builder:
    """Puts sunk calls behind the loop, on all its rows."""

    def __init__(self, edit: Edit, families: Sequence[Family], whole: Mapping[int, Value]) -> None:
        self.edit = edit
        self.families = families
        self.whole = whole
        self.built: dict[Rows, Value] = {}

    def build(self, sink: Sink) -> Value:
        """What the gathering call yielded."""
        rows, like = self.rows(sink.rows), sink.node
        if sink.dim:
            rows = self.edit.call("movedim", rows, 0, sink.dim, like=like)
        if sink.joined:
            rows = self.edit.call("flatten", rows, sink.dim, sink.dim + 1, like=like)
        dtype = sink.value(self.edit).dtype  # that of the buffer
        return rows if rows.dtype == dtype else self.edit.call("to", rows, dtype, like=like)

    def rows(self, rows: Rows) -> Value:
        """All rows at once, along a dimension of their own in front."""
        if rows not in self.built:
            self.built[rows] = self.made(rows)
        return self.built[rows]

    def made(self, rows: Rows) -> Value:
        first = rows.nodes[0]
        if rows.family is not None:
            return self.pieces(rows.family, first)
        if not rows.parts:
            return self.edit.call(torch.stack, list(map(self.edit.value, rows.nodes)), like=first)
        parts = {arg: self.rows(part) for arg, part in rows.parts.items()}
        found = for_all(first, list(parts), Family(len(rows.nodes), 0, 0))
        assert found is not None
        args, kwargs = map_nodes(found, lambda arg: parts[arg] if arg in parts else self.edit.value(arg))
        target = "reshape" if first.target == "view" else first.target
        return self.edit.call(target, *args, like=first, **kwargs)

    def pieces(self, index: int, like: fx.Node) -> Value:
        family, whole = self.families[index], self.whole[index]
        if not family.width:
            return whole
        sizes = family.count, family.width
        apart = self.edit.call("unflatten", whole, family.behind, sizes, like=like)
        return self.edit.call("movedim", apart, family.behind - 1, 0, like=like)
