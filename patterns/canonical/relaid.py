"""Activations of what has been rearranged: laid out again as what was rearranged.

    a = f(L(x) + b)    becomes    a = L(y),  y = f(L^-1(L(x) + b))

for a rearrangement ``L``: a step size is split into chunks before its softplus (Mamba-2's reference), a gate before its
logarithm. No region reaches above the activation, and ``a`` has a shape that no role has; ``y`` has that of ``x``.
``f`` works on each element by itself, so there is nothing to prove.
"""

from __future__ import annotations

import contextlib
import math

from torch import fx

from kdacompile import compat
from kdacompile.graph.edit import CannotEdit, Edit, map_nodes
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.canonical.layouts import moved
from kdacompile.patterns.canonical.rules import name_of
from kdacompile.patterns.engine.vocabulary import LAYOUT

ACTIVATIONS = frozenset("sigmoid softplus logsigmoid log_sigmoid silu tanh relu elu gelu log".split())
TERMS = frozenset("add sub mul div".split())


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Give every activation of a tensor with more dimensions than before the layout from before, and rearrange that."""
    for node in graph.nodes:
        if name_of(node) in ACTIVATIONS and len(node.all_input_nodes) == 1 and node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, node)


def _rewrite(edit: Edit, node: fx.Node) -> None:
    value = edit.value(node)
    steps = _rearrangement(edit.value(node.all_input_nodes[0]))
    fixed = all(isinstance(size, int) for size in compat.example_value(node).shape)
    if not fixed or not steps or len(steps[-1].reads[0].shape) >= len(value.shape):
        return
    laid = edit.value(node.all_input_nodes[0])
    for op in steps:
        laid = moved(edit, node, laid, op, back=True)
    args, kwargs = (map_nodes(tree, lambda _: laid) for tree in (node.args, node.kwargs))
    laid = edit.call(node.target, *args, like=node, **kwargs)
    for op in reversed(steps):
        laid = moved(edit, node, laid, op, back=False)
    edit.redefine(value, laid)


def _rearrangement(value: Value) -> list[Op]:
    """The rearrangements that lead to a value, the last one first, past what is added to it or multiplied."""
    steps: list[Op] = []
    while value.op is not None:
        op = value.op
        wide = [read for read in op.reads if math.prod(read.shape) == math.prod(value.shape)]
        if len(wide) != 1 or (op.name in TERMS and wide[0].shape != value.shape):
            break
        if op.name in LAYOUT:
            steps.append(op)
        elif op.name not in TERMS:
            break
        value = wide[0]
    while steps and steps[-1].reads[0].shape == steps[-1].out.shape and steps[-1].name not in ("permute", "transpose"):
        steps.pop()
    return steps
