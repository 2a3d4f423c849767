"""Caches that are empty yet: a prompt's keys are concatenated with nothing, and laid out as eager mode lays them out.

``torch.cat([empty, keys])`` is contiguous. Inductor makes it a copy of ``keys`` that keeps their strides, and those are
of another order where heads and tokens have been exchanged. The first step over such a cache would be captured for
these strides, and the second, whose cache a step has made, once more. Where a cache has no columns (rotated keys of
width 0), Inductor returns ``keys`` themselves, with strides of 0.
"""

from __future__ import annotations

import torch
from torch import fx

from kdacompile import compat

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def settle(graph: fx.Graph) -> bool:
    """Have results that are one tensor concatenated with nothing copied into the strides of eager mode.

    True if there were any.
    """
    changed = False
    for node in graph.output_node().all_input_nodes:
        if node.op != "call_function" or node.target not in CONCATENATIONS:
            continue
        full = [each for each in node.all_input_nodes if _sizes(each) != [0]]  # what caches begin as
        if len(full) != 1 or len(node.all_input_nodes) == 1:
            continue
        if compat.example_value(full[0]).dtype != compat.example_value(node).dtype:
            continue
        nothing = 0 in _sizes(node) and not compat.example_value(node).requires_grad
        if not nothing and _layout(full[0]) == _layout(node):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.empty_like if nothing else torch.clone,
                (full[0],),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        changed = True
    return changed


def _sizes(node: fx.Node) -> list[int | None]:
    """The shape, with None for open sizes."""
    return [size if isinstance(size, int) else None for size in compat.example_value(node).shape]


def _layout(node: fx.Node) -> list[int]:
    return [compat.size_hint(stride) for stride in compat.example_value(node).stride()]
