"""Writes to buffers of a function's own that nobody reads any more, once what they were for is an op."""

from __future__ import annotations

from torch import fx

from kdacompile.compat.schemas import declaration, is_operator


def drop_dead_writes(graph: fx.Graph) -> None:
    """Remove such writes, then everything dead. The graph is ATen: schemas say what aliases and what is written."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = aliased(node)
        roots[node] = node if source is None else roots[source]
    for root in set(roots.values()):
        family = {node for node, own in roots.items() if own is root}
        writers = {node for node in family if node is not root and _written(node) in family}
        readers = {user for node in family for user in node.users} - family
        if root.op == "call_function" and writers and not readers:
            for node in reversed([node for node in graph.nodes if node in family]):
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _written(node: fx.Node) -> fx.Node | None:
    """The argument an operator writes in place."""
    target = node.target
    if not is_operator(target) or not declaration(target).is_mutable or not node.args:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result is, or may be."""
    if node.op == "call_method":
        return node.all_input_nodes[0] if node.all_input_nodes else None
    target = node.target
    if not is_operator(target):
        return None
    if _written(node) is not None:
        return _written(node)
    returns = declaration(target).returns
    aliases = any(item.alias_info is not None for item in returns) and bool(node.args)
    return node.args[0] if aliases and isinstance(node.args[0], fx.Node) else None
