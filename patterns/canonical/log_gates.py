"""Input gates in log space: the exponential of a sum with the logarithm of a gate, as a product.

    exp(a + log sigmoid(i)) = exp(a) sigmoid(i)
    exp(a - softplus(i))    = exp(a) sigmoid(-i)

mLSTM adds the logarithm of its input gate to that of the decays before it takes the exponential. Written like this, the
gate is a factor of the keys, as every other write gate is. A sigmoid is at most one: what is multiplied overflows
nowhere that the sum did not.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import moves
from kdacompile.patterns.engine.vocabulary import LAYOUT


def apply(edit: Edit) -> None:
    """Redefine every exponential of a sum with the logarithm of a gate, laid out in whatever way."""
    for op in tuple(edit.functional.ops):
        total = op.reads[0].op if op.name == "exp" else None
        if total is None or total.name != "add" or len(total.reads) != 2 or total.kwargs or op.out.node in edit.fixed:
            continue
        with contextlib.suppress(CannotEdit):
            gates = [_gate(edit, op.node, term) for term in total.reads]
            if gates.count(None) == 1:
                pairs = zip(gates, total.reads, strict=True)
                factors = [gate or edit.call(torch.exp, term, like=op.node) for gate, term in pairs]
                edit.redefine(op.out, edit.call(torch.mul, *factors, like=op.node))


def _gate(edit: Edit, node: fx.Node, term: Value) -> Value | None:
    """The sigmoid whose logarithm, rearranged, ``term`` is."""
    steps: list[Op] = []
    op, negated = term.op, False
    while op is not None and (op.name in LAYOUT or (op.name == "neg" and not negated)):
        if op.name == "neg":
            negated = True
        else:
            steps.append(op)
        op = op.reads[0].op
    if op is None or op.args[1:] or op.kwargs:
        return None
    if op.name.startswith("log_sigmoid") and not negated:
        gate = edit.call(torch.sigmoid, op.reads[0], like=node)
    elif op.name == "softplus" and negated:
        gate = edit.call(torch.sigmoid, edit.call(torch.neg, op.reads[0], like=node), like=node)
    else:
        return None
    for step in reversed(steps):
        gate = edit.moved(gate, moves(step), node)
    return gate
