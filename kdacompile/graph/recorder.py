"""Writing down ATen operators as they run: views and in-place writes become pure single assignment.

A buffer is a storage with a current value; a tensor is a chain of views over one. A write through a view is threaded
back to its buffer (``select_scatter`` and the like), and later reads of the buffer take their views again.
"""

from __future__ import annotations

from typing import Any

import torch

from kdacompile import compat
from kdacompile.compat.operators import (
    TorchDispatchMode,
    declaration,
    map_tensors,
    operator_name,
    overload_name,
    tensors_in,
    without_data,
)
from kdacompile.graph.ir import Graph, Mutation, Op, Value, walk_values
from kdacompile.patterns.engine.vocabulary import AS_IS, LAYOUT, MAKERS, TURNS, VIEWS

aten = torch.ops.aten

RELAID = AS_IS | VIEWS | TURNS
"""What keeps every element of a buffer once."""


class Storage:
    """A buffer of the replay: its current value, and how often it was written."""

    __slots__ = ("base", "generation", "index", "nodes", "source")

    def __init__(self, index: int, base: Value, source: Any) -> None:
        self.index = index
        self.base = base
        self.generation = 0
        self.source = source
        self.nodes: list[Any] = [] if source is None else [source]
        """The Dynamo nodes that yield the buffer whole: the first one makes it."""

    @property
    def node(self) -> Any:
        return self.nodes[0] if self.nodes else None


class Alias:
    """A tensor of the replay: a chain of views over a storage, with the value last computed for it."""

    __slots__ = ("chain", "generation", "storage", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, storage: Storage, chain: tuple[Any, ...], value: Value) -> None:
        self.tensor = tensor
        self.storage = storage
        self.chain = chain
        self.value = value
        self.generation = storage.generation


