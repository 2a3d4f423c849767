"""Input gates in log space: the exponential of a sum with the logarithm of a gate, as a product.

    exp(a + log sigmoid(i)) = exp(a) sigmoid(i)
    exp(a - softplus(i))    = exp(a) sigmoid(-i)

    exp(where(m, a + log sigmoid(i), -inf)) = exp(where(m, a, -inf)) sigmoid(i)

mLSTM adds the logarithm of its input gate to that of the decays before it takes the exponential. Written like this, the
gate is a factor of the keys, as every other write gate is. A sigmoid is at most one: what is multiplied overflows
nowhere that the sum did not.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import moves, number
from kdacompile.patterns.engine.vocabulary import LAYOUT


def apply(edit: Edit) -> None:
    """Redefine every exponential of a sum with the logarithm of a gate, laid out in whatever way."""
    for op in tuple(edit.functional.ops):
        if op.name != "exp" or op.out.node in edit.fixed:
            continue
        masks, total = _below_masks(op.reads[0])
        if total is None or total.name not in ("add", "sub") or len(total.reads) != 2 or total.kwargs:
            continue
        with contextlib.suppress(CannotEdit):
            signs = False, total.name == "sub"
            gates = [_gate(edit, op.node, *pair) for pair in zip(total.reads, signs, strict=True)]
            if gates.count(None) == 1:
                triples = zip(gates, total.reads, signs, strict=True)
                factors = [gate or _exponential(edit, op, term, negated, masks) for gate, term, negated in triples]
                edit.redefine(op.out, edit.call(torch.mul, *factors, like=op.node))


def _below_masks(value: Value) -> tuple[list[tuple[Op, Value]], Op | None]:
    """What puts -inf in some places, last first, each with what it keeps elsewhere; and the operator below it."""
    masks = list[tuple[Op, Value]]()
    while value.op is not None:
        op = value.op
        kept = None
        if op.name == "masked_fill" and number(op.args[2]) == -math.inf:
            kept = op.args[0]
        elif op.name == "where" and len(op.args) == 3:
            sides = [side for side in op.args[1:] if number(side) != -math.inf]
            kept = sides[0] if len(sides) == 1 else None
        if not isinstance(kept, Value) or kept.shape != op.out.shape or kept.dtype != op.out.dtype:
            break
        masks.append((op, kept))
        value = kept
    return masks, value.op


def _exponential(edit: Edit, op: Op, term: Value, negated: bool, masks: list[tuple[Op, Value]]) -> Value:
    """That of one term, where the sum has been."""
    if negated:
        term = edit.call(torch.neg, term, like=op.node)
    if masks and term.shape != op.out.shape:
        raise CannotEdit("a term that is the same in several places, some of which are masked")
    for mask, kept in reversed(masks):
        if mask.name == "masked_fill":
            term = edit.call("masked_fill", term, mask.args[1], -math.inf, like=op.node)
        else:
            sides = (term, -math.inf) if mask.args[1] is kept else (-math.inf, term)
            term = edit.call(torch.where, mask.args[0], *sides, like=op.node)
    return edit.call(torch.exp, term, like=op.node)


def _gate(edit: Edit, node: fx.Node, term: Value, negated: bool) -> Value | None:
    """The sigmoid whose logarithm, rearranged, ``term`` is, or what is taken from 0 for it."""
    steps: list[Op] = []
    op = term.op
    while op is not None and (op.name in LAYOUT or op.name == "neg"):
        if op.name == "neg":
            negated = not negated
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
