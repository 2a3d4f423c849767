"""Rearrangements of a functional graph done again on other values, and undone."""

from __future__ import annotations

import math

from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value


def moved(edit: Edit, node: fx.Node, value: Value, op: Op, *, back: bool) -> Value:
    """``value`` with the rearrangement ``op`` done, or undone. Raises CannotEdit where that repeats elements."""
    if math.prod(op.reads[0].shape) != math.prod(op.out.shape):
        raise CannotEdit("not a rearrangement: elements are repeated")
    if op.name == "permute":
        rank = len(op.out.shape)
        order = [dim % rank for dim in op.args[1]]
        return edit.call("permute", value, *(map(order.index, range(rank)) if back else order), like=node)
    if op.name == "transpose":
        return edit.call("transpose", value, *op.args[1:3], like=node)
    shape = op.reads[0].shape if back else op.out.shape
    return value if tuple(shape) == tuple(value.shape) else edit.call("reshape", value, *shape, like=node)
