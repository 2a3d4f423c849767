"""A cheap test of the operators a graph has, before anything is built from it: most graphs are Inductor's alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from kdacompile import compat

_PRODUCTS = frozenset(
    "matmul __matmul__ linalg_matmul bmm baddbmm baddbmm_ einsum mm sum mv dot vdot inner tensordot linalg_vecdot "
    "linalg_multi_dot".split()
)
_OUTER = frozenset("mul __mul__ multiply imul addcmul addcmul_".split())
_ALWAYS_OUTER = frozenset("outer ger".split())

_ATTENTION = frozenset({"scaled_dot_product_attention"})
_SOFTMAX = frozenset({"softmax", "_softmax", "exp"})
_MATRIX_PRODUCTS = frozenset("matmul __matmul__ bmm baddbmm einsum mm mul sum".split())


def may_have_recurrence(graph: fx.Graph) -> bool:
    """Linear attention has at least two products of activations, one of them summed."""
    found = summed = 0
    for node, name in _calls(graph):
        if name in _PRODUCTS:
            summed += 1
            found += 1 if name != "einsum" else len(node.all_input_nodes) - 1
        elif name in _ALWAYS_OUTER or (name in _OUTER and found < 2 and _spreads(node)):
            found += 1
        if found > 1 and summed:
            return True
    return False


def may_have_attention(graph: fx.Graph) -> bool:
    """MLA is a softmax between two products, or scaled_dot_product_attention."""
    products = softmax = 0
    for _, name in _calls(graph):
        if name in _ATTENTION:
            return True
        softmax += name in _SOFTMAX
        products += name in _MATRIX_PRODUCTS
        if softmax and products > 1:
            return True
    return False


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            target = node.target
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            yield node, name.split(".")[0]


def _spreads(node: fx.Node) -> bool:
    """True for products larger than both factors (outer products)."""
    values = [compat.example_value(arg) for arg in node.all_input_nodes]
    if len(values) == 3:  # addcmul: what the product is added to
        values = values[1:]
    out = compat.example_value(node)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) != 2 or not isinstance(out, torch.Tensor) or out.dim() < 3:
        return False
    return all(_grows(factor, out) for factor in tensors)


def _grows(factor: torch.Tensor, out: torch.Tensor) -> bool:
    """True if ``factor`` is broadcast: it lacks a dimension of ``out`` or has it with size one."""
    padded = (1,) * (out.dim() - factor.dim()) + tuple(factor.shape)
    return any(compat.is_one(a) and not compat.is_one(b) for a, b in zip(padded, out.shape, strict=True))
