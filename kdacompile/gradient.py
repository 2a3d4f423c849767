"""Where gradients flow through a region, so that the op that replaces it lets through exactly the same ones.

Three things can cut a gradient inside a graph: ``detach`` in its spellings, a grad mode switched off around a part, and
inference mode. What they did is read off Dynamo's example values (``requires_grad``), and off the mode switches in the
graph where an in-place write makes an example value say what is true only later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from kdacompile import compat

Zone = tuple[bool, int]
"""Grad mode, and how many inference modes are open."""


def zones(graph: fx.Graph) -> dict[fx.Node, Zone]:
    """The zone each node of ``graph`` runs in. Dynamo compiles in the grad mode the graph will be called in."""
    grad = torch.is_grad_enabled()
    depth = 0
    found: dict[fx.Node, Zone] = {}
    for node in graph.nodes:
        found[node] = grad, depth
        grad = compat.grad_mode_after(node, grad)
        depth += compat.inference_mode_change(node)
    return found


def wants_gradient(node: fx.Node) -> bool:
    """True if a tensor the node yields is part of a gradient's path."""
    return any(tensor.requires_grad for tensor in _tensors(compat.example_value(node)))


def cutting_nodes(region: Iterable[fx.Node], rewritten: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of ``region`` through which a gradient of their inputs does not get.

    ``rewritten`` are buffers written in place somewhere: what is known of them holds after the last write only.
    """
    unsure = set(rewritten)
    found: list[fx.Node] = []
    for node in region:
        outs = [tensor for tensor in _tensors(compat.example_value(node)) if tensor.is_floating_point()]
        enters = any(wants_gradient(arg) for arg in node.all_input_nodes if arg not in unsure)
        if compat.is_detach(node) or (outs and enters and not any(tensor.requires_grad for tensor in outs)):
            found.append(node)
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
