"""``torch.vmap`` in a graph: the operators that a mapped function comes to, on tensors that have the mapped dimension.

vmap says how a model is written, not what it computes: under it a tensor has a dimension that its shape does not show,
so neither a pattern nor the op that takes its place can stand there. What AOTAutograd makes of such a part when it
compiles the graph is done here before: the part is run on its example values, and the ATen operators that reach the
tensors behind take its place. They are what eager mode calls, and what it differentiates.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import fx

from kdacompile import compat
from kdacompile.compat import mapped
from kdacompile.rewrite.recorded import Nodes


def unmap(graph: fx.Graph) -> bool:
    """Rewrite the parts of a graph that run under vmap, in place, up to the first that cannot be; True if there were
    some. With other transforms, or where a mode changes within the graph, none is.
    """
    if compat.transforms(graph, vmap=False) or compat.switches_modes(graph):
        return False
    parts = _parts(graph)
    with contextlib.suppress(KeyError, compat.NoHint):  # it reads what no operator has made, or a size of no input
        for nodes in parts:
            if not _write(graph, nodes):
                break
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


def _write(graph: fx.Graph, part: list[fx.Node]) -> bool:
    """Put the operators of one part in its place; False if what it comes to is not known."""
    own = set(part)
    inputs = dict.fromkeys(read for each in part for read in each.all_input_nodes if read not in own)
    ran = mapped.run(part, list(inputs))
    if ran is None:
        return False
    written: list[fx.Node] = []

    def put(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, value: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        compat.put_in_place(new, like, value)
        written.append(new)
        return new

    nodes = Nodes(put, lambda size: compat.number_in(graph, size, part[0]))
    with graph.inserting_before(part[0]):
        for node in inputs:
            nodes.name(compat.example_value(node), node, node)
        for node, call in ran.calls:
            nodes.write(call, node)
    for node in part:
        if any(user not in own for user in node.users):
            instead = nodes.given(ran.values[node])
            node.replace_all_uses_with(instead, delete_user_cb=lambda user: user not in own)
    for node in reversed([*written, *part]):
        if not node.users and (node in own or not compat.writes_first_argument(node)):
            graph.erase_node(node)
    return True
