"""Writing down the ATen operators of a function that is run without data.

``make_fx`` on fake tensors gives the same graph, and follows symbolic sizes, gradients and constants on the way. A
function that goes row by row or token by token calls thousands of operators: here one takes a fifth of the time.

Torch has no public way to ask an ``OpOverload`` for its declaration or its overload's name: ``_schema`` and
``_overloadname`` have been the same in torch 2.11 to 2.14, and long before.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "map_tensors", "tensors_in", "tree_flatten", "tree_leaves", "tree_map_only"]

aten = torch.ops.aten

Argument = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]
"""Shape, strides, dtype and device of a tensor."""


def trace_fake(fn: Callable[..., Any], arguments: Sequence[Argument]) -> fx.GraphModule:
    """The ATen graph of ``fn`` on tensors of these shapes, strides, dtypes and devices.

    The function is run as eager mode would without gradients; while Dynamo captures something else, too. Raises what
    the function raises, and RuntimeError where it needs data.
    """
    with _disable_current_modes(), tracing(None), torch.inference_mode(False), torch.no_grad():
        writer = _Writer()
        inputs = [writer.add_input(*argument) for argument in arguments]
        with writer:
            results = fn(*inputs)
        return writer.finish(results)


class TorchDispatchMode(_TorchDispatchMode):
    """Torch's, for code that Dynamo itself has called: nobody has to keep Dynamo out of every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Writer(TorchDispatchMode):
    """Runs operators on the meta tensors behind fake ones, and writes each down as a node.

    Fake tensors say they are on the device of the call, which the function may ask for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode()
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[int, list[fx.Node]] = {}
        """By the id of a tensor: the nodes that yielded it, one for every write to it after the first."""
        self.kept: list[Tensor] = []
        """Tensors seen, so that no id is given out twice."""

    def add_input(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        tensor = self.fake(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), torch.device(device))
        self.name(tensor, self.graph.placeholder(f"x{len(self.kept)}"))
        return tensor

    def finish(self, results: Any) -> fx.GraphModule:
        self.graph.output(tree_map_only(Tensor, self.node_of, results))
        self.graph.eliminate_dead_code()
        return _LazyGraphModule(self.root, self.graph)  # its code is not written before somebody runs it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is aten.lift_fresh.default:
            return self.add_literal(args[0])
        if func is aten.detach.default and self.is_new(args[0]):
            return args[0]
        nodes = map_tensors((args, kwargs), self.node_of)
        if torch.Tag.inplace_view in func.tags:
            self.keep_shape(args[0])
        out = self.run(func, args, kwargs)
        node = self.graph.call_function(func, *nodes)
        if isinstance(out, Tensor):
            self.name(out, node)
        elif isinstance(out, (list, tuple)):
            node.meta["val"] = out
            for index, item in enumerate(out):
                self.name(item, self.graph.call_function(operator.getitem, (node, index)))
        return out

    def is_new(self, tensor: Tensor) -> bool:
        """True for what ``torch.zeros`` and the like have made: they detach it themselves, which cuts no gradient."""
        target: Any = self.node_of(tensor).target
        return target is not aten._to_copy.default and _takes_device(target)

    def add_literal(self, data: Tensor) -> Tensor:
        """A copy of what ``torch.tensor`` made of numbers in the function's text."""
        literal = f"_tensor_constant{len(self.kept)}"
        setattr(self.root, literal, data)
        tensor = self.fake(torch.empty_like(data, device="meta"), data.device)
        held = self.graph.get_attr(literal)
        held.meta["val"] = tensor
        self.name(tensor, self.graph.call_function(aten.lift_fresh_copy.default, (held,)))
        return tensor

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operator without data. Results are on the device asked for, or on that of the first operand."""
        operands = tensors_in((args, kwargs))
        device = kwargs.get("device")
        if device is None and operands:
            device = next((x for x in operands if x.dim()), operands[0]).fake_device
        if kwargs.get("device") is not None or (not operands and _takes_device(func)):
            kwargs = {**kwargs, "device": torch.device("meta")}
        with in_kernel_invocation_manager(self.fakes):
            out = without_data(func, args, kwargs)
        device = torch.device("cpu" if device is None else device)
        return map_tensors(out, lambda tensor: self.fake(tensor, device))

    def fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else FakeTensor(self.fakes, tensor, device)

    def name(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        self.nodes.setdefault(id(tensor), []).append(node)
        self.kept.append(tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        if id(tensor) not in self.nodes:
            raise RuntimeError("it reads a tensor that is not an argument")
        return self.nodes[id(tensor)][-1]

    def keep_shape(self, tensor: Any) -> None:
        """Before a tensor is given another shape: the nodes that yielded it keep the one it has."""
        with in_kernel_invocation_manager(self.fakes):
            before = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        for node in self.nodes[id(tensor)]:
            node.meta["val"] = self.fake(before, tensor.fake_device)


def _takes_device(target: Any) -> bool:
    """True for operators that make a tensor where they are told to."""
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    return any(argument.name == "device" for argument in arguments)


# -- operators without data -------------------------------------------------------------------------------------------
# Half of torch's rules for shapes are written in Python. Loops and layers call the same operator on the same shapes
# again and again, and so does every further look at a graph.

MOST_KNOWN = 1 << 14
_known: dict[Any, Any] = {}
"""Shapes, strides and dtypes of results, by operator and operands."""


class _NotPlain(Exception):
    """An operand whose shape, strides and dtype do not say all."""


def without_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator yields on meta tensors, remembered where the results are new tensors."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _described(args), _described(kwargs)
    except _NotPlain:
        return func(*args, **kwargs)
    if key in _known:
        return _made(_known[key])
    out = func(*args, **kwargs)
    results = out if isinstance(out, (tuple, list)) else (out,)
    if all(isinstance(each, Tensor) for each in results) and not _share(results, tensors_in((args, kwargs))):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        with contextlib.suppress(_NotPlain):
            _known[key] = _described(out)
    return out


@functools.cache
def _makes_new(func: Any) -> bool:
    """True for an operator that declares no result to be, and no operand to become, anything but new."""
    declared = (*func._schema.arguments, *func._schema.returns)
    return all(each.alias_info is None for each in declared) and torch.Tag.data_dependent_output not in func.tags


def _described(tree: Any) -> Any:
    """Operands, or results, as a key: numbers with their types, which 1 and True and 1.0 differ in."""
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided or tree.is_complex() or tree.is_quantized:
            raise _NotPlain
        return Tensor, tuple(tree.shape), tree.stride(), tree.dtype
    if isinstance(tree, (tuple, list)):
        return type(tree), *map(_described, tree)
    if isinstance(tree, dict):
        return dict, *((name, _described(item)) for name, item in tree.items())
    if type(tree) not in _NUMBERS:
        raise _NotPlain
    return type(tree), tree


_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _made(described: Any) -> Any:
    kind, *rest = described
    if kind is Tensor:
        return torch.empty_strided(rest[0], rest[1], dtype=rest[2], device="meta")
    return kind(map(_made, rest))


def _share(results: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
    """True if a result lies in the memory of another or of an operand."""
    own, given = ([each.untyped_storage()._cdata for each in tensors] for tensors in (results, operands))
    return len(set(own)) < len(own) or not set(own).isdisjoint(given)


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments with each tensor replaced; what is called for every operator, so no pytree, and a shape is a list."""
    if type(tree) in _NUMBERS:
        return tree
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, fn) for item in tree]
        return tuple(items) if isinstance(tree, tuple) and not isinstance(tree, torch.Size) else items
    return {key: map_tensors(item, fn) for key, item in tree.items()} if isinstance(tree, dict) else tree


def tensors_in(tree: Any) -> list[Any]:
    """The tensors among arguments."""
    found: list[Any] = []
    map_tensors(tree, found.append)
    return found


OpOverload = torch._ops.OpOverload


def is_operator(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """True for one overload of an operator, such as ``aten.add.Tensor``."""
    return isinstance(target, OpOverload)


def declaration(op: Any) -> Any:
    """The declaration: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return op._schema


def operator_name(op: Any) -> str:
    """``aten::add`` of ``aten.add.Tensor``."""
    return op._schema.name


def overload_name(op: Any) -> str:
    """``Tensor`` of ``aten.add.Tensor``."""
    return op._overloadname
