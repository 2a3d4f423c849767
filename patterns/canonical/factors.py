"""A normaliser within an einsum of three operands: the factor per row after the product.

    einsum("nd,dm,n->nm", q, S, z) = einsum("nd,dm->nm", q, S) z[:, None],    z = 1 / ...

An operand without a summed index commutes with the sum. Only what was divided is taken out: in front of the product it
would be part of the region, and no role of the recurrence.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Value
from kdacompile.patterns.canonical.rules import name_of
from kdacompile.patterns.engine.values import root

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What an ellipsis stands for."""


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Take every normaliser out of the einsum it is an operand of."""
    for node in graph.nodes:
        if name_of(node) == "einsum" and node not in edit.fixed:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, node)


def _rewrite(edit: Edit, node: fx.Node) -> None:
    found = _operands(node)
    if found is None:
        return
    pairs, result = found
    values = [(subscripts, edit.value(operand)) for subscripts, operand in pairs]
    rows = [pair for pair in values if set(pair[0]) < set(result) and _is_divided(pair[1])]
    rest = [pair for pair in values if pair not in rows]
    if len(rows) != 1 or len(rest) < 2 or set(result) - set("".join(subscripts for subscripts, _ in rest)):
        return
    equation = ",".join(subscripts for subscripts, _ in rest) + "->" + result
    product = edit.call(torch.einsum, equation, *(value for _, value in rest), like=node)
    subscripts, factor = rows[0]
    factor = edit.call(
        "permute", factor, *sorted(range(len(subscripts)), key=lambda i: result.index(subscripts[i])), like=node
    )
    for place, letter in enumerate(result):
        if letter not in subscripts:
            factor = edit.call("unsqueeze", factor, place, like=node)
    edit.redefine(edit.value(node), edit.call(torch.mul, product, factor, like=node))


def _operands(node: fx.Node) -> tuple[list[tuple[str, fx.Node]], str] | None:
    """Operands of an einsum with their subscripts, and the subscripts of its result."""
    equation, operands = node.args[0] if node.args else None, list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
    if not isinstance(equation, str) or "->" not in equation or len(nodes) < max(3, len(operands)):
        return None
    read, result = equation.replace(" ", "").split("->")
    subscripts = read.split(",")
    ranks = [compat.example_value(each).dim() - len(text) + 3 for each, text in zip(nodes, subscripts, strict=True)]
    if "..." in equation:
        if any("..." not in text for text in subscripts) or len(set(ranks)) > 1:
            return None
        subscripts, result = (
            [text.replace("...", LETTERS[: ranks[0]]) for text in subscripts],
            result.replace("...", LETTERS[: ranks[0]]),
        )
    if any(len(set(text)) < len(text) for text in (*subscripts, result)):
        return None
    return list(zip(subscripts, nodes, strict=True)), result


def _is_divided(value: Value) -> bool:
    """True for a rearrangement of a quotient."""
    op = root(value).op
    while op is not None and op.name == "mul" and sum(not read.const for read in op.reads) == 1:
        op = next(read for read in op.reads if not read.const).op
    return op is not None and op.name in ("reciprocal", "div")
