"""Quotients by a smaller tensor: products with its reciprocal.

    x / r = x (1 / r)

A write gate is a factor of what is written; torchscale's retention divides the write by a running scale instead.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.patterns.canonical.rules import name_of


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Redefine every quotient of two floating tensors, the divisor of which is one number for many."""
    for node in graph.nodes:
        operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
        if name_of(node) not in ("div", "truediv") or node.kwargs or len(operands) != 2 or node in edit.fixed:
            continue
        with contextlib.suppress(CannotEdit):
            value, by = map(edit.value, operands)
            result = edit.value(node)
            if result.shape == value.shape != by.shape and value.dtype == by.dtype == result.dtype:
                inverse = edit.call(torch.reciprocal, by, like=node)
                edit.redefine(result, edit.call(torch.mul, value, inverse, like=node))
