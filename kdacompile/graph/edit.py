"""New calls on values of a functional graph, and values that are defined by them: what canonical rules are written in.

The model's own graph is not touched. A new call is a node of a graph of its own, whose placeholders stand for nodes of
the model's. It is written down as ATen operators like any other node. Only the splice moves nodes from there into the
model's graph: those that a match reads, and those that compute results of the model from the match's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.graph import gradient
from kdacompile.graph.build import drop_unread, mark_uniform
from kdacompile.graph.ir import Graph, Op, Value, ancestors, map_values, walk_values
from kdacompile.graph.recorder import Recorder
from kdacompile.patterns.engine.values import Moves, moves
from kdacompile.patterns.engine.vocabulary import LAYOUT, MAKERS

Rule = Callable[["Edit"], None]


class CannotEdit(Exception):
    """A call does not take what it is given, or would read memory that the graph writes; nothing was changed."""


class NewCalls:
    """Calls that canonical rules have made on nodes of one model graph, whatever sizes it is read at."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.stand_ins: dict[fx.Node, fx.Node] = {}
        """Node of the model's graph -> the placeholder for it."""
        self.originals: dict[fx.Node, fx.Node] = {}
        self.known: dict[str, fx.Node] = {}

    def owns(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node.graph is self.graph

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: fx.Node) -> fx.Node:
        """The node of a call, whose arguments are nodes of either graph; the same call is made once."""
        given, named = (map_arg(tree, self.stand_in) for tree in (args, dict(kwargs)))
        text = f"{target} {given} {named}"
        if text not in self.known:
            op = "call_method" if isinstance(target, str) else "call_function"
            node = self.graph.create_node(op, target, given, named)  # type: ignore[arg-type]
            try:
                compat.propagate_fake(node, like)
            except compat.RUN_ERRORS as error:
                self.graph.erase_node(node)
                raise CannotEdit(str(error)) from error
            self.known[text] = node
        return self.known[text]

    def stand_in(self, node: fx.Node) -> fx.Node:
        if self.owns(node):
            return node
        if node not in self.stand_ins:
            new = self.graph.placeholder(node.name)
            new.meta = node.meta
            self.stand_ins[node], self.originals[new] = new, node
        return self.stand_ins[node]

    def sources(self, node: fx.Node, known: Collection[fx.Node] = ()) -> set[fx.Node]:
        """Nodes of the model's graph that a call is computed from, given those ``known``; itself for such a node."""
        if node in known:
            return set()
        if not self.owns(node):
            return {node}
        if node in self.originals:
            return {self.originals[node]}
        return {source for arg in node.all_input_nodes for source in self.sources(arg, known)}

    def copy_into(self, graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """``node`` in the model's graph, made at its insertion point with all that it needs; ``known`` grows."""
        if not self.owns(node):
            return node
        if node not in known and node in self.originals:
            return self.originals[node]
        if node not in known:
            made = {arg: self.copy_into(graph, arg, known) for arg in node.all_input_nodes}
            known[node] = graph.node_copy(node, made.__getitem__)
        return known[node]


class Edit:
    """Changes to one functional graph. ``finish`` puts it in order again."""

    def __init__(self, functional: Graph, calls: NewCalls) -> None:
        self.functional = functional
        self.calls = calls
        functional.calls = calls
        written = {mutation.storage for mutation in functional.mutations}
        self.fixed = {node for node, storage in functional.storages.items() if storage in written}
        """Nodes that share memory with something the graph writes: what they hold depends on when they are read."""
        self.recorder = Recorder(functional)
        self.recorder.values = max((value.index for op in functional.ops for value in op.outs), default=0)
        self.recorder.values += len(functional.inputs) + 1
        self.start = len(functional.ops), len(functional.mutations)
        self.tensors: dict[Value, torch.Tensor] = {}
        self.made: dict[fx.Node, Value] = {}
        self.unnamed: dict[Value, fx.Node] = {}
        """Calls for values that no node of the model's graph yields."""
        self.taken: dict[Value, Value] = {}
        """New values -> those of the model that are defined as them."""
        self.changed = False
        self.grad = torch.is_grad_enabled()
        self.apart = {op for op in functional.ops if op.grad != self.grad}
        """Operators whose grad mode is another than the graph begins with: what they make is not made anew, since new
        calls run in that one.
        """

    def call(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> Value:
        """The value of ``target(*args, **kwargs)``: a function, or a method by its name. ``like`` is the node whose
        line of code it stands for. ``CannotEdit`` if the call refuses its arguments.
        """
        read = list(walk_values((args, kwargs)))
        nodes = map_values((args, kwargs), lambda value: self.named(value, like))
        node = self.calls.call(target, nodes[0], nodes[1], like)
        if node not in self.made:
            self.made[node] = self.recorded(
                node, target, map_values(args, self.tensor), map_values(kwargs, self.tensor), read
            )
        return self.made[node]

    def moved(self, value: Value, found: Moves | None, like: fx.Node) -> Value:
        """A value rearranged by calls of methods; CannotEdit where there are none that do it."""
        if found is None:
            raise CannotEdit("not a rearrangement")
        for name, args in found:
            value = self.call(name, value, *args, like=like)
        return value

    def named(self, value: Value, like: fx.Node) -> fx.Node:
        """The node that yields a value: the model's, or new calls where it has none (a view within another call)."""
        if value.node in self.fixed:
            return self.last_write(value)
        if value.node is not None:
            return value.node
        if value not in self.unnamed:
            op = value.op
            if op is None or len(op.outs) > 1 or op.name in MAKERS or op.kwargs.get("device"):
                raise CannotEdit(f"{value} has no name in the model's graph")
            steps = moves(op) if op.name in LAYOUT else None
            args, kwargs = (map_values(tree, lambda read: self.named(read, like)) for tree in (op.args, op.kwargs))
            node = args[0] if steps is not None else self.calls.call(op.target, args, kwargs, like)
            for name, rest in steps or ():
                node = self.calls.call(name, (node, *rest), {}, like)
            self.unnamed[value] = node
        return self.unnamed[value]

    def last_write(self, value: Value) -> fx.Node:
        """The node of the last write to an input, which yields its final value: nothing overwrites that."""
        writes = {mutation.node for mutation in self.functional.mutations}
        names = [name for name, _ in self.functional.names[value] if name in writes]
        if value not in self.functional.written or not names:
            raise CannotEdit("a value is overwritten in the model's graph")
        return names[0]

    def recorded(self, node: fx.Node, target: Any, args: Any, kwargs: Any, read: list[Value]) -> Value:
        recorder, mark = self.recorder, self.recorder.mark()
        recorder.node = node
        recorder.position = max((value.op.position for value in read if value.op is not None), default=0)
        try:
            with torch.no_grad(), compat.no_fake_modes(), recorder:
                result = compat.called(target, args, kwargs)
        except compat.RUN_ERRORS as error:
            recorder.roll_back(mark)
            raise CannotEdit(str(error)) from error
        value = recorder.value_of(result)
        if value.node is not None:  # nothing was done: contiguous() of what is
            value = recorder.emit(torch.ops.aten.alias.default, (value,), {}, [(value.shape, value.dtype)])[0]
        value.node = node
        self.functional.names[value] = [(node, recorder.position)]
        self.tensors[value] = result
        return value

    def tensor(self, value: Value) -> torch.Tensor:
        """A tensor that stands for ``value`` while a call is recorded."""
        if value not in self.tensors:
            with compat.no_fake_modes():
                self.tensors[value] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self.recorder.track(self.tensors[value], value)
        return self.tensors[value]

    def redefine(self, old: Value, new: Value) -> None:
        """From here on ``old`` is what ``new`` is, the first time: several nodes may stand for it. What computed it is
        dropped, if nothing else reads that. ``CannotEdit``, and nothing is changed, where a gradient ends within.
        """
        self.redefine_all([(old, new)])

    def redefine_all(self, pairs: Collection[tuple[Value, Value]]) -> None:
        """The same for several, (old, new): all of them or none."""
        for old, new in pairs:
            if not gradient.is_wanted(new) and not gradient.is_wanted_by_some(old, self.functional.names):
                continue  # no gradient comes through either
            self.refuse_cuts(self.replaced(old, new), self.sources(new))
            if self.grad and gradient.is_wanted(old) and not gradient.is_wanted(new):
                raise CannotEdit("a gradient is cut in what would be read instead")
        for old, new in pairs:
            self.define(old, new)

    def define(self, old: Value, new: Value) -> None:
        if old in self.taken.values():
            return
        before = old.op
        if new in self.taken and before is not None:  # another value is that already: this one is a tensor of its own
            new = self.taken[new]
            while new in self.taken.values():  # and so are those that were made before it
                new = self.call(torch.clone, new, like=old.node or before.node)
        if self.apart and not self.apart.isdisjoint(self.replaced(old, new)):
            raise CannotEdit("the grad mode changes within what would be made anew")
        op = new.op
        if op is None or before is None or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise CannotEdit("a value cannot be defined as another one of other sizes")
        before.outs[before.outs.index(old)] = Value(new.index, old.shape, old.dtype, before)
        op.outs[op.outs.index(new)] = old
        old.op = op
        for user in new.users:
            user.args, user.kwargs = (
                map_values(tree, lambda v: old if v is new else v) for tree in (user.args, user.kwargs)
            )
            user.reads = [old if value is new else value for value in user.reads]
            old.users.append(user)
        del self.functional.names[new]
        self.made[op.node] = self.taken[new] = old
        self.changed = True

    def refuse_cuts(self, made: Collection[Op], sources: Iterable[Value] = ()) -> None:
        """``CannotEdit`` where a gradient ends in what these operators read or compute, or in what is read instead:
        ``detach`` is no more than a copy to who reads that, and ``detach_`` leaves no operator. Without gradients none
        ends, though parameters want one.
        """
        if not self.grad:
            return
        read, names = {value for op in made for value in op.reads}, self.functional.names
        if gradient.is_cut(made, read, names) or any(gradient.is_cut_in_place(x, names) for x in read.union(sources)):
            raise CannotEdit("a gradient is cut within what would be made anew")

    def replaced(self, old: Value, new: Value) -> set[Op]:
        """What made a value, from where the new calls in its place begin."""
        return ancestors([old], (self.sources(new) | {new}).__contains__)

    def sources(self, new: Value) -> set[Value]:
        """What is read of the graph as it was by the calls that make a value."""
        made = ancestors([new], lambda value: value.op is None or not self.calls.owns(value.op.node))
        return {read for op in made for read in op.reads if read.op not in made}

    def above(self, value: Value) -> set[Value]:
        """What ``value`` follows from."""
        return {read for op in ancestors([value], lambda _: False) for read in op.reads}

    def finish(self) -> None:
        """Operators in an order in which each comes after what it reads, values numbered by it; the graph as it was,
        if nothing was redefined.
        """
        graph = self.functional
        if not self.changed:
            self.recorder.roll_back(self.start)
            for value in self.made.values():
                graph.names.pop(value, None)
            return
        order: list[Op] = []
        done: set[Op] = set()
        entered: set[Op] = set()
        known = set(graph.ops)
        for last in graph.ops:
            stack = [last]
            while stack:
                op = stack[-1]
                waiting = [value.op for value in op.reads if value.op is not None and value.op not in done]
                if waiting and op not in done:
                    if op in entered:
                        raise ValueError(f"{op.out} is computed from itself")
                    entered.add(op)
                    stack += waiting
                    continue
                stack.pop()
                if op not in done:
                    done.add(op)
                    order.append(op)
                    if op not in known:  # nothing read it when the graph was made; a new call does
                        for value in op.reads:
                            value.users.append(op)
        graph.ops = order
        dead = graph.dead
        drop_unread(graph)
        graph.dead = dead  # nodes of the model's graph live on until a splice has put something in their place
        made = [value for op in graph.ops for value in op.outs]
        for index, value in enumerate([*graph.inputs, *made], 1):
            value.index = index
        mark_uniform(graph)


def apply(rules: Iterable[Rule], functional: Graph, calls: NewCalls) -> bool:
    """Apply rules to a functional graph; True if one changed it."""
    changed, before = False, functional.calls
    for rule in rules:
        edit = Edit(functional, calls)
        rule(edit)
        edit.finish()
        changed |= edit.changed
    functional.calls = calls if changed else before
    return changed
