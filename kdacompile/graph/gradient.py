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
    reached = set(filter(is_wanted, inputs))
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


def is_cut_in_place(value: Value, names: Mapping[Value, Sequence[tuple[fx.Node, int]]]) -> bool:
    """True if some who read the value see a gradient's path, and others see none: ``detach_`` came between them."""
    return len({wants_gradient(node) for node, _ in names.get(value, ())}) > 1


def is_wanted_by_some(value: Value, names: Mapping[Value, Sequence[tuple[fx.Node, int]]]) -> bool:
    """True if some who read the value see a gradient's path, or no node says that they see none."""
    nodes = names.get(value, ())
    return not nodes or any(wants_gradient(node) for node, _ in nodes)


def is_wanted(value: Value) -> bool:
    """True if a node yields the value and it is part of a gradient's path."""
    return value.node is not None and wants_gradient(value.node)


def ends_at(value: Value) -> bool:
    """True if a node yields the value without a gradient's path, and it is computed from what has one."""
    if value.node is None or value.op is None or is_wanted(value) or not value.dtype.is_floating_point:
        return False
    stack = list(value.op.reads)
    while stack:
        read = stack.pop()
        if is_wanted(read):
            return True
        if read.node is None and read.op is not None:
            stack += read.op.reads
    return False
