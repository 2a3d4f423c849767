"""The shadow: a functional ATen copy of a Dynamo graph, made to be matched on.

The Dynamo graph is replayed on meta tensors and every ATen operator is written down. Views and in-place writes are
resolved on the way, so the copy is pure single assignment: a write through a view becomes ``select_scatter`` and the
like, and later reads see the new value. Nothing is computed, and the Dynamo graph itself stays untouched.

Symbolic sizes are replaced by their hints: the shadow is one concrete instance. What holds for other sizes is the
proof's business (it asks for several instances).
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from kdacompile import compat
from kdacompile.patterns.ir import Graph, Mutation, Op, Value, map_values, walk_values
from kdacompile.patterns.uniform import mark_uniform
from kdacompile.patterns.vocabulary import LAYOUT, MAKERS

log = logging.getLogger(__name__)
aten = torch.ops.aten

# Replaying a node on meta tensors can fail in these ways (no meta kernel, data-dependent, symbolic without a hint); the
# node then counts as opaque, which only ever means "do not look inside".
REPLAY_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError, KeyError)

SizeOf = Callable[[Any], int]


class _Storage:
    """A buffer of the replay: its current value, and how often it was written."""

    __slots__ = ("base", "generation", "index", "node", "source")

    def __init__(self, index: int, base: Value, source: Any) -> None:
        self.index = index
        self.base = base
        self.generation = 0
        self.source = source
        self.node: Any = source  # the Dynamo node that yields the buffer whole


class _Alias:
    """A tensor of the replay: a chain of views over a storage, with the value last computed for it."""

    __slots__ = ("chain", "generation", "storage", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, storage: _Storage, chain: tuple[Any, ...], value: Value) -> None:
        self.tensor = tensor
        self.storage = storage
        self.chain = chain
        self.value = value
        self.generation = storage.generation


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.aliases: dict[int, _Alias] = {}
        self.storages: list[_Storage] = []
        self.node: Any = None
        self.position = 0
        self.grad = torch.is_grad_enabled()
        self.values = 0
        self.generations = 0
        self.undo: list[tuple[_Storage, Value, int]] = []

    # -- values -------------------------------------------------------------------------------------------------
    def new_value(self, tensor: torch.Tensor, op: Op | None = None) -> Value:
        self.values += 1
        return Value(self.values, tuple(tensor.shape), tensor.dtype, op)

    def track(self, tensor: torch.Tensor, value: Value, source: Any = None) -> None:
        storage = _Storage(len(self.storages), value, source)
        self.storages.append(storage)
        self.aliases[id(tensor)] = _Alias(tensor, storage, (), value)

    def add_input(self, tensor: torch.Tensor, node: Any, *, param: bool = False) -> Value:
        value = self.new_value(tensor)
        value.node, value.param = node, param
        self.graph.inputs.append(value)
        self.track(tensor, value, node)
        return value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value ``tensor`` holds now; views of a buffer written since are taken again."""
        alias = self.aliases.get(id(tensor))
        if alias is None:  # a real tensor the graph carries: a constant
            value = self.new_value(tensor)
            value.const, value.payload = True, tensor
            self.track(tensor, value)
            return value
        if alias.generation != alias.storage.generation:
            value = alias.storage.base
            reader, self.node = self.node, None  # whoever happens to read first does not own the views
            for target, args, kwargs, shape in alias.chain:
                value = self.emit(target, (value, *args), kwargs, [shape])[0]
            self.node = reader
            alias.value, alias.generation = value, alias.storage.generation
        return alias.value

    def emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Any]) -> list[Value]:
        """Record an operator; ``outs`` are tensors or (shape, dtype) pairs."""
        made = target._schema.name.removeprefix("aten::") in MAKERS  # these take a tensor for its sizes only
        reads = list(walk_values((args[1:] if made else args, kwargs)))
        op = Op(target, args, kwargs, reads, [], self.node, self.position, self.grad)
        const = all(value.const for value in reads) and not compat.is_random(target)
        moves = len(reads) == 1 and reads[0].param and op.name in LAYOUT
        for out in outs:
            self.values += 1
            shape, dtype = out if isinstance(out, tuple) else (tuple(out.shape), out.dtype)
            value = Value(self.values, shape, dtype, op)
            value.const, value.param = const, moves
            op.outs.append(value)
        for value in reads:
            value.users.append(op)
        self.graph.ops.append(op)
        return op.outs

    # -- dispatch -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        to_value = lambda tree: _map_tensors(tree, self.value_of)  # noqa: E731
        schema = func._schema
        if schema.is_mutable:
            return self.write(func, args, kwargs)
        symbolic = to_value(args), to_value(kwargs)
        out = func(*args, **kwargs)
        tensors = [out] if isinstance(out, torch.Tensor) else [t for t in (out or ()) if isinstance(t, torch.Tensor)]
        if not tensors:
            return out
        if func._schema.name in ("aten::detach", "aten::alias") and not compat.is_detach(self.node):
            parent = self.aliases[id(args[0])]  # autograd's own bookkeeping: the same tensor under another name
            self.aliases[id(out)] = _Alias(out, parent.storage, parent.chain, parent.value)
            return out
        values = self.emit(func, *symbolic, tensors)
        view = func.is_view and isinstance(args[0], torch.Tensor)
        for index, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if not view:
                self.track(tensor, value)
                continue
            parent = self.aliases[id(args[0])]
            pick = None if isinstance(out, torch.Tensor) else index
            if pick is not None:  # unbind, split, chunk: keep each piece as the one view it is
                step = _piece_as_view(func, symbolic[0], pick, value)
            else:
                step = (func, symbolic[0][1:], symbolic[1], (value.shape, value.dtype))
            self.aliases[id(tensor)] = _Alias(tensor, parent.storage, (*parent.chain, step), value)
        return out

    def write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An in-place operator: record its functional twin, then thread the result back into the buffer."""
        written = [
            a
            for a, spec in zip(args, func._schema.arguments, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]
        if len(written) != 1 or written[0] is not args[0] or not isinstance(args[0], torch.Tensor):
            raise NotImplementedError(f"{func} writes more than its first argument")
        self.value_of(args[0])
        alias = self.aliases[id(args[0])]
        name = func._schema.name.removeprefix("aten::")
        values = _map_tensors(args, self.value_of)
        if name == "copy_":
            new = self.cast_to(values[1], alias.value)
        elif name in ("zero_", "fill_"):
            filler = 0.0 if name == "zero_" else values[1]
            new = self.emit(
                aten.full_like.default, (alias.value, filler), {}, [(alias.value.shape, alias.value.dtype)]
            )[0]
            new.const = not isinstance(filler, Value) or filler.const
        else:
            packet = getattr(aten, name.removesuffix("_"))
            twin = getattr(packet, func._overloadname)
            new = self.emit(
                twin, values, _map_tensors(kwargs, self.value_of), [(alias.value.shape, alias.value.dtype)]
            )[0]
        self.thread_back(alias, new)
        return args[0]

    def cast_to(self, source: Value, like: Value) -> Value:
        if source.shape != like.shape:
            source = self.emit(aten.expand.default, (source, list(like.shape)), {}, [(like.shape, source.dtype)])[0]
        if source.dtype != like.dtype:
            source = self.emit(aten._to_copy.default, (source,), {"dtype": like.dtype}, [(like.shape, like.dtype)])[0]
        return source

    def thread_back(self, alias: _Alias, new: Value) -> None:
        """Carry a written view up its chain of views to the buffer it belongs to."""
        storage = alias.storage
        parents = [storage.base] if alias.chain else []
        for target, args, kwargs, shape in alias.chain[:-1]:
            parents.append(self.emit(target, (parents[-1], *args), kwargs, [shape])[0])
        value = new
        for parent, (target, args, kwargs, _) in zip(reversed(parents), reversed(alias.chain), strict=True):
            value = self.scatter(parent, target, args, kwargs, value)
        self.overwrite(storage, value)
        alias.value, alias.generation = new, storage.generation
        if not alias.chain:
            alias.value = value

    def overwrite(self, storage: _Storage, value: Value) -> None:
        self.undo.append((storage, storage.base, storage.generation))
        storage.base = value
        self.generations += 1  # never used twice, so that a rolled back write leaves no alias believing it is current
        storage.generation = self.generations
        if value.node is None:
            value.node = storage.node
        self.graph.names.setdefault(value, []).append((storage.node, self.position))
        self.graph.mutations.append(Mutation(self.node, self.position, storage.index))

    # -- a call that fails half way -----------------------------------------------------------------------------
    def mark(self) -> tuple[int, int]:
        self.undo.clear()
        return len(self.graph.ops), len(self.graph.mutations)

    def roll_back(self, mark: tuple[int, int]) -> None:
        """Forget the operators and writes recorded since ``mark``."""
        for storage, base, generation in reversed(self.undo):
            self.graph.names.pop(storage.base, None)
            storage.base, storage.generation = base, generation
        forgotten = set(self.graph.ops[mark[0] :])
        for op in forgotten:
            for value in op.reads:
                value.users.remove(op)
        for alias in self.aliases.values():
            if alias.value.op in forgotten:
                alias.generation = -1
        del self.graph.ops[mark[0] :]
        del self.graph.mutations[mark[1] :]

    def scatter(self, parent: Value, target: Any, args: Any, kwargs: Any, value: Value) -> Value:
        name = target._schema.name.removeprefix("aten::")
        out = [(parent.shape, parent.dtype)]
        if name in ("select", "slice", "diagonal"):
            twin = {"select": aten.select_scatter, "slice": aten.slice_scatter, "diagonal": aten.diagonal_scatter}[name]
            return self.emit(twin.default, (parent, value, *args), kwargs, out)[0]
        if name in ("transpose", "t", "permute"):
            if name == "permute":
                rank = len(parent.shape)
                order = [d % rank for d in args[0]]
                return self.emit(target, (value, [order.index(i) for i in range(rank)]), {}, out)[0]
            return self.emit(target, (value, *args), kwargs, out)[0]
        if name in ("view", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach", "_reshape_alias"):
            return self.emit(aten.view.default, (value, list(parent.shape)), {}, out)[0]
        raise NotImplementedError(f"write through a {name} view")


def _piece_as_view(func: Any, args: tuple[Any, ...], index: int, value: Value) -> tuple[Any, ...]:
    name = func._schema.name.removeprefix("aten::")
    dim = args[-1] if len(args) > (1 if name == "unbind" else 2) else 0
    if name == "unbind":
        return (aten.select.int, (dim, index), {}, (value.shape, value.dtype))
    sizes = args[1]
    start = sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else index * sizes
    return (aten.slice.Tensor, (dim, start, start + value.shape[dim]), {}, (value.shape, value.dtype))


def _map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(item, fn) for item in tree) if not isinstance(tree, torch.Size) else list(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(item, fn) for key, item in tree.items()}
    return tree


class _Replay:
    """Runs a Dynamo graph under the recorder."""

    def __init__(self, gm: fx.GraphModule, size_of: SizeOf) -> None:
        self.gm = gm
        self.size_of = size_of
        self.recorder = _Recorder()
        self.env: dict[fx.Node, Any] = {}

    def stand_in(self, value: Any, node: fx.Node | None) -> Any:
        """Meta tensors and plain ints for what a node is known to yield."""
        if isinstance(value, torch.Tensor):
            sizes = [self.size_of(s) for s in value.shape]
            try:
                strides = [self.size_of(s) for s in value.stride()]
            except RuntimeError:  # sparse and jagged tensors have none
                strides = None
            with compat.no_fake_modes():
                if strides is None:
                    tensor = torch.empty(sizes, dtype=value.dtype, device="meta")
                else:
                    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
            self.recorder.add_input(tensor, node, param=isinstance(value, torch.nn.Parameter))
            return tensor
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size_of(value)
        if isinstance(value, torch.Size):
            return torch.Size([self.size_of(s) for s in value])
        if isinstance(value, (list, tuple)):  # the node yields none of them alone: a getitem will
            items = [self.stand_in(item, None) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def opaque(self, node: fx.Node) -> None:
        """Do not look into ``node``: it reads what it is given, yields something new, and may write its arguments."""
        for arg in node.all_input_nodes:
            self.recorder.graph.outputs.update(map(self.recorder.value_of, _tensors(self.env.get(arg))))
        for arg in compat.written_arguments(node):
            for tensor in _tensors(self.env.get(arg)):
                self.clobber(tensor)
        try:
            self.env[node] = self.stand_in(compat.example_value(node), node)
        except compat.NoHint as error:  # nothing that depends on its size can be looked into either
            log.debug("unknown: %s (%s)", node.format_node(), error)

    def clobber(self, tensor: torch.Tensor) -> None:
        """Leave an unknown value in the buffer that ``tensor`` is (a view of)."""
        recorder = self.recorder
        storage = recorder.aliases[id(tensor)].storage
        recorder.values += 1
        value = Value(recorder.values, storage.base.shape, storage.base.dtype)
        recorder.graph.inputs.append(value)
        recorder.overwrite(storage, value)

    def replay(self, node: fx.Node) -> Any:
        args = _to_meta(fx.node.map_arg(node.args, self.load))
        kwargs = _to_meta(fx.node.map_arg(node.kwargs, self.load))
        mark = self.recorder.mark()
        try:
            result = _call(node, args, kwargs)
        except RuntimeError:
            # Autocast, which leaves no trace on meta tensors, makes products of mixed dtypes legal.
            wide = _widest_dtype(_tensors([args, list(kwargs.values())]))
            if wide is None:
                raise
            self.recorder.roll_back(mark)
            result = _call(node, _widened(args, wide), _widened(kwargs, wide))
        expected = compat.example_value(node)
        if isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor):
            if [self.size_of(s) for s in expected.shape] != list(result.shape):
                raise ValueError("the replay disagrees with Dynamo's own shape")
        return result

    def load(self, node: fx.Node) -> Any:
        if node not in self.env:
            self.env[node] = self.stand_in(compat.example_value(node), node)
            self.name_value(node)
        return self.env[node]

    def run_node(self, node: fx.Node) -> None:
        expected = compat.example_value(node)
        if not compat.is_value(expected) and not compat.writes_first_argument(node):
            self.run_plain(node, expected)
        elif compat.is_opaque_call(node) or not self.loadable(node):
            self.opaque(node)
        elif compat.is_literal(node):
            with compat.no_fake_modes():
                data = torch.tensor(node.args[0], dtype=node.kwargs.get("dtype"))
            self.env[node] = self.stand_in(data, node)
            self.hold_constant(self.env[node], data)
        else:
            mark = self.recorder.mark()
            try:
                self.env[node] = self.replay(node)
            except REPLAY_ERRORS as error:
                log.debug("opaque: %s (%s)", node.format_node(), error)
                self.recorder.roll_back(mark)
                self.opaque(node)

    def run_plain(self, node: fx.Node, expected: Any) -> None:
        """Numbers are known without running anything; what yields nothing is run for its effects only: not here."""
        if expected is None:
            self.opaque(node)
            return
        try:
            self.env[node] = self.stand_in(expected, node)
        except compat.NoHint as error:
            log.debug("unknown: %s (%s)", node.format_node(), error)

    def loadable(self, node: fx.Node) -> bool:
        return all(arg in self.env or compat.example_value(arg) is not None for arg in node.all_input_nodes)

    def run(self) -> Graph:
        graph, recorder = self.recorder.graph, self.recorder
        with torch.no_grad(), compat.no_fake_modes(), self.recorder:
            for position, node in enumerate(self.gm.graph.nodes):
                recorder.node, recorder.position = node, position
                if node.op == "get_attr":
                    self.load_attribute(node)
                elif node.op in ("call_function", "call_method"):
                    if compat.is_mode_switch(node):
                        recorder.grad = compat.grad_mode_after(node, recorder.grad)
                        continue
                    self.run_node(node)
                elif node.op == "call_module":
                    self.opaque(node)
                elif node.op == "output":
                    self.finish(node)
                self.name_value(node)
        _drop_unread(graph)
        mark_uniform(graph)
        return graph

    def load_attribute(self, node: fx.Node) -> None:
        value = compat.attribute(self.gm, node)
        if not isinstance(value, torch.Tensor):
            return
        self.env[node] = self.stand_in(value, node)
        if compat.is_graph_constant(node):
            self.hold_constant(self.env[node], value)

    def hold_constant(self, stand_in: torch.Tensor, data: torch.Tensor) -> None:
        held = self.recorder.value_of(stand_in)
        held.const, held.payload = True, data

    def name_value(self, node: fx.Node) -> None:
        """Remember which Dynamo node yields a value, and on which storage it sits."""
        tensor = self.env.get(node)
        if not isinstance(tensor, torch.Tensor) or node.target is operator.setitem:
            return
        value = self.recorder.value_of(tensor)
        if value.node is None:
            value.node = node
        self.recorder.graph.names.setdefault(value, []).append((node, self.recorder.position))
        alias = self.recorder.aliases[id(tensor)]
        if not alias.chain and alias.storage.node is None:
            alias.storage.node = node
        self.recorder.graph.storages[node] = alias.storage.index

    def finish(self, node: fx.Node) -> None:
        graph = self.recorder.graph
        for arg in node.all_input_nodes:
            if arg.op == "placeholder":
                self.load(arg)
            graph.outputs.update(map(self.recorder.value_of, _tensors(self.env.get(arg))))
        for storage in self.recorder.storages:
            if storage.generation and storage.source is not None:
                before = next(v for v in graph.inputs if v.node is storage.source)
                graph.written[storage.base] = (storage.source, before)


def _drop_unread(graph: Graph) -> None:
    """Remove what nothing reads: re-taken views, autograd's own copies, writes to a buffer no longer read."""
    keep: list[Op] = []
    dropped: set[Any] = set()
    for op in reversed(graph.ops):
        if any(value.users or value in graph.outputs or value in graph.written for value in op.outs):
            keep.append(op)
            continue
        dropped.add(op.node)
        for value in op.reads:
            value.users.remove(op)
    graph.ops = keep[::-1]
    graph.dead = dropped - {op.node for op in keep}


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, (list, tuple)) else []


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _widest_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """What floating tensors of different dtypes promote to; None if they agree."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None


def _widened(tree: Any, dtype: torch.dtype) -> Any:
    return _map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _to_meta(tree: Any) -> Any:
    if isinstance(tree, torch.device):
        return torch.device("meta")
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = [_to_meta(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {
            key: (torch.device("meta") if key == "device" and item is not None else _to_meta(item))
            for key, item in tree.items()
        }
    return tree


def make_shadow(gm: fx.GraphModule, size_of: SizeOf = compat.size_hint) -> Graph:
    """The shadow of ``gm``; ``size_of`` maps symbolic sizes to the instance's ints (default: their hints)."""
    return _Replay(gm, size_of).run()


__all__ = ["Graph", "make_shadow", "map_values"]
