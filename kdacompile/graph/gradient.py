"""Where gradients flow through a region, so that the op that replaces it lets through exactly the same ones.

Three things can cut a gradient inside a graph: ``detach`` in its spellings, a grad mode switched off around a part, and
inference mode. What they did is read off Dynamo's example values (``requires_grad``), and off the mode switches in the
graph where an in-place write makes an example value say what is true only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat.operators import tree_leaves
from kdacompile.graph.ir import Op, Value


def wants_gradient(node: fx.Node) -> bool:
    """True if a tensor the node yields is part of a gradient's path."""
    return any(x.requires_grad for x in tree_leaves(compat.example_value(node)) if isinstance(x, torch.Tensor))


def is_cut(ops: Iterable[Op], inputs: Iterable[Value], names: Mapping[Value, Sequence[tuple[fx.Node, int]]]) -> bool:
    """True if a gradient of ``inputs`` gets lost on its way through ``ops``; ``names`` are the nodes behind values."""
    reached = {value for value in inputs if value.node is not None and wants_gradient(value.node)}
    for op in sorted(ops, key=lambda op: op.outs[0].index):
        if not any(value in reached for value in op.reads):
            continue
        for value in op.outs:
            if not value.dtype.is_floating_point:
                continue
            reached.add(value)
            if not all(wants_gradient(node) for node, _ in names.get(value, ())):
                return True
    return False
