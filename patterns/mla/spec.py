"""Latent attention (MLA) as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from kdacompile import compat
from kdacompile.graph.ir import Graph
from kdacompile.patterns.engine.match import Obstacle, Verdict
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.spec import Spec
from kdacompile.patterns.mla.attention import Attention, find_attention
from kdacompile.patterns.mla.definition import MASKS, NAME, LatentAttention, LatentCandidate, LatentMatch
from kdacompile.patterns.mla.lengths import lengths_instead
from kdacompile.patterns.mla.pages import pages_instead
from kdacompile.patterns.mla.proof import prove
from kdacompile.patterns.mla.roles import read_attention


class LatentAttentionSpec(Spec[Attention, LatentAttention]):
    """Regions are softmaxes between two products."""

    name = NAME
    masks = MASKS
    narrows = True
    """Where there happen to be as many queries as heads, little tells one from the other."""

    def regions(self, graph: Graph) -> Iterable[Attention]:
        return find_attention(graph)

    def candidates(
        self, graph: Graph, region: Attention, effort: object = None
    ) -> Iterator[LatentCandidate | Obstacle]:
        found = read_attention(graph, region)
        if found is not None:
            yield found

    def check(self, candidate: LatentCandidate, *, wide: bool) -> Verdict[LatentAttention]:
        return prove(candidate, wide=wide)

    def forms(self, graph: Graph, match: LatentMatch, *, keep_upcasts: bool) -> Iterator[LatentMatch]:
        """On pools and lengths where the graph has them, else on what is gathered and masked."""
        limited = lengths_instead(match.binding)
        tried: list[LatentAttention] = []
        for binding in (pages_instead(limited), limited, pages_instead(match.binding), match.binding):
            if binding not in tried:
                tried.append(binding)
                mask = ("causal mask",) if binding.causal else ("length mask",) if "lengths" in binding.inputs else ()
                yield replace(match, binding=binding, absorbed=mask)

    def counterpart(
        self, candidate: LatentCandidate, here: Graph, there: Graph, regions: list[Attention]
    ) -> LatentCandidate | str:
        """What yields the same result."""
        node = candidate.output.node
        for region in regions:
            found = read_attention(there, region)
            if found is not None and not isinstance(found, Obstacle) and node is not None and found.output.node is node:
                return found
        return "there is no such region at other sizes"

    def equal_sizes(self, match: LatentMatch) -> tuple[Any, Any] | None:
        """The numbers of queries and of tokens.

        A prompt's queries and its latent may come as inputs, with lengths that nothing in the graph compares, and
        PyTorch's own ``is_causal`` is MLA's only where they are equal.
        """
        cache = match.inputs.get("latent") or match.inputs["cache"]
        return (_size(match.inputs["q"], "T"), _size(cache, "C")) if match.sizes["T"] == match.sizes["C"] else None


def _size(placement: Placement, axis: str) -> Any:
    """The graph's own size of a dimension; 1 where the tensor lacks it."""
    shape = compat.example_value(placement.value.node).shape
    return shape[placement.axes.index(axis)] if axis in placement.axes else 1


LATENT_ATTENTION = LatentAttentionSpec()
