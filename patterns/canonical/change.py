"""Another text of the same graph: nodes that are made, readers that read them instead, and how both are taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from torch import fx

from kdacompile import compat
from kdacompile.graph.ir import Graph


def overwritten(functional: Graph) -> set[fx.Node]:
    """Nodes that share memory with something the graph writes."""
    written = {mutation.storage for mutation in functional.mutations}
    return {node for node, storage in functional.storages.items() if storage in written}


class Change(ABC):
    """One attempt: ``apply``, then ``finish`` if it was worth it, else ``undo``."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.new: list[fx.Node] = []
        self.replaced: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        """(reader, what it reads now, what it read before)"""

    @abstractmethod
    def apply(self, functional: Callable[[], Graph]) -> bool:
        """Change the graph; False, with nothing changed, where that cannot be. ``functional`` reads it as it is now."""

    @abstractmethod
    def finish(self) -> None:
        """Erase what nobody reads any more."""

    def undo(self) -> None:
        self.put_back()
        self.erase_new()

    def replace(self, old: fx.Node, new: fx.Node, readers: Iterable[fx.Node]) -> None:
        for reader in readers:
            reader.replace_input_with(old, new)
            self.replaced.append((reader, new, old))

    def put_back(self) -> None:
        for reader, new, old in reversed(self.replaced):
            reader.replace_input_with(new, old)

    def erase_new(self) -> None:
        for node in reversed(self.new):
            self.graph.erase_node(node)

    def erase_unread(self, candidates: Iterable[fx.Node]) -> None:
        mine = {*self.new, *candidates}
        for node in reversed([node for node in self.graph.nodes if node in mine]):
            if not node.users:
                self.graph.erase_node(node)

    def method(self, like: fx.Node, node: fx.Node, name: str, *args: object) -> fx.Node:
        return self.made(self.graph.call_method(name, (node, *args)), like)  # type: ignore[arg-type]

    def made(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A new node, which stands for ``like`` in reports, with its example value."""
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        self.new.append(node)
        compat.propagate_fake(node, like)
        return node
