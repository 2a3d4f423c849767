"""What a loop does to every token (or chunk) alike, done to all of them at once before the loop.

    for t: beta_t = sigmoid(b[:, t])    becomes    beta = sigmoid(b);    for t: beta_t = beta[:, t]

Inside the loop an activation cuts a region at every token: no tensor holds all of beta. So calls that differ only in
the piece they read are brought together, and each becomes its piece of the whole.

Only calls that work on each piece by itself take part: pointwise functions, norms and sums along other dimensions,
projections, rearrangements. Nothing they read may be written in place.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Set as AbstractSet
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.graph.edit import CannotEdit, Edit, map_nodes
from kdacompile.graph.ir import Value
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.canonical.pieces import Piece, piece_of
from kdacompile.patterns.canonical.proof import agrees
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
    return not compat.switches_modes(graph) and Families(graph).worth_it


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Bring together what is wanted in front of loops and behind them; nothing, if a call does not take all pieces at
    once or if the graph cannot be shown to compute what it did.
    """
    found = Families(graph, edit.fixed)
    if found.worth_it:
        with contextlib.suppress(CannotEdit):
            pairs = Hoist(edit, found).pairs()
            if agrees(edit, pairs, found.inside()):
                for new, old in pairs:
                    edit.redefine(old, new)


class Families:
    """Calls of a graph that differ only in the piece they read, and the rows they end in."""

    def __init__(self, graph: fx.Graph, fixed: AbstractSet[fx.Node] = frozenset()) -> None:
        """``fixed``: nodes that share memory with something the graph writes."""
        self.fixed = fixed
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.families: list[Family] = []
        self.known: dict[Any, int] = {}
        self.member: dict[fx.Node, tuple[int, int]] = {}
        self.equal: dict[fx.Node, fx.Node] = {}
        """Calls on whole tensors that an earlier call has made already."""
        self.seen: dict[Any, fx.Node] = {}

        for node in self.place:
            if node.op in ("call_function", "call_method") and node not in fixed:
                self.read(node)
        self.sinks = Finder(self.families, self.member, self.equal, fixed).sinks(graph)
        self.wanted = self.needed()

    @property
    def worth_it(self) -> bool:
        return bool(self.wanted or self.sinks)

    def inside(self) -> set[fx.Node]:
        """Nodes of the model's graph whose calls are made otherwise."""
        calls = {node for sink in self.sinks for rows in sink.rows.walk() if rows.parts for node in rows.nodes}
        gathered = {node for sink in self.sinks for node in sink.nodes}
        return {*self.member, *self.equal, *self.equal.values(), *calls, *gathered}

    # -- finding families -----------------------------------------------------------------------------------------
    def read(self, node: fx.Node) -> None:
        piece = piece_of(node)
        if piece is not None and piece.source not in self.member:
            if piece.count > 1 and piece.source not in self.fixed:
                source = self.equal.get(piece.source, piece.source)
                key = ("piece", source, piece.dim, piece.count, piece.width, repr(piece.rest))
                behind = piece.dim - compat.example_value(source).dim()
                self.join(node, key, piece.index, Family(piece.count, piece.width, behind, piece))
            return
        members = [self.member[arg] for arg in node.all_input_nodes if arg in self.member]
        text = (node.op, str(node.target), repr(map_arg((node.args, node.kwargs), self.label)))
        if not members:
            alone = not any(arg in self.fixed for arg in node.all_input_nodes)
            if alone and name_of(node) in REPEATED and self.seen.setdefault(text, node) is not node:
                self.equal[node] = self.seen[text]
            return
        families = list(dict.fromkeys(family for family, _ in members))
        like = self.families[families[0]]
        others = [self.families[family] for family in families]
        same = all((f.count, f.width, f.behind) == (like.count, like.width, like.behind) for f in others)
        if not same and not (like.width == 0 and all((f.count, f.width) == (like.count, 0) for f in others)):
            return
        if len({index for _, index in members}) == 1:
            new = Family(like.count, like.width, like.behind, sources=families)
            if self.arguments(node, new) is not None:
                self.join(node, text, members[0][1], new)

    def label(self, arg: fx.Node) -> Any:
        """What stands for an argument in a call's text: its family, or itself."""
        return f"<{self.member[arg][0]}>" if arg in self.member else self.equal.get(arg, arg)

    def join(self, node: fx.Node, key: Any, index: int, new: Family) -> None:
        place = self.known.setdefault(key, len(self.families))
        if place == len(self.families):
            self.families.append(new)
        if index not in self.families[place].members:
            self.families[place].members[index] = node
        self.member[node] = place, index

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

    def arguments(self, node: fx.Node, family: Family) -> tuple[Any, Any] | None:
        """The arguments of the call for all pieces, none of them yet replaced; None if it cannot be one call."""
        if any(arg in self.fixed for arg in node.all_input_nodes) or node.kwargs.get("out") is not None:
            return None
        return rules.arguments(node, [arg for arg in node.all_input_nodes if arg in self.member], family)


class Hoist:
    """The calls for all pieces, made on values of the functional graph."""

    def __init__(self, edit: Edit, found: Families) -> None:
        self.edit = edit
        self.found = found
        self.whole: dict[int, Value] = {}

    def pairs(self) -> list[tuple[Value, Value]]:
        """(new, old): pieces of what was brought together, and rows that were worked on after they were gathered."""
        for index in sorted(self.found.wanted):
            self.bring_together(index)
        builder = Builder(self.edit, self.found.families, self.whole)
        gathered = [(builder.build(sink), sink.value(self.edit)) for sink in self.found.sinks]
        pieces = [
            (self.piece(index, place, node), self.edit.value(node))
            for node, (index, place) in self.found.member.items()
            if index in self.whole and self.found.families[index].piece is None
        ]
        return [*gathered, *pieces]

    def bring_together(self, index: int) -> None:
        family = self.found.families[index]
        at = min(family.members.values(), key=self.found.place.__getitem__)
        if family.piece is not None:
            self.whole[index] = self.source(family.piece, at)
            return
        given = self.found.arguments(at, family)
        assert given is not None
        args, kwargs = map_nodes(given, self.operand)
        target = "reshape" if at.target == "view" else at.target  # all pieces need not lie as one does
        self.whole[index] = self.edit.call(target, *args, like=at, **kwargs)

    def operand(self, node: fx.Node) -> Value:
        """All pieces for one of them; everything else is what it is."""
        if node in self.found.member:
            return self.whole[self.found.member[node][0]]
        return self.edit.value(self.found.equal.get(node, node))

    def source(self, piece: Piece, like: fx.Node) -> Value:
        """All pieces at once: along a dimension of their own in front, or where slices lie anyway."""
        value = self.edit.value(piece.source)
        if piece.width:
            return value
        if piece.dim:
            value = self.edit.call("movedim", value, piece.dim, 0, like=like)
        if piece.rest:
            value = self.edit.call(operator.getitem, value, (slice(None), *piece.rest), like=like)
        return value

    def piece(self, index: int, place: int, like: fx.Node) -> Value:
        family, whole = self.found.families[index], self.whole[index]
        if family.width:
            return self.edit.call("narrow", whole, family.behind, place * family.width, family.width, like=like)
        return self.edit.call("select", whole, 0, place, like=like)
