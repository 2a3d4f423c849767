"""One call for all pieces of a tensor in the place of one for each: how each kind of operator takes pieces that lie
along a dimension of their own in front.

Nothing here draws random numbers or writes: an operator takes part only if it works on each piece by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional as F

from kdacompile import compat
from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Op, Value, map_values
from kdacompile.patterns.engine.values import moves, root, segments
from kdacompile.patterns.engine.vocabulary import LAYOUT, REGION, VIEWS

ALONG = {"sum": 1, "mean": 1, "_softmax": 1, "_safe_softmax": 1, "linalg_vector_norm": 2}
"""Operators that work along the dimensions given as this argument."""

LAST = frozenset("native_layer_norm _fused_rms_norm".split())
"""Those that work along the last dimensions."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "native_layer_norm": F.layer_norm,
    "_fused_rms_norm": F.rms_norm,
    "log_sigmoid_forward": F.logsigmoid,
    "where": torch.where,
}
"""Operators with more results than one, or that take no numbers, as the functions they are the operators of."""

PRODUCTS = frozenset("mm addmm".split())

JOINS: Mapping[str, Callable[..., Any]] = {"cat": torch.cat, "stack": torch.stack}
"""Operators that put several pieces of one turn side by side."""

EXPONENTIALS = frozenset("exp exp2".split())


class Step(NamedTuple):
    """A call; the operator's own result, among its arguments, stands for that of the step before."""

    target: Any
    args: Any
    kwargs: Any


def function_of(op: Op) -> Callable[..., Any]:
    """What is called with the arguments of an operator and yields its first result alone."""
    return FUNCTIONS.get(op.name, op.target)


def is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in op.target.tags or op.name == "log_sigmoid_forward"


def is_activation(op: Op) -> bool:
    """What a region may not hold, whatever stands around it."""
    return op.name not in REGION or op.name in PRODUCTS


def is_offset(op: Op) -> bool:
    """``1 - x``, ``x + 1``: one tensor and a number, added. No region can tell ``x`` from a role of its own."""
    return op.name in ("add", "sub", "rsub") and len(op.reads) == 1 and len(op.args) > 1


def is_factor(op: Op) -> bool:
    """``2 * x``, ``x / 2``, ``-x``, ``x ** 2``, ``x * x``: of one tensor and a number, or of it and itself."""
    twice = op.name == "add" and len(op.reads) > 1
    return (twice or op.name in ("mul", "div", "neg", "pow", "square")) and set(op.reads) == {op.args[0]}


def is_projection(op: Op, pieces: Sequence[Value]) -> bool:
    """A row times what no loop makes: a matrix, or a weight for each element. Not what a gate is multiplied by."""
    others = [read for read in op.reads if read not in pieces]
    if op.name == "bmm" and others:
        return not any(read.const for read in others)
    if op.name != "mul" and (op.name != "div" or op.args[0] not in pieces):
        return False
    made = [root(piece).op for piece in pieces]
    weights = [read for read in others if not read.const and read.shape == op.out.shape[-len(read.shape) :]]
    gated = any(maker is not None and maker.name in EXPONENTIALS for maker in made)
    return len(pieces) == len(others) == len(weights) == 1 and not gated


def takes_apart(op: Op) -> bool:
    """A view that makes several dimensions of one: heads, of what a projection yields."""
    return any(len(after) > 1 for _, after in _runs(op))


def takes_together(op: Op) -> bool:
    """The other way round: heads, before a projection."""
    return any(len(before) > 1 for before, _ in _runs(op))


def _runs(op: Op) -> list[tuple[list[int], list[int]]]:
    return (segments(op.reads[0].shape, op.out.shape) or []) if op.name in VIEWS else []


def batched(op: Op, pieces: Sequence[Value]) -> list[Step] | None:
    """The calls for all pieces at once, which the first of each stands for; None if there are no such calls."""
    first, rank = pieces[0], max(len(each.shape) for each in pieces)
    alone = not any(value.users for value in op.outs[1:]) and not op.kwargs.get("device")
    if not alone or compat.is_random(op.target):
        return None
    if is_pointwise(op):
        fits = len(op.out.shape) == rank and all(len(read.shape) <= rank for read in op.reads)
        return [Step(function_of(op), op.args, op.kwargs)] if fits else None
    if op.name in PRODUCTS:
        return _projected(op, pieces)
    if op.name in JOINS:
        return _joined(op, pieces)
    if op.name == "bmm" and len(pieces) == 1 and rank == 3:
        return [Step(torch.matmul, op.args, {})]
    if len(pieces) != 1 or op.args[0] is not first:
        return None
    if op.name in LAYOUT:
        found = moves(op, front=1)
        if found is None:
            return None
        return [Step(name, (op.out if i else first, *args), {}) for i, (name, args) in enumerate(found)]
    if op.name == "select":  # one head of a token
        return [Step("select", (first, op.args[1] % rank - rank, op.args[2]), {})]
    if op.name in LAST:
        return [Step(function_of(op), op.args, {})]
    return _along(op, ALONG[op.name], rank) if op.name in ALONG else None


def _projected(op: Op, pieces: Sequence[Value]) -> list[Step] | None:
    """A product with one matrix for all pieces, and what is added to it."""
    *bias, left, right = op.args
    if list(pieces) != [left] or op.kwargs:
        return None
    product = Step(torch.matmul, (left, right), {})
    return [product, *(Step(torch.add, (op.out, term), {}) for term in bias)]


def _joined(op: Op, pieces: Sequence[Value]) -> list[Step] | None:
    """Several pieces of a turn side by side, as the halves that a rotation makes."""
    values, rank = op.args[0], len(op.out.shape)
    if set(values) != set(pieces):
        return None
    return [Step(JOINS[op.name], (values, (*op.args, 0)[1] % rank - rank), {})]


def _along(op: Op, place: int, rank: int) -> list[Step] | None:
    """A call along dimensions that are told: they count from the right."""
    dims = op.args[place] if len(op.args) > place else None
    target = op.target
    if dims is None and rank == 1 and op.name in ("sum", "mean"):  # of all there is
        dims, target = [-1], {"sum": torch.ops.aten.sum.dim_IntList, "mean": torch.ops.aten.mean.dim}[op.name]
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return None
    behind = dims % rank - rank if isinstance(dims, int) else [dim % rank - rank for dim in dims]
    return [Step(target, (*op.args[:place], behind, *op.args[place + 1 :]), op.kwargs)]


def made(
    edit: Edit,
    op: Op,
    whole: Mapping[Value, Value],
    like: fx.Node,
    same: Callable[[Value], Value | float] = lambda value: value,
) -> Value:
    """Make the calls of ``op`` for all pieces, which are ``whole`` for the first of each; ``same``: what stands for
    another operand.
    """
    known, rank = dict(whole), max(len(piece.shape) for piece in whole)
    for piece, value in whole.items():  # a piece of fewer dimensions is broadcast from the right
        for _ in range(rank - len(piece.shape)):
            value = edit.call("unsqueeze", value, 1, like=like)
        known[piece] = value
    steps = batched(op, list(whole))
    assert steps is not None
    for target, args, kwargs in steps:
        given, named = (map_values(tree, lambda v: known[v] if v in known else same(v)) for tree in (args, kwargs))
        known[op.out] = edit.call(target, *given, like=like, **named)
    return known[op.out if steps else op.reads[0]]
