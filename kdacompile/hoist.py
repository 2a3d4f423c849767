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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.patterns.ir import Graph
from kdacompile.pieces import Piece, piece_of

POINTWISE = frozenset(
    "add sub mul div truediv neg rsub pow square exp exp2 log log1p sigmoid softplus logsigmoid log_sigmoid silu tanh "
    "relu elu gelu abs sqrt rsqrt reciprocal clamp clamp_min clamp_max float double half bfloat16 to contiguous".split()
)
ALONG = {"sum": 1, "mean": 1, "softmax": 1, "norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "normalize": 2}
"""Functions that work along the dimensions given as this argument, or as ``dim``."""

MOVES = frozenset("view reshape unsqueeze squeeze unflatten".split())
ACTIVATIONS = frozenset(
    "log log1p sigmoid softplus logsigmoid log_sigmoid silu tanh relu elu gelu abs sqrt rsqrt clamp clamp_min "
    "clamp_max norm linalg_norm linalg_vector_norm normalize softmax linear matmul".split()
)
"""What a region may not hold: bringing the rest together changes nothing."""


def attempt(graph: fx.Graph, shadow: Callable[[], Graph]) -> Hoist | None:
    """A hoist that would change something; None if there is nothing to bring together."""
    if any(compat.is_mode_switch(node) for node in graph.nodes):
        return None  # autocast or a grad mode would have to be the same for all pieces
    if not Hoist(graph).wanted:
        return None
    found = shadow()
    written = {mutation.storage for mutation in found.mutations}
    hoist = Hoist(graph, {node for node, storage in found.storages.items() if storage in written})
    return hoist if hoist.wanted else None


@dataclass
class _Family:
    """Calls that differ only in the piece they read: ``members[i]`` reads piece ``i`` of each of ``sources``."""

    count: int
    width: int
    behind: int
    """Slices: the dimension they were taken of, counted from the right."""
    piece: Piece | None = None
    sources: list[int] = field(default_factory=list)
    members: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) == self.count

    @property
    def first(self) -> fx.Node:
        return self.members[0]


