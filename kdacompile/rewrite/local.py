"""DTensors in a graph: what each rank computes with its own tensors, where that takes no exchange between ranks.

A projection whose weight is sharded by heads, the cuts and rearrangements behind it, attention over those heads: on
every rank they are the same calls on its part. Where such a chain ends in ``to_local``, or in a call that does exchange
something, it is computed on the parts instead. Patterns then see plain tensors: the rank's rows of a weight, the
latent. What a call does to the parts is what DTensor itself does: it is made on example values, and the operators on
the tensors inside are written down (``compat.local``).

Gradients: along a dimension of the mesh that cuts the end of a chain, the ranks compute parts of one result. What they
all read has a gradient of which each rank has a summand, and ``to_local`` is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.compat import local
from kdacompile.graph import prefilter
from kdacompile.graph.ir import reach
from kdacompile.rewrite.recorded import Nodes

_LAYOUT = frozenset(
    "view reshape transpose permute expand expand_as unsqueeze squeeze flatten unflatten split chunk unbind getitem "
    "narrow contiguous repeat repeat_interleave".split()
)
_MIXES = frozenset("scaled_dot_product_attention softmax matmul __matmul__ bmm baddbmm einsum sum".split())
_FAR = 256
"""Calls above a result among which a product of activations is looked for."""


class _Exchanges(Exception):
    """A value that a rank cannot compute from parts, as far as is known."""


def localise(graph: fx.Graph) -> bool:
    """Rewrite the chains of a graph in place; True if there were some. Values, gradients and their placements stay."""
    touching = [node for node in graph.nodes if local.touches(node)]
    if not touching or compat.switches_modes(graph) or any(map(compat.writes_first_argument, touching)):
        return False
    return _Chains(graph).run(touching)


def open_weights(graph: fx.Graph) -> bool:
    """Have a quantised weight that expands a latent dequantised in the graph, in inference; True if there was one."""
    if torch.is_grad_enabled() or compat.switches_modes(graph):
        return False
    opened = [_open_weight(graph, node) for node in list(prefilter.expansions(graph)) if local.touches(node)]
    return any(opened)


def _open_weight(graph: fx.Graph, node: fx.Node) -> bool:
    coded = local.coded_product(node) if prefilter.name_of(node) == "linear" else None
    if coded is None:
        return False
    x, weight = node.all_input_nodes[:2]
    held = compat.example_value(weight)
    made: dict[int, fx.Node] = {}

    def put(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        compat.propagate_fake(new, node)
        return new

    def given(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return made[id(item)]
        return type(item)(map(given, item)) if isinstance(item, (list, tuple)) else item

    with graph.inserting_before(node):
        for name in held.__tensor_flatten__()[0]:
            if isinstance(getattr(held, name), torch.Tensor):
                made[id(getattr(held, name))] = put(getattr, (weight, name), {})
        for call in coded.calls:
            kwargs = {name: given(item) for name, item in call.kwargs.items()}
            made[id(call.result)] = put(call.target, given(call.args), kwargs)
        whole = made[id(coded.weight)]
        for factor in coded.factors:
            whole = put(torch.mul, (whole, made[id(factor)]), {})
        new = put(node.target, (x, put(torch.t, (whole,), {})), {})
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return True


def mixing(graph: fx.Graph) -> Iterator[fx.Node]:
    """Products and softmaxes of tensor subclasses, whose operators mean something else."""
    return (node for node in graph.nodes if prefilter.name_of(node) in _MIXES and local.touches(node))


def left_alone(graph: fx.Graph, *, attention: bool) -> fx.Node | None:
    """A product or a softmax of tensor subclasses, whose operators mean something else; in a graph with attention one
    that may expand a latent, too (quantised weights). None if there is none.
    """
    expanding = prefilter.expansions(graph) if attention else iter(())
    return next(chain(mixing(graph), filter(local.touches, expanding)), None)


class _Chains:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.parts: dict[tuple[fx.Node, local.Mesh], fx.Node] = {}
        """What yields this rank's part of a DTensor, by the cut of the chain it is in."""
        self.traces: dict[fx.Node, local.Trace | None] = {}
        self.nodes: set[fx.Node] = set()
        """All that were put in."""

    def run(self, touching: Sequence[fx.Node]) -> bool:
        changed = False
        for node in touching:
            if local.is_to_local(node):
                changed |= self.end(node, node.all_input_nodes[0], list(node.users), lambda part: part)
            elif _mixes(node) and (users := [user for user in node.users if not self.follows(user)]):
                changed |= self.end(node, node, users, lambda part, node=node: self.wrapped(part, node))
        for node in reversed([*touching, *self.nodes]):
            if not node.users:
                self.graph.erase_node(node)
        return changed

    def follows(self, user: fx.Node) -> bool:
        """True for a reader that a chain goes on through or ends at; any other needs the DTensor."""
        return user in self.nodes or local.is_to_local(user) or self.trace(user) is not None

    def end(self, node: fx.Node, value: fx.Node, users: list[fx.Node], instead: Callable[[fx.Node], fx.Node]) -> bool:
        """Give ``users`` of ``node`` what ``instead`` makes of this rank's part of ``value``."""
        cut = local.cuts(compat.example_value(value))
        if cut is None or self.trace(value) is None:
            return False
        try:
            part = self.part(value, cut)
            if part.target == "to_local":
                return False
            made = instead(part)
        except _Exchanges:
            return False
        for user in users:
            user.replace_input_with(node, made)
        return True

    def wrapped(self, part: fx.Node, node: fx.Node) -> fx.Node:
        """The DTensor of which this is the rank's part."""
        value = compat.example_value(node)
        begun = (each for (each, _), made in self.parts.items() if made.target == "to_local")
        like = next((each for each in begun if compat.example_value(each).device_mesh == value.device_mesh), None)
        if like is None or compat.free_symbols(value):
            raise _Exchanges
        args = (part, like, local.placements(value), tuple(value.shape), tuple(value.stride()))
        return self.put("call_function", local.distributed_like, args, {}, node)

    def part(self, node: fx.Node, cut: local.Mesh) -> fx.Node:
        """The node that yields this rank's part of what ``node`` yields, computed from parts as far up as that goes."""
        key = node, cut
        if key not in self.parts:
            trace = self.trace(node) if _may_look_into(node, cut) else None
            try:
                self.parts[key] = self.begin(node, cut) if trace is None else self.same(node, cut, trace)
            except _Exchanges:
                self.parts[key] = self.begin(node, cut)
        return self.parts[key]

    def begin(self, node: fx.Node, cut: local.Mesh) -> fx.Node:
        """Where a chain begins: a parameter, a DTensor made of a plain tensor, a result of an exchange."""
        value = compat.example_value(node)
        own = local.cuts(value) if local.is_distributed(value) else None
        if own is None or not own <= cut:
            raise _Exchanges
        grads = local.gradient_placements(value, cut)
        given = {"grad_placements": grads} if value.requires_grad and grads != local.placements(value) else {}
        return self.put("call_method", "to_local", (node,), given, node)

    def same(self, node: fx.Node, cut: local.Mesh, trace: local.Trace) -> fx.Node:
        """What ``node`` does, on parts: the same call if that comes to the same operators, else those operators."""
        wrapped = [each for each in node.all_input_nodes if local.is_wrapped(compat.example_value(each))]
        parts = {each: self.part(each, cut) for each in wrapped}
        if not trace.alike:
            return self.operators(node, trace, parts)
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: parts.get(each, each))
        return self.put(node.op, node.target, cast("Any", args), cast("Any", kwargs), node)

    def operators(self, node: fx.Node, trace: local.Trace, parts: dict[fx.Node, fx.Node]) -> fx.Node:
        nodes = Nodes(
            lambda target, args, kwargs, like, _: self.put("call_function", target, args, kwargs, like),
            lambda size: _number(size, node),
        )
        for each in node.all_input_nodes:
            value = compat.example_value(each)
            nodes.made[id(local.inside(value) if each in parts else value)] = parts.get(each, each)
        for call in trace.calls:
            if call.passes_on:
                nodes.made[id(call.result)] = nodes.made[id(call.args[0])]
            else:
                nodes.write(call, node)
        return nodes.made[id(trace.result)]

    def put(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        """A node behind ``like``, which stands for something of it."""
        place = like.next
        while place.op == "placeholder" or place in self.nodes:
            place = place.next
        with self.graph.inserting_before(place):
            new = self.graph.create_node(op, target, args, kwargs)
        compat.propagate_fake(new, like)
        self.nodes.add(new)
        return new

    def trace(self, node: fx.Node) -> local.Trace | None:
        """What a call on DTensors does to the tensors inside; None if it is none, or ranks exchange something."""
        if node not in self.traces:
            given = [compat.example_value(each) for each in node.all_input_nodes]
            own = local.is_wrapped(compat.example_value(node)) and any(map(local.is_wrapped, given))
            self.traces[node] = local.trace(node) if own and local.touches(node) else None
        return self.traces[node]


def _may_look_into(node: fx.Node, cut: local.Mesh) -> bool:
    """What all ranks hold is looked into for its layout only: their gradients are summed where it is made."""
    own = local.cuts(compat.example_value(node))
    return own is not None and own <= cut and (bool(own) or not cut or prefilter.name_of(node) in _LAYOUT)


def _number(size: torch.SymInt, node: fx.Node) -> fx.Node:
    """The argument of a call that is this number."""
    for each in node.all_input_nodes:
        if isinstance(value := compat.example_value(each), torch.SymInt) and str(value) == str(size):
            return each
    raise _Exchanges


def _mixes(node: fx.Node) -> bool:
    """True for a DTensor that a product of activations, as attention has them, stands above."""
    if not local.is_distributed(compat.example_value(node)):
        return False
    above = reach([node], lambda each: filter(local.touches, each.all_input_nodes), _FAR)
    return local.touches(node) and any(prefilter.name_of(each) in _MIXES for each in above)
