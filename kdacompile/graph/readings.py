"""What was read of a graph while it is searched, and what came to nothing: the same graph is not searched twice.

A graph without a match is searched as it is, with loops taken apart, and as it is again, layer by layer.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch import fx

from kdacompile.graph.build import functional_graph
from kdacompile.graph.ir import Graph, Op
from kdacompile.report.findings import Rejection
from kdacompile.rewrite.held import Tables


class Readings:
    """Functional graphs of one graph by its text, and the regions in them that were rejected, with the reasons."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graphs: dict[str, tuple[list[fx.Node], Tables, Graph]] = {}
        self.rejected: dict[AbstractSet[Op], list[Rejection]] = {}

    def functional(self, held: Tables) -> tuple[Graph, bool]:
        """The graph as it is now; True if it is read for the first time."""
        text, nodes = str(self.gm.graph), list(self.gm.graph.nodes)
        known = self.graphs.get(text)
        if known is not None and known[0] == nodes and known[1].keys() == held.keys():
            return known[2], False
        functional = functional_graph(self.gm, held=held)
        self.graphs[text] = nodes, held, functional
        return functional, True

    def reject(self, region: AbstractSet[Op], reasons: list[Rejection]) -> None:
        self.rejected[frozenset(region)] = reasons

    def reasons(self, region: AbstractSet[Op]) -> list[Rejection] | None:
        """Why the same region of the same functional graph was rejected; None if it was not."""
        return self.rejected.get(frozenset(region))
