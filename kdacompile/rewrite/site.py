"""The model's graph around a proven region: where the region's values are read, and nodes made in its place.

Nodes are placed by their order in the graph. Values of the functional graph have names: the nodes of the model's graph
that stand for them, each from some position on, since a buffer holds other values before and after a write.
"""

from __future__ import annotations

import contextlib
import operator
from bisect import bisect_right
from typing import Any, Generic

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.ir import Graph, Mutation, Value, reach
from kdacompile.patterns.engine.match import B, Match
from kdacompile.rewrite import strides


class Site(Generic[B]):
    """Where one match stands in the model's graph; :class:`.splice.Splice` is given the graphs."""

    graph: fx.Graph
    functional: Graph
    match: Match[B]
    storages: dict[Any, int]
    mutations: list[Mutation]
    keep_strides: bool
    place: dict[fx.Node, int]
    timeline: list[tuple[int, int]]
    """(position in the functional graph, place now) of the nodes that earlier rewrites left standing, in order."""
    dying: set[fx.Node]
    """Nodes that the rewrite will erase."""

    def region_nodes(self) -> set[fx.Node]:
        """Nodes whose work the op takes over, with those that only pass a value of the region on (a cast to its own
        dtype).
        """
        ops = self.match.candidate.ops
        nodes = {op.node for op in ops}
        writes = {mutation.node for mutation in self.mutations}
        names = {node for op in ops for value in op.outs for node, _ in self.functional.names.get(value, [])}
        nodes |= (names - writes) | self.functional.dead
        nodes = {node for node in nodes if node in self.place and node.op in ("call_function", "call_method")}
        # A dead value may live on as a buffer: zeros_like(state), overwritten by a copy, stays and reads a shape.
        for node in sorted(nodes & self.functional.dead, key=self.place.__getitem__, reverse=True):
            if any(user not in nodes and compat.writes_first_argument(user) for user in node.users):
                nodes.discard(node)
        return nodes

    def times(self) -> list[tuple[int, int]]:
        """The timeline."""
        known: dict[fx.Node, int] = {op.node: op.position for op in self.functional.ops}
        known |= {mutation.node: mutation.position for mutation in self.mutations}
        return sorted((position, self.place[node]) for node, position in known.items() if node in self.place)

    def now(self, position: int) -> int:
        """Where a position of the graph that was captured is in the graph as it is now."""
        index = bisect_right(self.timeline, (position, len(self.place)))
        return self.timeline[index - 1][1] if index else -1

    def names(self, value: Value) -> list[tuple[fx.Node, int]]:
        """The nodes through which a value of the region is read, with the position from which they stand for it."""
        names = self.functional.names.get(value, [])
        return [(node, self.now(since)) for node, since in names if node in self.place]

    def later_users(self, value: Value) -> list[tuple[fx.Node, fx.Node]]:
        """Uses of an output outside the region: (name, user)."""
        return [
            (name, user)
            for name, since in self.names(value)
            for user in name.users
            if user not in self.dying
            and self.place.get(user, -1) > since
            and not self.is_copy_apart(value, name, since, user)
        ]

    def is_copy_apart(self, value: Value, name: fx.Node, since: int, user: fx.Node) -> bool:
        """True if ``name`` is a copy of the output (a cache it was stored in) and, when ``user`` comes, either was
        written to: from then on ``user`` must read the copy itself.
        """
        storages = self.storages
        ends = {storages.get(name), storages.get(value.node)}
        return len(ends) == 2 and any(
            mutation.storage in ends
            and mutation.node not in self.dying
            and since < self.now(mutation.position) <= self.place[user]
            for mutation in self.mutations
        )

    # -- new nodes ------------------------------------------------------------------------------------------------
    def method(self, node: fx.Node, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_method(name, (node, *args), kwargs)
        return self.with_meta(new, self.match.output.value.node)

    def with_meta(self, new: fx.Node, like: fx.Node) -> fx.Node:
        compat.propagate_fake(new, like)
        return new

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size of ``node``: a number if it is fixed, else a node that asks for it."""
        size = compat.example_value(node).shape[dim]
        return size if isinstance(size, int) else self.with_meta(self.graph.call_method("size", (node, dim)), node)

    def getitem(self, call: fx.Node, index: int, like: fx.Node) -> fx.Node:
        return self.with_meta(self.graph.call_function(operator.getitem, (call, index)), like)

    def as_it_was(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """``node`` in the dtype and strides of the value it stands for."""
        want = compat.example_value(like)
        if compat.example_value(node).dtype != want.dtype:
            node = self.method(node, "to", want.dtype)
        have = compat.example_value(node)
        if not self.keep_strides or want.numel() == 0:
            return node
        same, format = strides.same(have, want), strides.like_channels(want)
        if same and strides.like_channels(have) == format:
            return node
        gaps = strides.has_gaps(want) and self.is_returned(like)
        if same or gaps or strides.like_channels(want, strides.packed(want)) != format:
            with contextlib.suppress(compat.NoHint):
                return self.with_gaps(node, want)
        order = strides.order(want)
        node = self.method(node, "permute", *order)
        node = self.method(node, "contiguous")
        return self.method(node, "permute", *(order.index(d) for d in range(want.dim())))

    def is_returned(self, node: fx.Node) -> bool:
        """Whether the graph's caller gets ``node``, or a view of it."""
        storages = self.storages
        own = storages.get(node)
        views = reach(
            [node], lambda view: [user for user in view.users if own is not None and storages.get(user) == own]
        )
        return any(user.op == "output" for view in views for user in view.users)

    def with_gaps(self, node: fx.Node, want: torch.Tensor) -> fx.Node:
        """``node`` in memory that holds more than it (a slice of something padded), or less (expanded). Raises
        ``NoHint`` where the graph cannot compute the strides.
        """
        shape, steps = (
            [compat.number_in(self.graph, number, node) for number in numbers]
            for numbers in (want.shape, want.stride())
        )
        once = [1 if step == 0 else size for size, step in zip(shape, steps, strict=True)]
        for dim in (dim for dim, step in enumerate(steps) if step == 0):
            node = self.method(node, "narrow", dim, 0, 1)
        options: dict[str, Any] = {"dtype": want.dtype, "device": want.device}
        made = self.graph.call_function(torch.empty_strided, (once, steps), options)
        node = self.method(self.with_meta(made, node), "copy_", node)
        return self.method(node, "expand", *shape) if once != shape else node
