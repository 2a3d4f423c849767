"""Running a function on stand-ins and rewriting what it does: the same pass as for a whole model's graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.capture import autocast
from kdacompile.capture.calls import Call, Sizes
from kdacompile.capture.errors import Unliftable
from kdacompile.compat.operators import declaration, is_operator, trace_fake, tree_leaves
from kdacompile.graph.ir import Op
from kdacompile.graph.laws import NotAffine
from kdacompile.graph.positions import edges_of_constants
from kdacompile.report.findings import Match
from kdacompile.search.compiler_pass import rewrite_function
from kdacompile.settings import Settings


@dataclass(frozen=True)
class Layout:
    """How a result lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the outermost to the innermost; those that repeat one entry are left out."""
        ranked = sorted(range(len(self.strides)), key=lambda dim: -self.strides[dim])
        return tuple(dim for dim in ranked if self.strides[dim])


@dataclass(frozen=True)
class Captured:
    """A rewritten function at one batch and length."""

    sizes: Sizes
    graph: fx.Graph
    matches: tuple[Match, ...]
    """One for each op in the graph, in its order."""
    layouts: tuple[Layout | None, ...]
    """Of the results, in order; None for what is no tensor."""
    constants: tuple[Op, ...]
    """The operators that no argument reaches, as the function has them."""
    readings: tuple[object, ...] = ()
    """How its regions were read."""


def bound(fn: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """``fn`` as a function of the call's tensors alone."""

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = call.bind(tensors)
        return fn(*args, **kwargs)

    return run


def capture(
    fn: types.FunctionType, call: Call, sizes: Sizes, settings: Settings, before: Iterable[Captured] = ()
) -> Captured:
    """The function's graph at ``sizes`` with every proven region replaced by its op. ``before``: at other sizes.

    Raises ``Unliftable`` if nothing is proven, and what the function itself raises.
    """
    tensors = [tensor for _, tensor in call.tensors()]
    with autocast.widening(call.autocast):
        gm = trace_fake(bound(fn, call), [(x.shape(sizes), x.strides(sizes), x.dtype, x.device) for x in tensors])
    layouts = tuple(map(_layout, tree_leaves(gm.graph.output_node().args[0])))
    likely = [reading for each in before for reading in each.readings]
    report, constants, readings = rewrite_function(gm.graph, settings, likely)
    if not report.matches:
        reasons = {rejection.reason for rejection in report.rejections}
        raise Unliftable("; ".join(sorted(reasons)) or "there is no linear attention in it")
    drop_dead_writes(gm.graph)
    _check_outputs(gm.graph)
    ops = [node.meta for node in gm.graph.nodes if compat.is_own_op(node)]
    matches = [meta.get(compat.REPORTED, report.matches[0]) for meta in ops]
    return Captured(sizes, gm.graph, tuple(matches) or report.matches, layouts, constants, readings)


def turning_lengths(captured: Sequence[Captured]) -> set[int]:
    """Lengths around which a constant of the function turns; raises ``Unliftable`` for one that is not affine in
    positions.
    """
    found: set[int] = set()
    one, other = captured[-1], captured[0]
    try:
        edges = edges_of_constants(one.constants, other.constants)
    except NotAffine as error:
        raise Unliftable(str(error)) from None
    for edge in edges:
        length = edge.turns_at(one.sizes["T"])
        found |= set() if length is None else {length - 1, length, length + 1, 2 * length}
    return found


def _layout(result: Any) -> Layout | None:
    value = compat.example_value(result) if isinstance(result, fx.Node) else None
    return Layout(tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else None


def _check_outputs(graph: fx.Graph) -> None:
    if not graph.output_node().all_input_nodes:
        raise Unliftable("it returns no tensor")


# -- writes that nobody reads any more --------------------------------------------------------------------------------
# To buffers of a function's own, once what they were for is an op.


def drop_dead_writes(graph: fx.Graph) -> None:
    """Remove such writes, then everything dead. The graph is ATen: schemas say what aliases and what is written."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = aliased(node)
        roots[node] = node if source is None else roots[source]
    for root in set(roots.values()):
        family = {node for node, own in roots.items() if own is root}
        writers = {node for node in family if node is not root and _written(node) in family}
        readers = {user for node in family for user in node.users} - family
        if root.op == "call_function" and writers and not readers:
            for node in reversed([node for node in graph.nodes if node in family]):
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _written(node: fx.Node) -> fx.Node | None:
    """The argument an operator writes in place."""
    target = node.target
    if not is_operator(target) or not declaration(target).is_mutable or not node.args:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result is, or may be."""
    if node.op == "call_method":
        return node.all_input_nodes[0] if node.all_input_nodes else None
    target = node.target
    if not is_operator(target):
        return None
    if _written(node) is not None:
        return _written(node)
    returns = declaration(target).returns
    aliases = any(item.alias_info is not None for item in returns) and bool(node.args)
    return node.args[0] if aliases and isinstance(node.args[0], fx.Node) else None
