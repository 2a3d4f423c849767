"""Low-rank adapters beside a projection (LoRA), and a layer for each head: one projection with one weight.

    x W^T + s ((x A^T) B^T) = x (W + s B A)^T
    stack(x W_1^T, .., x W_H^T) = x [W_1; ..; W_H]^T

MLA's weights move from the keys to the queries only if the latent passes through one product. The weights are added in
float32 at least and rounded once, to the dtype of W.
"""

from __future__ import annotations

import contextlib

import torch

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import is_weight, root
from kdacompile.patterns.engine.vocabulary import TURNS, VIEWS

Projected = tuple[Value, Value, list[Value]]
"""What is projected, with which weight, and a bias."""


def apply(edit: Edit) -> None:
    """Redefine every sum of a projection and an adapter, several of which may be added one after the other, and every
    stack of projections of one value.
    """
    made: dict[Value, Projected] = {}
    for op in tuple(edit.functional.ops):
        if op.name == "stack" and op.node is not None and op.out.node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _put_together(edit, op, made)
        if op.name == "add" and len(op.reads) == 2 and not op.kwargs and op.out.node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, op, made)


def _rewrite(edit: Edit, op: Op, made: dict[Value, Projected]) -> None:
    for one, other in (op.reads, op.reads[::-1]):
        base, added = made.get(one) or _projection(one), _adapter(other)
        if base is None or added is None or base[0] is not added[0]:
            continue
        source, weight, bias = base
        _, down, up, factor = added
        wide = torch.promote_types(weight.dtype, torch.float32)
        low, high, own = (edit.call("to", value, wide, like=op.node) for value in (down, up, weight))
        low = edit.call(torch.mul, edit.call(torch.matmul, high, low, like=op.node), factor, like=op.node)
        total = edit.call("to", edit.call(torch.add, own, low, like=op.node), weight.dtype, like=op.node)
        made[op.out] = source, total, bias
        edit.redefine(op.out, edit.call(torch.nn.functional.linear, source, total, *bias, like=op.node))
        return


def _put_together(edit: Edit, op: Op, made: dict[Value, Projected]) -> None:
    """Heads that are projected one by one."""
    found = [made.get(value) or _projection(value) for value in op.args[0]]
    heads = [each for each in found if each is not None and not each[2]]
    alike = {(source, weight.shape, weight.dtype) for source, weight, _ in heads}
    if len(heads) < len(found) or len(heads) < 2 or len(alike) > 1:
        return
    weight = edit.call(torch.cat, [weight for _, weight, _ in heads], 0, like=op.node)
    whole = edit.call(torch.nn.functional.linear, heads[0][0], weight, like=op.node)
    apart = edit.call("unflatten", whole, -1, (len(heads), -1), like=op.node)
    edit.redefine(op.out, edit.call("movedim", apart, -2, (*op.args, 0)[1], like=op.node))


def _projection(value: Value) -> Projected | None:
    """The operands of a product with a weight."""
    op = root(value, VIEWS).op
    if op is None or op.name not in ("mm", "addmm") or op.kwargs:
        return None
    *bias, left, right = op.args
    turned = right.op
    if turned is None or turned.name not in TURNS or not is_weight(root(turned.reads[0])):
        return None
    source = root(left, VIEWS, until=lambda v: v.node is not None and v.shape[:-1] == value.shape[:-1])
    return (source, turned.reads[0], bias) if source.shape[:-1] == value.shape[:-1] else None


def _adapter(value: Value) -> tuple[Value, Value, Value, float] | None:
    """What is projected twice, the two weights, and the number by which the result is multiplied."""
    factor = 1.0
    while value.op is not None and value.op.name == "mul" and len(value.op.reads) == 1:
        number = next((arg for arg in value.op.args if isinstance(arg, (int, float))), None)
        if number is None:
            return None
        factor, value = factor * number, value.op.reads[0]
    up = _projection(value)
    down = _projection(up[0]) if up else None
    return None if up is None or down is None or up[2] or down[2] else (down[0], down[1], up[1], factor)
