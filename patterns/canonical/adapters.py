"""Low-rank adapters beside a projection (LoRA): one projection with the sum of the weights.

    x W^T + s ((x A^T) B^T) = x (W + s B A)^T

MLA's weights move from the keys to the queries only if the latent passes through one product. The weights are added in
float32 at least and rounded once, to the dtype of W.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Value
from kdacompile.patterns.canonical.rules import name_of
from kdacompile.patterns.engine.values import is_weight, root

Projected = tuple[fx.Node, Value, list[fx.Node]]
"""What is projected, with which weight, and what else the call is given: a bias."""


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Redefine every sum of a projection and an adapter; several adapters may be added one after the other."""
    made: dict[fx.Node, Projected] = {}
    for node in graph.nodes:
        if name_of(node) == "add" and len(node.args) == 2 and not node.kwargs and node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, node, made)


def _rewrite(edit: Edit, node: fx.Node, made: dict[fx.Node, Projected]) -> None:
    for one, other in (node.args, node.args[::-1]):
        base = isinstance(one, fx.Node) and (made.get(one) or _projection(edit, one))
        added = isinstance(other, fx.Node) and _adapter(edit, other)
        if not base or not added or base[0] is not added[0]:
            continue
        source, weight, bias = base
        _, down, up, factor = added
        wide = torch.promote_types(weight.dtype, torch.float32)
        low, high, own = (edit.call("to", value, wide, like=node) for value in (down, up, weight))
        low = edit.call(torch.mul, edit.call(torch.matmul, high, low, like=node), factor, like=node)
        total = edit.call("to", edit.call(torch.add, own, low, like=node), weight.dtype, like=node)
        given = [edit.value(source), total, *map(edit.value, bias)]
        edit.redefine(edit.value(node), edit.call(torch.nn.functional.linear, *given, like=node))
        made[node] = source, total, bias
        return


def _projection(edit: Edit, node: fx.Node) -> Projected | None:
    """The operands of a product with a weight: what is projected, the weight, a bias."""
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if name_of(node) != "linear" or node.kwargs or len(operands) != sum(arg is not None for arg in node.args):
        return None
    weight = edit.value(operands[1])
    return (operands[0], weight, operands[2:]) if is_weight(root(weight)) else None


def _adapter(edit: Edit, node: fx.Node) -> tuple[fx.Node, Value, Value, float] | None:
    """What is projected twice, the two weights, and the number by which the result is multiplied."""
    factor = 1.0
    while name_of(node) == "mul" and not node.kwargs and len(node.all_input_nodes) == 1:
        number = next((arg for arg in node.args if isinstance(arg, (int, float))), None)
        if number is None:
            return None
        factor, node = factor * number, node.all_input_nodes[0]
    up = _projection(edit, node)
    down = _projection(edit, up[0]) if up else None
    return None if up is None or down is None or up[2] or down[2] else (down[0], down[1], up[1], factor)