def name_of(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.strip("_") if name.startswith("__") else name


class Hoist:
    """One attempt: ``apply``, then ``finish`` if it was worth it, else ``undo``."""

    def __init__(self, graph: fx.Graph, fixed: AbstractSet[fx.Node] = frozenset()) -> None:
        """``fixed``: nodes that share memory with something the graph writes."""
        self.graph = graph
        self.fixed = fixed
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.families: list[_Family] = []
        self.known: dict[Any, int] = {}
        self.lane: dict[fx.Node, tuple[int, int]] = {}
        self.equal: dict[fx.Node, fx.Node] = {}
        """Calls on whole tensors that an earlier call has made already."""
        self.seen: dict[Any, fx.Node] = {}
        self.new: list[fx.Node] = []
        self.replaced: list[tuple[fx.Node, fx.Node, fx.Node]] = []

        for node in self.place:
            if node.op in ("call_function", "call_method") and node not in fixed:
                self.read(node)
        self.wanted = self.needed()

    def apply(self) -> bool:
        """Bring together what is wanted; False, with nothing changed, if a call does not take all pieces at once."""
        try:
            self.rewrite()
        except (RuntimeError, TypeError, ValueError, IndexError):
            self.undo()
            return False
        return True

    def rewrite(self) -> None:
        whole: dict[int, fx.Node] = {}
        for index in sorted(self.wanted):
            self.bring_together(index, whole)
        for index in sorted(self.wanted):
            self.hand_out(self.families[index], whole[index])

    # -- finding families -----------------------------------------------------------------------------------------
    def read(self, node: fx.Node) -> None:
        piece = piece_of(node)
        if piece is not None and piece.source not in self.lane:
            if piece.count > 1 and piece.source not in self.fixed:
                source = self.equal.get(piece.source, piece.source)
                key = ("piece", source, piece.dim, piece.count, piece.width, repr(piece.rest))
                behind = piece.dim - compat.example_value(source).dim()
                self.join(node, key, piece.index, _Family(piece.count, piece.width, behind, piece))
            return
        lanes = [self.lane[arg] for arg in node.all_input_nodes if arg in self.lane]
        text = (node.op, str(node.target), repr(map_arg((node.args, node.kwargs), self.label)))
        if not lanes:
            alone = not any(arg in self.fixed for arg in node.all_input_nodes)
            if alone and name_of(node) in POINTWISE and self.seen.setdefault(text, node) is not node:
                self.equal[node] = self.seen[text]
            return
        families = list(dict.fromkeys(family for family, _ in lanes))
        like = self.families[families[0]]
        others = [self.families[family] for family in families]
        same = all((f.count, f.width, f.behind) == (like.count, like.width, like.behind) for f in others)
        if not same and not (like.width == 0 and all((f.count, f.width) == (like.count, 0) for f in others)):
            return
        if len({index for _, index in lanes}) == 1:
            new = _Family(like.count, like.width, like.behind, sources=families)
            if self.arguments(node, new) is not None:
                self.join(node, text, lanes[0][1], new)

    def label(self, arg: fx.Node) -> Any:
        """What stands for an argument in a call's text: its family, or itself."""
        return f"<{self.lane[arg][0]}>" if arg in self.lane else self.equal.get(arg, arg)

    def join(self, node: fx.Node, key: Any, index: int, new: _Family) -> None:
        place = self.known.setdefault(key, len(self.families))
        if place == len(self.families):
            self.families.append(new)
        if index not in self.families[place].members:
            self.families[place].members[index] = node
        self.lane[node] = place, index

    def needed(self) -> set[int]:
        """Complete families that an activation belongs to or depends on."""
        found: set[int] = set()
        stack = [index for index, family in enumerate(self.families) if _is_activation(family)]
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

    def arguments(self, node: fx.Node, family: _Family) -> tuple[Any, Any] | None:
        """The arguments of the call for all pieces, lanes not yet replaced; None if it cannot be one call."""
        name, value = name_of(node), compat.example_value(node)
        lanes = [arg for arg in node.all_input_nodes if arg in self.lane]
        ranks = {compat.example_value(arg).dim() for arg in lanes}
        if (
            not isinstance(value, torch.Tensor)
            or len(ranks) != 1
            or any(arg in self.fixed for arg in node.all_input_nodes)
        ):
            return None
        rank = ranks.pop()
        if name in POINTWISE:
            fits = value.dim() == rank and all(_broadcasts(arg, lanes, rank, family) for arg in node.all_input_nodes)
            return (node.args, node.kwargs) if fits else None
        if len(lanes) != 1 or node.args[0] is not lanes[0]:
            return None
        if name in ALONG:
            return _along(node, ALONG[name], rank, family)
        if name in ("linear", "matmul"):
            weight = node.args[1] if len(node.args) > 1 else None
            square = isinstance(weight, fx.Node) and compat.example_value(weight).dim() == 2
            return (
                (node.args, node.kwargs) if square and rank > 1 and not (family.width and family.behind == -1) else None
            )
        if name in MOVES and not family.width and not node.kwargs:
            return _moved(node, name, family.count)
        return None

    def made(self, node: fx.Node, like: fx.Node) -> fx.Node:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        self.new.append(node)
        compat.propagate_fake(node, like)
        return node

    # -- back to the loop -----------------------------------------------------------------------------------------
    def hand_out(self, family: _Family, whole: fx.Node) -> None:
        """Let readers outside the families read their piece of the whole."""
        if family.piece is not None:
            return
        for node in [node for node, (place, _) in self.lane.items() if self.families[place] is family]:
            index = self.lane[node][1]
            readers = [user for user in node.users if user not in self.lane or self.lane[user][0] not in self.wanted]
            if not readers:
                continue
            with self.graph.inserting_before(node):
                if family.width:
                    call = ("narrow", (whole, family.behind, index * family.width, family.width))
                else:
                    call = ("select", (whole, 0, index))
                piece = self.made(self.graph.call_method(*call), node)
            for reader in readers:
                reader.replace_input_with(node, piece)
                self.replaced.append((reader, piece, node))

    def undo(self) -> None:
        for reader, piece, node in self.replaced:
            reader.replace_input_with(piece, node)
        for node in reversed(self.new):
            self.graph.erase_node(node)

    def finish(self) -> None:
        """Erase what nobody reads any more."""
        alive = set(self.graph.nodes)
        for node in reversed([*self.lane, *self.new]):
            if node in alive and not node.users:
                self.graph.erase_node(node)


def _is_activation(family: _Family) -> bool:
    """True for a complete family of activations, none of whose results leaves the graph."""
    if not family.complete or name_of(family.first) not in ACTIVATIONS:
        return False
    return not any(user.op == "output" for node in family.members.values() for user in node.users)


def _broadcasts(arg: fx.Node, lanes: list[fx.Node], rank: int, family: _Family) -> bool:
    """True if an operand means the same beside one piece and beside all of them."""
    value = compat.example_value(arg)
    if arg in lanes or not isinstance(value, torch.Tensor):
        return arg in lanes
    if value.dim() > rank:
        return False
    return not family.width or value.dim() < -family.behind or value.shape[family.behind] == 1


def _along(node: fx.Node, place: int, rank: int, family: _Family) -> tuple[Any, Any] | None:
    """A call along dimensions that are told: they count from the right, or lie one further behind."""
    named = "dim" in node.kwargs
    dims = node.kwargs["dim"] if named else node.args[place] if len(node.args) > place else None
    if name_of(node) == "normalize" and dims is None:
        named, dims = True, 1
    single = isinstance(dims, int)
    listed = [dims] if single else list(dims) if isinstance(dims, (list, tuple)) else []
    if not listed or not all(isinstance(dim, int) for dim in listed):
        return None
    behind = [dim if dim < 0 else dim - rank for dim in listed]
    keeps = compat.example_value(node).dim() == rank
    if family.width and (family.behind in behind or not keeps):
        return None
    given = behind[0] if single else behind
    if named:
        return node.args, {**node.kwargs, "dim": given}
    return (*node.args[:place], given, *node.args[place + 1 :]), node.kwargs


def _moved(node: fx.Node, name: str, count: int) -> tuple[Any, Any] | None:
    """A rearrangement of each piece, with the pieces' own dimension in front."""
    rest = node.args[1:]
    if name in ("view", "reshape"):
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return (node.args[0], count, *sizes), {}
    if len(rest) < 1 or not isinstance(rest[0], int):
        return None
    return (node.args[0], rest[0] if rest[0] < 0 else rest[0] + 1, *rest[1:]), {}
