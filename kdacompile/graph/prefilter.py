"""A cheap test of the operators a graph has, before anything is built from it: most graphs are Inductor's alone."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import local
from kdacompile.graph.ir import reach
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS

_PRODUCTS = (CONTRACTIONS - {"addmm"}) | frozenset(  # a projection with its bias is one of a weight
    "matmul __matmul__ linalg_matmul baddbmm_ einsum sum inner tensordot linalg_vecdot linalg_multi_dot".split()
)
_OUTER = frozenset("mul __mul__ multiply imul addcmul addcmul_".split())
_ALWAYS_OUTER = frozenset("outer ger".split())

_ATTENTION = frozenset({"scaled_dot_product_attention"})
_SOFTMAX = frozenset({"softmax", "_softmax"})
_EXPONENTIALS = frozenset({"exp"})
_QUOTIENTS = frozenset(  # what makes a softmax of exponentials
    "div div_ divide divide_ true_divide true_divide_ truediv itruediv __truediv__ __itruediv__ reciprocal reciprocal_ "
    "pow pow_ __pow__ rsqrt log logsumexp log_softmax _log_softmax normalize".split()
)
_MATRIX_PRODUCTS = frozenset("matmul __matmul__ bmm baddbmm einsum mm mul sum".split())

_PROJECTIONS = frozenset({"linear", "matmul", "__matmul__", "einsum"})
_SUMS = frozenset("add __add__ iadd".split())
_MIXES = _ATTENTION | _SOFTMAX | _EXPONENTIALS | frozenset({"embedding"})
_FAR = 32
"""Operators between two projections, as a norm, a cut and a cache take them."""

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


class Prospects(NamedTuple):
    """What there may be in a graph to rewrite, or to say something about."""

    recurrence: bool
    attention: bool
    ops: bool
    """Ops of ours that are there already: lifted functions, or calls of ``kdacompile.ops``."""
    subclasses: bool
    """Calls on tensor subclasses."""
    owned: bool
    """Inputs that a module owns."""
    grows: bool
    """Results that are concatenations, as caches are."""

    @property
    def anything(self) -> bool:
        return self.recurrence or self.attention or self.ops


def prospects(graph: fx.Graph) -> Prospects:
    """What a graph has; where there is nothing to rewrite, the rest is not looked for."""
    found = may_have_recurrence(graph), may_have_attention(graph), any(map(compat.is_own_op, graph.nodes))
    if not any(found):
        return Prospects(*found, subclasses=False, owned=False, grows=False)
    return Prospects(
        *found,
        subclasses=any(map(local.touches, graph.nodes)),
        owned=any(map(compat.owner, graph.find_nodes(op="placeholder"))),
        grows=any(True for _ in concatenated(graph)),
    )


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
    names = Counter(name for _, name in _calls(graph))

    def count(some: Iterable[str]) -> int:
        return sum(names[name] for name in some)

    softmax = count(_SOFTMAX) or (count(_EXPONENTIALS) and count(_QUOTIENTS))
    return bool(count(_ATTENTION) or (softmax and count(_MATRIX_PRODUCTS) > 1))


def concatenated(graph: fx.Graph) -> Iterator[fx.Node]:
    """Results of the graph that are concatenations."""
    for node in graph.output_node().all_input_nodes:
        if node.op == "call_function" and node.target in CONCATENATIONS:
            yield node


def heads_and_queries(graph: fx.Graph) -> Iterator[int]:
    """How many heads and queries attention in this graph is computed for, where captured as numbers; none are one."""
    for node, name in _calls(graph):
        if name in _ATTENTION | _SOFTMAX | _EXPONENTIALS:
            value = compat.example_value(node.all_input_nodes[0] if name in _ATTENTION else node)
            sizes: tuple[Any, ...] = tuple(value.shape)[1:-1]
            yield from (size for size in sizes if isinstance(size, int) and size > 1)


def last_rows(graph: fx.Graph) -> Iterator[int]:
    """How many of the last rows the graph keeps of a tensor (more than one), as of those that logits are wanted for."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        index = node.args[1]
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, slice) and isinstance(part.start, int) and part.start < -1 and part.stop is None:
                yield -part.start


def may_expand_a_latent(graph: fx.Graph) -> bool:
    """True if there is a product that may be the one that makes keys or values of a latent."""
    return any(True for _ in expansions(graph))


def expansions(graph: fx.Graph) -> Iterator[fx.Node]:
    """A weight widens what another weight has yielded, with nothing added in between, or what the caller gives."""
    names = dict(_calls(graph))
    projections = {node: found for node, name in names.items() if (found := _projection(node, name)) is not None}
    for node, (latent, weight) in projections.items():
        width = compat.example_value(latent).shape[-1]
        if compat.example_value(weight).numel() > width * width and _is_projected(latent, names, projections):
            yield node


def _projection(node: fx.Node, name: str) -> tuple[fx.Node, fx.Node] | None:
    """Activation and weight of a product with one weight."""
    given = node.all_input_nodes[:2]
    if name not in _PROJECTIONS or len(given) != 2:
        return None
    if name == "linear" or _is_weight(given[1]):
        return given[0], given[1]
    return (given[1], given[0]) if _is_weight(given[0]) else None


def _is_weight(node: fx.Node) -> bool:
    node = _source(node)
    return node.op == "get_attr" or (node.op == "placeholder" and compat.owner(node) != "")


def _source(node: fx.Node) -> fx.Node:
    """What a chain of operators on one tensor begins with."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _is_projected(latent: fx.Node, names: Mapping[fx.Node, str], projections: Collection[fx.Node]) -> bool:
    if _source(latent).op == "placeholder":
        return not _is_weight(latent)

    def onward(node: fx.Node) -> list[fx.Node]:
        activations = [each for each in node.all_input_nodes if not _is_weight(each)]
        name = names.get(node, "")
        return [] if name in _MIXES or (name in _SUMS and len(activations) > 1) else activations

    return any(node in projections for node in reach([latent], onward, _FAR))


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            yield node, name_of(node)


def name_of(node: fx.Node) -> str:
    """The function or method that a node calls."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0]


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
