"""A number to the power of a gate: a power of two.

    a ** x    becomes    exp2(x log2 a)    for a number a > 0

A half-life is written as ``0.5 ** (t / h)``. What stands in an exponent is a log gate, whatever the base.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.values import number


def apply(edit: Edit) -> None:
    """Redefine every power of one positive number to an exponent that inputs reach."""
    for op in tuple(edit.functional.ops):
        if op.name != "pow" or op.kwargs or op.node is None or op.out.const or op.out.node in edit.fixed:
            continue
        base, exponent = number(op.args[0]), op.args[-1]
        if base is None or not 0 < base < math.inf or op.reads[-1:] != [exponent] or exponent.dtype != op.out.dtype:
            continue
        with contextlib.suppress(CannotEdit):
            edit.redefine(op.out, _power(edit, exponent, math.log2(base), op.node))


def _power(edit: Edit, exponent: Value, rate: float, like: fx.Node) -> Value:
    """``2 ** (rate * exponent)``, where 16 bits round no more than the result."""
    exact, dtype = abs(rate) == 1.0, exponent.dtype
    if not exact and dtype.itemsize < torch.float32.itemsize:
        exponent = edit.call("to", exponent, torch.float32, like=like)
    if rate != 1.0:
        exponent = edit.call(*((torch.neg, exponent) if rate == -1.0 else (torch.mul, exponent, rate)), like=like)
    power = edit.call(torch.exp2, exponent, like=like)
    return power if power.dtype == dtype else edit.call("to", power, dtype, like=like)
