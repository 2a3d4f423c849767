"""What a factor is the exponential of: gates that are chosen or multiplied are so as logarithms."""

from __future__ import annotations

from torch import fx

from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import moves
from kdacompile.patterns.engine.vocabulary import TURNS, VIEWS


def exponent(edit: Edit, factor: Value | float, like: fx.Node) -> Value | None:
    """What the factor is the exponential of, laid out like it; None if it is none."""
    steps: list[Op] = []
    op = factor.op if isinstance(factor, Value) else None
    while op is not None and op.name in VIEWS | TURNS:
        steps.insert(0, op)
        op = op.reads[0].op
    if op is None or op.name != "exp" or not isinstance(factor, Value) or op.out.dtype != factor.dtype:
        return None
    value = op.reads[0]
    for step in steps:
        value = edit.moved(value, moves(step), like)
    return value