class Recorder(TorchDispatchMode):
    """Runs operators on meta tensors and writes each down as a functional one.

    A write to memory becomes a new value of its storage; tensors that share the storage are taken again, as views of
    that value, when they are read next.
    """

    def __init__(self, graph: Graph | None = None) -> None:
        super().__init__()
        self.graph = Graph() if graph is None else graph
        self.aliases: dict[int, Alias] = {}
        self.storages: list[Storage] = []
        self.node: Any = None
        self.position = 0
        self.grad = torch.is_grad_enabled()
        self.values = 0
        self.generations = 0
        self.undo: list[tuple[Storage, Value, int]] = []

    # -- values -------------------------------------------------------------------------------------------------
    def new_value(self, tensor: torch.Tensor) -> Value:
        self.values += 1
        return Value(self.values, tuple(tensor.shape), tensor.dtype)

    def track(self, tensor: torch.Tensor, value: Value, source: Any = None) -> None:
        storage = Storage(len(self.storages), value, source)
        self.storages.append(storage)
        self.aliases[id(tensor)] = Alias(tensor, storage, (), value)

    def add_input(self, tensor: torch.Tensor, node: Any, *, param: bool = False) -> Value:
        value = self.new_value(tensor)
        value.node, value.param = node, param
        self.graph.inputs.append(value)
        self.track(tensor, value, node)
        return value

    def hold(self, tensor: torch.Tensor, data: torch.Tensor) -> Value:
        """The constant ``data``, for which ``tensor`` stands."""
        value = self.new_value(data)
        value.const, value.payload = True, data
        self.track(tensor, value)
        return value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value ``tensor`` holds now; views of a buffer written since are taken again."""
        alias = self.aliases.get(id(tensor))
        if alias is None:  # a real tensor the graph carries: a constant
            if tensor.is_meta:  # numbers that were put on the meta device are lost
                raise ValueError("data that no operator made")
            return self.hold(tensor, tensor)
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
        stored = self.stored(target, args, kwargs)
        if stored is not None:
            return [stored]
        name = operator_name(target).removeprefix("aten::")
        lent = name in MAKERS and (name.startswith("new_") or name.endswith("_like"))  # a tensor lends its sizes only
        reads = list(walk_values((args[1:] if lent else args, kwargs)))
        const = all(value.const for value in reads) and not compat.is_random(target)
        if target is aten._to_copy.default and not const:  # what comes from another device enters the graph as it is
            kwargs = {
                name: item for name, item in kwargs.items() if name not in ("device", "layout") or "dtype" not in kwargs
            }
        op = Op(target, args, kwargs, reads, [], self.node, self.position, self.grad)
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

    def stored(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value | None:
        """What is read of a buffer where the same was written last: ``slice(slice_scatter(x, y, ...), ...)`` is y."""
        scatter = args[0].op if args and isinstance(args[0], Value) else None
        if scatter is None or operator_name(scatter.target) != f"{operator_name(target)}_scatter":
            return None
        same = tuple(scatter.args[2:]) == tuple(args[1:]) and scatter.kwargs == kwargs and scatter.grad == self.grad
        written: Value = scatter.args[1]
        return written if same and written.dtype == args[0].dtype and not written.const else None

    # -- dispatch -----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        to_value = lambda tree: map_tensors(tree, self.value_of)  # noqa: E731
        schema = declaration(func)
        if schema.is_mutable:
            return self.write(func, args, kwargs)
        symbolic = to_value(args), to_value(kwargs)
        out = without_data(func, args, kwargs)
        tensors = tensors_in(out)
        if not tensors:
            return out
        if operator_name(func) in ("aten::detach", "aten::alias") and not compat.is_detach(self.node):
            parent = self.aliases[id(args[0])]  # autograd's own bookkeeping: the same tensor under another name
            self.aliases[id(out)] = Alias(out, parent.storage, parent.chain, parent.value)
            return out
        values = self.emit(func, *symbolic, tensors)
        view = func.is_view and isinstance(args[0], torch.Tensor) and not self.is_all_of_it(func, args[0], out)
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
            self.aliases[id(tensor)] = Alias(tensor, parent.storage, (*parent.chain, step), value)
        return out

    def is_all_of_it(self, func: Any, base: torch.Tensor, out: Any) -> bool:
        """True for all of a buffer that was just made, laid out in another way, where nothing else reads that: it is
        the buffer from here on.
        """
        storage, chain = self.aliases[id(base)].storage, self.aliases[id(base)].chain
        if chain or storage.generation or len(storage.nodes) != 1 or getattr(self.node, "op", "") == "placeholder":
            return False
        if operator_name(func).removeprefix("aten::") not in RELAID or out.numel() != base.numel():
            return False
        made = storage.base.op
        while made is not None and made.name in RELAID:
            made = made.reads[0].op
        (node,) = storage.nodes
        return made is not None and made.name in MAKERS and set(node.users) == {self.node}

    def write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An in-place operator: record its functional form, then thread the result back into the buffer."""
        written = [
            a
            for a, spec in zip(args, declaration(func).arguments, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]
        if len(written) != 1 or written[0] is not args[0] or not isinstance(args[0], torch.Tensor):
            raise NotImplementedError(f"{func} writes more than its first argument")
        if torch.Tag.inplace_view in func.tags:
            return self.reshape(func, args, kwargs)
        self.value_of(args[0])
        alias = self.aliases[id(args[0])]
        name = operator_name(func).removeprefix("aten::")
        values = map_tensors(args, self.value_of)
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
            form = getattr(packet, overload_name(func))
            new = self.emit(form, values, map_tensors(kwargs, self.value_of), [(alias.value.shape, alias.value.dtype)])[
                0
            ]
        self.thread_back(alias, new)
        return args[0]

    def reshape(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``squeeze_`` and the like. From here on the name of an older tensor stands for its new shape: what it was
        before has none any more.
        """
        alias = self.aliases.get(id(args[0]))
        if alias is None or alias.value.op is None or alias.generation != alias.storage.generation:
            raise NotImplementedError(f"{func} on a tensor of another graph")
        alias.value.node = None
        alias.storage.nodes.clear()
        self.graph.names.pop(alias.value, None)
        form = getattr(getattr(aten, operator_name(func).removeprefix("aten::").removesuffix("_")), overload_name(func))
        func(*args, **kwargs)
        out = tuple(args[0].shape), args[0].dtype
        value = self.emit(form, (alias.value, *args[1:]), kwargs, [out])[0]
        alias.chain, alias.value = (*alias.chain, (form, args[1:], kwargs, out)), value
        return args[0]

    def cast_to(self, source: Value, like: Value) -> Value:
        if source.shape != like.shape:
            source = self.emit(aten.expand.default, (source, list(like.shape)), {}, [(like.shape, source.dtype)])[0]
        if source.dtype != like.dtype:
            source = self.emit(aten._to_copy.default, (source,), {"dtype": like.dtype}, [(like.shape, like.dtype)])[0]
        return source

    def thread_back(self, alias: Alias, new: Value) -> None:
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

    def overwrite(self, storage: Storage, value: Value) -> None:
        self.undo.append((storage, storage.base, storage.generation))
        storage.base = value
        self.generations += 1  # never used twice, so that a rolled back write leaves no alias believing it is current
        storage.generation = self.generations
        if value.node is None:
            value.node = storage.node
        for node in storage.nodes:  # a buffer that one call made for itself (rms_norm) has no name
            self.graph.names.setdefault(value, []).append((node, self.position))
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
        name = operator_name(target).removeprefix("aten::")
        out = [(parent.shape, parent.dtype)]
        if name in ("select", "slice", "diagonal"):
            form = {"select": aten.select_scatter, "slice": aten.slice_scatter, "diagonal": aten.diagonal_scatter}[name]
            return self.emit(form.default, (parent, value, *args), kwargs, out)[0]
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
    name = operator_name(func).removeprefix("aten::")
    dim = args[-1] if len(args) > (1 if name == "unbind" else 2) else 0
    if name == "unbind":
        return (aten.select.int, (dim, index), {}, (value.shape, value.dtype))
    sizes = args[1]
    start = sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else index * sizes
    return (aten.slice.Tensor, (dim, start, start + value.shape[dim]), {}, (value.shape, value.dtype))
