"""Caches that are empty yet: a prompt's keys are concatenated with nothing, and laid out as eager mode lays them out.

``torch.cat([empty, keys])`` is contiguous. Inductor makes it a copy of ``keys`` that keeps their strides, and those are
of another order where heads and tokens have been exchanged. The first step over such a cache would be captured for
these strides, and the second, whose cache a step has made, once more.
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
        full = [each for each in node.all_input_nodes if not _is_empty(each)]
        if len(full) != 1 or len(node.all_input_nodes) == 1 or _layout(full[0]) == _layout(node):
            continue
        if compat.example_value(full[0]).dtype != compat.example_value(node).dtype:
            continue
        with graph.inserting_before(node):
            copy = graph.call_method("clone", (full[0],), {"memory_format": torch.contiguous_format})
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        changed = True
    return changed


def _is_empty(node: fx.Node) -> bool:
    """What caches begin as: no dimensions to speak of."""
    shape = compat.example_value(node).shape
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


def _layout(node: fx.Node) -> list[int]:
    return [compat.size_hint(stride) for stride in compat.example_value(node).stride()]
