"""Activations of what has been rearranged: laid out again as what was rearranged.

    a = f(L(x) + b)    becomes    a = L(y),  y = f(L^-1(L(x) + b))

for a rearrangement ``L``: a step size is split into chunks before its softplus (Mamba-2's reference), a gate before its
logarithm. No region reaches above the activation, and ``a`` has a shape that no role has; ``y`` has that of ``x``.
``f`` works on each element by itself, so there is nothing to prove.
"""

from __future__ import annotations

import contextlib
import math

from kdacompile import compat
from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.engine.values import moves, undone
from kdacompile.patterns.engine.vocabulary import LAYOUT

ACTIVATIONS = frozenset("sigmoid softplus log_sigmoid_forward silu tanh relu elu gelu log".split())
TERMS = frozenset("add sub mul div".split())


def apply(edit: Edit) -> None:
    """Give every activation of a tensor with more dimensions than before the layout from before, and rearrange that."""
    for op in tuple(edit.functional.ops):
        if op.name in ACTIVATIONS and op.out.node is not None and op.out.node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, op)


def _rewrite(edit: Edit, op: Op) -> None:
    laid, value, node = op.reads[0], op.out, op.node
    steps = [step for step in _rearrangement(laid) if step.name != "_to_copy"]
    fixed = all(isinstance(size, int) for size in compat.example_value(value.node).shape)
    if not fixed or not steps or len(steps[-1].reads[0].shape) >= len(value.shape):
        return
    for step in steps:
        laid = edit.moved(laid, undone(step), node)
    laid = edit.call(rules.function_of(op), laid, *op.args[1:], like=node, **op.kwargs)
    for step in reversed(steps):
        laid = edit.moved(laid, moves(step), node)
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
