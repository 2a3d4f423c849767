"""Values that a match relies on: decay tables and masks that a module owns.

Some models read one decay from several buffers (lightning attention: a causal mask of decays, the decay up to either
end of a block, a slope). Only their values show that they agree. So the region is proven with those values, and because
a buffer may be overwritten at any time, the compiled graph is entered only while they still hold: ``Guarded`` compares
them at every call, whoever wrote them in whatever way (``load_state_dict``, ``.data``, NumPy), and otherwise runs the
graph as Dynamo captured it. Versions and addresses would be cheaper to compare, but miss some of those ways.

The compiler's caches do not see values. A graph that may hold some is therefore rewritten before it reaches the
compiler, not by a pass inside it: what is cached is then the code of the rewritten graph, under that graph's key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kdacompile import compat
from kdacompile.containment import contain
from kdacompile.graph.build import Tables

log = logging.getLogger(__name__)

LARGEST = 1 << 26
"""Elements up to which a tensor's values are looked at."""


def find(graph: fx.Graph, inputs: Sequence[Any]) -> Tables:
    """Inputs of a graph that modules own and whose values a match may rely on: tables, with what their module owns
    beside them. Empty for almost every graph.
    """
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        return {}
    owned = {
        node: tensor
        for node, tensor in zip(placeholders, inputs, strict=True)
        if type(tensor) is Tensor and not tensor.requires_grad and tensor.numel() <= LARGEST and compat.owner(node)
    }
    owners = {compat.owner(node) for node, tensor in owned.items() if _is_table(tensor)}
    return {node.name: tensor.clone() for node, tensor in owned.items() if compat.owner(node) in owners}


def _is_table(tensor: Tensor) -> bool:
    """True for masks and for tables of factors: at least two dimensions, entries from 0 to 1 (or a mask of -inf); and
    for logarithms of one decay a head: one dimension, all finite and below 0.
    """
    dims = sum(size > 1 for size in tensor.shape)
    if not dims or tensor.is_complex() or tensor.layout != torch.strided:
        return False
    if tensor.is_floating_point() and tensor.itemsize == 1:  # a quantised weight: torch does not compare those
        return False
    if dims == 1:
        return tensor.is_floating_point() and bool(((tensor < 0) & tensor.isfinite()).all())
    if tensor.dtype == torch.bool:
        return True
    return bool(((tensor >= 0) & (tensor <= 1) | (tensor == -math.inf)).all())


class Guarded:
    """Compiled code that is right for certain values of some inputs, and the captured graph for all others."""

    def __init__(self, compiled: Callable[..., Any], captured: fx.GraphModule, tables: Tables) -> None:
        self.compiled = compiled
        self.captured = captured
        names = [node.name for node in captured.graph.find_nodes(op="placeholder")]
        self.tables = [(index, name, tables[name]) for index, name in enumerate(names) if name in tables]
        """Place among the inputs, name and the values it must have."""
        self.warned = False

    def __call__(self, *args: Any) -> Any:
        if contain("comparing tables", lambda: self.are_unchanged(args), lambda _: False):
            return self.compiled(*args)
        if not self.warned:
            self.warned = True
            names = ", ".join(name for _, name, _ in self.tables)
            log.warning(
                "tensors among %s have changed since they were compiled for; this graph now runs without fused "
                "kernels (torch._dynamo.reset() compiles it anew)",
                names,
            )
        return self.captured(*args)

    def are_unchanged(self, args: Sequence[Any]) -> bool:
        """True if every table has its values; one wait per device, and none while a CUDA graph is recorded."""
        pending: list[Tensor] = []
        for index, _, values in self.tables:
            given = args[index]
            if type(given) is not Tensor or given.device != values.device or given.shape != values.shape:
                return False
            if given.device.type == "cpu":
                if not torch.equal(given, values):
                    return False
            else:
                pending.append((given == values).all())
        if not pending:
            return True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return bool(torch.stack(pending).all())
