"""Quotients by a smaller tensor: products with its reciprocal.

    x / r = x (1 / r)

A write gate is a factor of what is written; torchscale's retention divides the write by a running scale instead.
"""

from __future__ import annotations

import contextlib

import torch

from kdacompile.graph.edit import CannotEdit, Edit


def apply(edit: Edit) -> None:
    """Redefine every quotient of two floating tensors, the divisor of which is one number for many."""
    for op in tuple(edit.functional.ops):
        if op.name != "div" or op.kwargs or len(op.reads) != 2 or op.node is None or op.out.node in edit.fixed:
            continue
        value, by = op.reads
        if op.out.shape == value.shape != by.shape and value.dtype == by.dtype == op.out.dtype:
            with contextlib.suppress(CannotEdit):
                inverse = edit.call(torch.reciprocal, by, like=op.node)
                edit.redefine(op.out, edit.call(torch.mul, value, inverse, like=op.node))
