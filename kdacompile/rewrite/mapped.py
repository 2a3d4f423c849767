"""``torch.vmap`` in a graph: the operators that a mapped function comes to, on tensors that have the mapped dimension.

vmap says how a model is written, not what it computes: under it a tensor has a dimension that its shape does not show,
so neither a pattern nor the op that takes its place can stand there. What AOTAutograd makes of such a part when it
compiles the graph is done here before: the part is run on its example values, and the ATen operators that reach the
tensors behind take its place. They are what eager mode calls, and what it differentiates.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import mapped


class _Unwritten(Exception):
    """A part that cannot be written down as operators."""


def unmap(graph: fx.Graph) -> bool:
    """Rewrite the parts of a graph that run under vmap, in place, up to the first that cannot be; True if there were
    some. With other transforms, or where a mode changes within the graph, none is.
    """
    if compat.transforms(graph, vmap=False) or compat.switches_modes(graph):
        return False
    parts = _parts(graph)
    with contextlib.suppress(_Unwritten, compat.NoHint):
        for nodes in parts:
            _Writing(graph, nodes).run()
    return bool(parts)


def _parts(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls from where vmap begins to where it ends, each time."""
    parts: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        change = mapped.mapping_change(node)
        if change > 0 and not depth:
            parts.append([])
        if depth or change:
            parts[-1].append(node)
        depth += change
    return parts


class _Writing:
    """Writes down the operators of one part."""

    def __init__(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        self.graph, self.nodes = graph, nodes
        self.made: dict[int, fx.Node] = {}
        """By the id of a tensor: the node that yields it."""
        self.tensors: list[torch.Tensor] = []
        """Those, so that no id is given out twice."""
        self.written: list[fx.Node] = []

    def run(self) -> None:
        own = set(self.nodes)
        inputs = dict.fromkeys(read for each in self.nodes for read in each.all_input_nodes if read not in own)
        ran = mapped.run(self.nodes, list(inputs))
        if ran is None:
            raise _Unwritten
        for node in inputs:
            self.name(compat.example_value(node), node)
        with self.graph.inserting_before(self.nodes[0]):
            for node, call in ran.calls:
                self.write(call, node)
        for node in self.nodes:
            if any(user not in own for user in node.users):
                instead = self.given(ran.values[node])
                node.replace_all_uses_with(instead, delete_user_cb=lambda user: user not in own)
        for node in reversed([*self.written, *self.nodes]):
            if not node.users and (node in own or not compat.writes_first_argument(node)):
                self.graph.erase_node(node)

    def write(self, call: mapped.Recorded, like: fx.Node) -> None:
        """The node of one operator, at the place in the user's code that ``like`` has."""
        kwargs = {name: self.given(item) for name, item in call.kwargs.items()}
        self.name(call.result, self.put(call.target, tuple(map(self.given, call.args)), kwargs, like, call.result))

    def put(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, value: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        compat.put_in_place(new, like, value)
        self.written.append(new)
        return new

    def name(self, value: Any, node: fx.Node) -> None:
        """Remember what yields a tensor, or each of several."""
        if isinstance(value, torch.Tensor):
            self.made[id(value)] = node
            self.tensors.append(value)
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            for index, item in enumerate(value):
                self.name(item, self.put(operator.getitem, (node, index), {}, node, item))

    def given(self, item: Any) -> Any:
        """An argument of an operator, tensors and open sizes by the nodes that yield them."""
        if isinstance(item, torch.Tensor):
            if id(item) not in self.made:
                raise _Unwritten
            return self.made[id(item)]
        if isinstance(item, torch.SymInt):
            return compat.number_in(self.graph, item, self.nodes[0])
        if isinstance(item, (torch.SymFloat, torch.SymBool)):
            raise _Unwritten
        return type(item)(map(self.given, item)) if type(item) in (list, tuple) else item
