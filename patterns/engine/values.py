"""What a value is, rearrangements aside: what it is taken from, whether it is a weight, which number it stands for."""

from __future__ import annotations

import math

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.evaluate import EvaluationError, constant
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING, is_float8


def root(value: Value) -> Value:
    """The value below casts and rearrangements."""
    while value.op is not None and value.op.name in LAYOUT and value.op.reads:
        value = value.op.reads[0]
    return value


def operand(value: Value) -> Value:
    """The same for an op to read: casts from 8-bit floating point stay, since the ops do not take that."""
    while value.op is not None and value.op.name in LAYOUT and value.op.reads:
        source = value.op.reads[0]
        if is_float8(source.dtype):
            return value
        value = source
    return value


def is_weight(value: Value) -> bool:
    """Parameters, rows picked from one (experts), and functional weights: a product with one is a projection."""
    if value.weight:
        return True
    while value.op is not None and value.op.name in PICKING:
        value = root(value.op.reads[0])
    return value.param


def number(item: object) -> float | None:
    """The number an operator's argument stands for: Python's own, or a tensor of one element that no input reaches."""
    if isinstance(item, bool):
        return None
    if isinstance(item, (int, float)):
        return float(item)
    if not isinstance(item, Value) or not item.const or math.prod(item.shape) != 1:
        return None
    try:
        return float(constant(item))
    except EvaluationError:
        return None


def turn(op: Op) -> list[int]:
    """Which dimension of its operand each dimension is, of an operator that has dimensions change places."""
    order = list(range(len(op.out.shape)))
    if op.name == "permute":
        return [dim % len(order) for dim in op.args[1]]
    if len(order) > 1:
        one, other = op.args[1:3] if op.name == "transpose" else (0, 1)
        order[one], order[other] = order[other], order[one]
    return order
