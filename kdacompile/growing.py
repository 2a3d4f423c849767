"""Caches that grow: inputs of a graph that the next call brings longer.

A decoding step concatenates its cache and the new token, and returns the result to be the next step's cache. Dynamo
would capture the first step for the length its cache happens to have, and only the second with an open length. Where
the graph is one that is rewritten, the length is opened at once: one step graph serves every length.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from kdacompile import compat, compiler_pass, held
from kdacompile.compat import sizes
from kdacompile.fresh_caches import CONCATENATIONS
from kdacompile.settings import Settings


def open_lengths(gm: fx.GraphModule, settings: Settings) -> None:
    """Have the lengths of growing caches captured open; does not return if that takes another capture.

    Does nothing to a graph that has nothing to rewrite.
    """
    lengths = set(_lengths(gm.graph))
    if lengths and (any(map(compat.is_own_op, gm.graph.nodes)) or _rewrites(gm, settings)):
        sizes.open_up(sizes.of_size(gm.graph, lengths))


def _rewrites(gm: fx.GraphModule, settings: Settings) -> bool:
    return bool(compiler_pass.rewrite(held.copy_of(gm), settings).matches)


def _lengths(graph: fx.Graph) -> Iterator[int]:
    """What growing caches measure, and what they grow to, as masks do; only where both are captured as numbers."""
    results = set(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in CONCATENATIONS or node not in results:
            continue
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        after = compat.example_value(node)
        for before in (compat.example_value(each) for each in node.all_input_nodes if each.op == "placeholder"):
            if before.dim() != after.dim():  # nothing yet: torch.cat takes an empty tensor of one dimension for that
                continue
            lengths = (before.shape[dim], after.shape[dim])
            if all(isinstance(length, int) and length > 1 for length in lengths):
                yield from lengths
