"""What a loop does to every token (or chunk) alike, done to all of them at once before the loop.

    for t: beta_t = sigmoid(b[:, t])    becomes    beta = sigmoid(b);    for t: beta_t = beta[:, t]

Inside the loop an activation cuts a region at every token: no tensor holds all of beta. So where a graph has near
misses, calls that differ only in the piece they read are brought together, and the graph is searched again. Without a
new match everything is put back: code that stays with Inductor runs as it was written.

Only calls that work on each piece by itself take part: pointwise functions, norms and sums along other dimensions,
projections, rearrangements. They move in front of the loop, so nothing they read may be written in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.graph.ir import Graph
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.change import Change, overwritten
from kdacompile.patterns.canonical.pieces import Piece, piece_of
from kdacompile.patterns.canonical.proof import agrees, readers_fit, results_share_memory
from kdacompile.patterns.canonical.rules import (
    MOVES,
    POINTWISE,
    Family,
    is_activation,
    is_exponential,
    is_offset,
    name_of,
    stays,
)
from kdacompile.patterns.canonical.sink import Builder, Finder

REPEATED = POINTWISE | MOVES
"""Calls on whole tensors that loops make anew in every turn."""


def may_help(graph: fx.Graph) -> bool:
    """True if there is something to bring together, as far as the calls alone tell."""
    return not compat.switches_modes(graph) and Hoist(graph).worth_it


def attempt(graph: fx.Graph, functional: Callable[[], Graph]) -> Hoist | None:
    """A hoist of a graph that ``may_help`` knows, less what the graph writes to; None if nothing is left of it."""
    hoist = Hoist(graph, overwritten(functional()))
    return hoist if hoist.worth_it else None


class Hoist(Change):
    """Calls brought together in front of loops and behind them."""

    def __init__(self, graph: fx.Graph, fixed: AbstractSet[fx.Node] = frozenset()) -> None:
        """``fixed``: nodes that share memory with something the graph writes."""
        super().__init__(graph)
        self.fixed = fixed
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.families: list[Family] = []
        self.known: dict[Any, int] = {}
        self.lane: dict[fx.Node, tuple[int, int]] = {}
        self.equal: dict[fx.Node, fx.Node] = {}
        """Calls on whole tensors that an earlier call has made already."""
        self.seen: dict[Any, fx.Node] = {}
        self.meta: dict[fx.Node, dict[str, Any]] = {}
        """What readers were known to yield before."""

        for node in self.place:
            if node.op in ("call_function", "call_method") and node not in fixed:
                self.read(node)
        self.sinks = Finder(self.families, self.lane, self.equal, fixed).sinks(graph)
        self.writes = [sink.writes for sink in self.sinks if sink.writes is not None]
        self.wanted = self.needed()
        self.gathered: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        """(reader, the sunk rows it reads now, the call that gathered them before)"""

    @property
    def worth_it(self) -> bool:
        return bool(self.wanted or self.sinks)

    def apply(self, functional: Callable[[], Graph]) -> bool:
        """Bring together what is wanted; False, with nothing changed, if a call does not take all pieces at once or if
        the graph cannot be shown to compute what it did. ``functional`` reads the graph as it is now.
        """
        try:
            self.rewrite()
        except (RuntimeError, TypeError, ValueError, IndexError):
            self.undo()
            return False
        if not self.proven(functional):
            self.undo()
            return False
        return True

    def proven(self, functional: Callable[[], Graph]) -> bool:
        """True if pieces and the nodes they stand for are equal, and nothing else can tell one from the other."""
        pairs = {(piece, old) for _, piece, old in (*self.replaced, *self.gathered)}
        inside = {*self.lane, *self.new, *self.equal, *self.equal.values(), *self.sunk()}
        if not agrees(pairs, inside):
            return False
        if not readers_fit(self.graph.nodes, {reader for reader, _, _ in self.replaced}, self.meta):
            return False
        results = [arg for node in self.graph.nodes if node.op == "output" for arg in node.all_input_nodes]
        return not results_share_memory(functional(), set(self.new), results, {rows for _, rows, _ in self.gathered})

    def rewrite(self) -> None:
        whole: dict[int, fx.Node] = {}
        for index in sorted(self.wanted):
            self.bring_together(index, whole)
        builder = Builder(self, whole)
        for sink in self.sinks:
            self.new.extend(sink.gather())
            rows = builder.build(sink)
            for reader in list(sink.node.users):
                reader.replace_input_with(sink.node, rows)
                self.gathered.append((reader, rows, sink.node))
        for index in sorted(self.wanted):
            self.hand_out(self.families[index], whole[index])

    def sunk(self) -> set[fx.Node]:
        """What is made after the loop now: the calls on single rows, and what gathered them."""
        calls = {node for sink in self.sinks for rows in sink.rows.walk() if rows.parts for node in rows.nodes}
        return calls | {sink.node for sink in self.sinks}

    # -- finding families -----------------------------------------------------------------------------------------
    def read(self, node: fx.Node) -> None:
        piece = piece_of(node)
        if piece is not None and piece.source not in self.lane:
            if piece.count > 1 and piece.source not in self.fixed:
                source = self.equal.get(piece.source, piece.source)
                key = ("piece", source, piece.dim, piece.count, piece.width, repr(piece.rest))
                behind = piece.dim - compat.example_value(source).dim()
                self.join(node, key, piece.index, Family(piece.count, piece.width, behind, piece))
            return
        lanes = [self.lane[arg] for arg in node.all_input_nodes if arg in self.lane]
        text = (node.op, str(node.target), repr(map_arg((node.args, node.kwargs), self.label)))
        if not lanes:
            alone = not any(arg in self.fixed for arg in node.all_input_nodes)
            if alone and name_of(node) in REPEATED and self.seen.setdefault(text, node) is not node:
                self.equal[node] = self.seen[text]
            return
        families = list(dict.fromkeys(family for family, _ in lanes))
        like = self.families[families[0]]
        others = [self.families[family] for family in families]
        same = all((f.count, f.width, f.behind) == (like.count, like.width, like.behind) for f in others)
        if not same and not (like.width == 0 and all((f.count, f.width) == (like.count, 0) for f in others)):
            return
        if len({index for _, index in lanes}) == 1:
            new = Family(like.count, like.width, like.behind, sources=families)
            if self.arguments(node, new) is not None:
                self.join(node, text, lanes[0][1], new)

    def label(self, arg: fx.Node) -> Any:
        """What stands for an argument in a call's text: its family, or itself."""
        return f"<{self.lane[arg][0]}>" if arg in self.lane else self.equal.get(arg, arg)

    def join(self, node: fx.Node, key: Any, index: int, new: Family) -> None:
        place = self.known.setdefault(key, len(self.families))
        if place == len(self.families):
            self.families.append(new)
        if index not in self.families[place].members:
            self.families[place].members[index] = node
        self.lane[node] = place, index

    def needed(self) -> set[int]:
        """Complete families that no region can hold call by call, the pointwise calls that follow them, and what all
        these are computed from.
        """
        active: set[int] = set()
        for index, family in enumerate(self.families):
            if stays(family):
                continue
            follows = name_of(family.first) in POINTWISE and not active.isdisjoint(family.sources)
            if follows or is_activation(family) or is_offset(family):
                active.add(index)
        exponentials = {i for i, family in enumerate(self.families) if not stays(family) and is_exponential(family)}
        if len(exponentials) > 1:  # a region has one, the gate's: another is a weight of its own
            active |= exponentials
        active |= {rows.family for sink in self.sinks for rows in sink.rows.walk() if rows.family is not None}
        found: set[int] = set()
        stack = list(active)
        while stack:
            index = stack.pop()
            if index not in found:
                found.add(index)
                stack.extend(self.families[index].sources)
        return found

    # -- one call for all of them ---------------------------------------------------------------------------------
    def bring_together(self, index: int, whole: dict[int, fx.Node]) -> None:
        family = self.families[index]
        at = min(family.members.values(), key=self.place.__getitem__)  # what it reads is there by then
        with self.graph.inserting_before(at):
            if family.piece is not None:
                whole[index] = self.source(family.piece, at)
                return
            found = self.arguments(at, family)
            assert found is not None
            lanes = {arg: whole[self.lane[arg][0]] for arg in at.all_input_nodes if arg in self.lane}
            args, kwargs = map_arg(found, lambda arg: lanes.get(arg, self.equal.get(arg, arg)))
            target = "reshape" if at.target == "view" else at.target  # all pieces need not lie as one does
            whole[index] = self.made(self.graph.create_node(at.op, target, args, kwargs), at)

    def source(self, piece: Piece, like: fx.Node) -> fx.Node:
        """All pieces at once: along a dimension of their own in front, or where slices lie anyway."""
        node = piece.source
        if piece.width:
            return node
        if piece.dim:
            node = self.made(self.graph.call_method("movedim", (node, piece.dim, 0)), like)
        if piece.rest:
            node = self.made(self.graph.call_function(operator.getitem, (node, (slice(None), *piece.rest))), like)
        return node

    def arguments(self, node: fx.Node, family: Family) -> tuple[Any, Any] | None:
        """The arguments of the call for all pieces, lanes not yet replaced; None if it cannot be one call."""
        if any(arg in self.fixed for arg in node.all_input_nodes) or node.kwargs.get("out") is not None:
            return None
        return rules.arguments(node, [arg for arg in node.all_input_nodes if arg in self.lane], family)

    # -- back to the loop -----------------------------------------------------------------------------------------
    def hand_out(self, family: Family, whole: fx.Node) -> None:
        """Let readers outside the families read their piece of the whole. Results stay tensors of their own."""
        if family.piece is not None:
            return
        for node in [node for node, (place, _) in self.lane.items() if self.families[place] is family]:
            index = self.lane[node][1]
            readers = [user for user in node.users if user.op != "output" and not self.is_wanted(user)]
            if not readers:
                continue
            with self.graph.inserting_before(node):
                if family.width:
                    call = ("narrow", (whole, family.behind, index * family.width, family.width))
                else:
                    call = ("select", (whole, 0, index))
                piece = self.made(self.graph.call_method(*call), node)
            self.replace(node, piece, readers)

    def is_wanted(self, node: fx.Node) -> bool:
        return node in self.lane and self.lane[node][0] in self.wanted

    def undo(self) -> None:
        for reader, rows, node in self.gathered:
            reader.replace_input_with(rows, node)
        self.put_back()
        for writes in self.writes:
            writes.undo()
        self.erase_new()
        for node, meta in self.meta.items():
            node.meta.clear()
            node.meta.update(meta)

    def finish(self) -> None:
        self.erase_unread({*self.lane, *self.sunk()})
