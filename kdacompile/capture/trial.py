"""What the pass makes of a graph, before the graph is compiled: worked out on a copy, once, if anybody asks."""

from __future__ import annotations

import functools

from torch import fx

from kdacompile.rewrite import compiler_pass, held
from kdacompile.settings import Settings


class Trial:
    """The rewritten copy of a graph that may still be captured anew."""

    def __init__(self, gm: fx.GraphModule, settings: Settings) -> None:
        self.gm, self.settings = gm, settings

    @functools.cached_property
    def rewritten(self) -> tuple[fx.Graph, bool]:
        """The copy's graph, and whether something in it was rewritten."""
        copy = held.copy_of(self.gm)
        matches = compiler_pass.rewrite(copy, self.settings).matches
        return copy.graph, bool(matches)
