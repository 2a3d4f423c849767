"""Caches that grow: inputs of a graph that the next call brings longer.

A decoding step concatenates its cache and the new token, and returns the result to be the next step's cache. Dynamo
would capture the first step for the length its cache happens to have, and only the second with an open length. Where
the graph is one that is rewritten, the length is opened at once: one step graph serves every length.

So is the stride along a size of one (a single key head) where the next cache will have another: a prompt compiled by
Inductor leaves the one that the values had before heads and tokens were exchanged, a step that of a contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from kdacompile import compat, compiler_pass, held
from kdacompile.compat import sizes
from kdacompile.settings import Settings

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def open_lengths(gm: fx.GraphModule, settings: Settings) -> None:
    """Have the lengths of growing caches captured open; does not return if that takes another capture.

    Does nothing to a graph that has nothing to rewrite.
    """
    caches = list(_caches(gm.graph))
    dims = sizes.of_size(gm.graph, {length for cache in caches for length in cache.lengths})
    strides = {cache.node: odd for cache in caches if (odd := sizes.odd_strides(cache.node))}
    if (dims or strides) and (any(map(compat.is_own_op, gm.graph.nodes)) or _rewrites(gm, settings)):
        sizes.open_up(dims, strides)


def _rewrites(gm: fx.GraphModule, settings: Settings) -> bool:
    return bool(compiler_pass.rewrite(held.copy_of(gm), settings).matches)


@dataclass(frozen=True)
class _Cache:
    """An input that the graph returns longer."""

    node: fx.Node
    lengths: tuple[int, ...]
    """Now and afterwards, as masks have it too; none if they are open already."""


def _caches(graph: fx.Graph) -> Iterator[_Cache]:
    results = set(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _CONCATENATIONS or node not in results:
            continue
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        after = compat.example_value(node)
        for cache in (each for each in node.all_input_nodes if each.op == "placeholder"):
            lengths = (compat.example_value(cache).shape[dim], after.shape[dim])
            if not compat.is_one(lengths[0]):
                fixed = all(isinstance(length, int) and length > 1 for length in lengths)
                yield _Cache(cache, lengths if fixed else ())
