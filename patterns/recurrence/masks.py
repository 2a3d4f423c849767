"""Masks that are arguments: what they hide shows only when the model runs, so nothing can be proven of them.

    o = (q k^T * M) v    or    where(M, q k^T, 0) v,    M [.., T, T] an input of the graph

A causal mask that the model makes of its sizes, or keeps in a buffer, is a constant here and no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, ELEMENTWISE, LAYOUT

SELECTS = {"where": 0, "masked_fill": 1}
"""Operators that choose by a mask, and which argument that is."""


def mask_that_is_given(ops: Iterable[Op]) -> Obstacle | None:
    """The first operator that masks products of activations with an input of the graph, if their rows are summed."""
    for op in ops:
        mask = mask_of(op)
        if mask is not None and any(user.name in CONTRACTIONS for user in _below(op)):
            return obstacle(op, mask)
    return None


def mask_of(op: Op) -> Value | None:
    """The mask that an operator lays over scores, if it is an input of the graph; both are square."""
    if op.out.const or len(op.out.shape) < 2 or op.out.shape[-1] != op.out.shape[-2]:
        return None
    if op.name in SELECTS:
        given = op.args[SELECTS[op.name]]
        candidates = [(given, [value for value in op.reads if value is not given])]
    elif op.name == "mul" and len(op.reads) == 2:
        candidates = [(op.reads[0], op.reads[1:]), (op.reads[1], op.reads[:1])]
    else:
        return None
    size = op.out.shape[-1]
    for mask, others in candidates:
        if _is_given(mask, size) and any(_is_product(value) for value in others):
            return mask
    return None


def obstacle(op: Op, mask: Value) -> Obstacle:
    size = mask.shape[-1]
    reason = f"the scores are masked with an argument [{size}, {size}]: whether it is causal shows only at run time"
    return Obstacle("mask", reason, op)


def _is_given(value: Value, size: int) -> bool:
    """Whether a square is an input of the graph, or made of one element by element: not where it is spread from a
    vector (padding) or computed from activations (decays).
    """
    if value.const or value.param or size < 2 or value.shape[-2:] != (size, size):
        return False
    if value.op is None:
        return True
    if value.dtype is not torch.bool and value.op.name not in LAYOUT | ELEMENTWISE:
        return False
    return any(_is_given(read, size) for read in value.op.reads)


def _is_product(value: Value) -> bool:
    """Whether a value is a product of activations, or made of one element by element."""
    while value.op is not None and value.op.name in LAYOUT | ELEMENTWISE:
        square = [read for read in value.op.reads if not read.const and read.shape[-2:] == value.shape[-2:]]
        if not square:
            return False
        value = square[0]
    return value.op is not None and value.op.name in CONTRACTIONS


def _below(op: Op) -> Iterable[Op]:
    """Operators that a masked square passes on to, up to the first product."""

    def onward(found: Op) -> list[Op]:
        return [] if found.name in CONTRACTIONS else [user for value in found.outs for user in value.users]

    return reach(onward(op), onward, most=64)
