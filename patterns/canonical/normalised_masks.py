"""Masks whose rows are divided by numbers: those divide the scores.

    A * (D / r)    becomes    (A * D) / r

RetNet divides the rows of its decays by the root of their sums. A factor per row is no decay, and leaves the product
(``row_factors``).
"""

from __future__ import annotations

import contextlib
import math

import torch

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.canonical.proof import FINITE, agrees
from kdacompile.patterns.engine.vocabulary import AS_IS, VIEWS


def apply(edit: Edit) -> None:
    """Redefine every product of scores with a mask that was divided."""
    for op in tuple(edit.functional.ops):
        if op.name != "mul" or op.kwargs or len(op.reads) != 2 or op.node is None or op.out.node in edit.fixed:
            continue
        for scores, mask in (op.reads, op.reads[::-1]):
            steps = _divided(mask)
            if steps and scores.shape == op.out.shape and not scores.const:
                with contextlib.suppress(CannotEdit):
                    _rewrite(edit, op, scores, steps)
                break


def _divided(mask: Value) -> list[Op]:
    """The division of a mask, and what lays its result out so that the last dimensions stay; nothing if it is none."""
    steps, op = list[Op](), mask.op
    while op is not None and op.reads and _stays(op):
        steps.insert(0, op)
        op = op.reads[0].op
    if op is None or op.name != "div" or op.kwargs or len(op.reads) != 2 or op.args != tuple(op.reads):
        return []
    whole, rows = (value.shape for value in op.reads)
    per_row = len(rows) > 1 and rows[-1] == 1 < whole[-1] and math.prod(rows) > 1
    return [op, *steps] if per_row and whole == op.out.shape else []


def _stays(op: Op) -> bool:
    old, new = op.reads[0].shape, op.out.shape
    if op.name == "_to_copy" or (op.name in AS_IS and old == new):
        return True
    more = len(new) - len(old)
    return (
        op.name in VIEWS | {"expand"}
        and more >= 0
        and new[more:] == old
        and (op.name == "expand" or math.prod(new[:more]) == 1)
    )


def _rewrite(edit: Edit, op: Op, scores: Value, steps: list[Op]) -> None:
    like = op.node
    whole, rows = steps[0].reads
    if whole.dtype != scores.dtype:
        whole = edit.call("to", whole, scores.dtype, like=like)
    product = edit.call(torch.mul, scores, whole, like=like)
    rows = edit.call("expand_as", rows, edit.call("narrow", product, -1, 0, 1, like=like), like=like)
    if rows.dtype != op.out.dtype:
        rows = edit.call("to", rows, op.out.dtype, like=like)
    new = edit.call(torch.div, product, rows, like=like)
    if agrees(edit, [(new, op.out)], {op, *steps}, FINITE):
        edit.redefine(op.out, new)
