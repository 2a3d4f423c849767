"""What a node of Dynamo's graph is: where it comes from, what it yields, what it writes, what it means."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_OWN_ATTRIBUTE = re.compile(r"(\._buffers\[[^\]]*\]|\.\w+)$")


def source_of_input(node: fx.Node) -> Any:
    """Where Dynamo found a graph input; None for inputs of other graphs."""
    argument = node.meta.get("grapharg")  # there while the graph is being captured
    return getattr(node, "_dynamo_source", getattr(argument, "source", None))


def copy_of_graph(graph: fx.Graph) -> fx.Graph:
    """The graph once more, to be put in its place; nodes share what their ``meta`` holds."""
    made = copy.deepcopy(graph)
    made.owning_module = graph.owning_module
    for node, other in zip(graph.nodes, made.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):
            other._dynamo_source = node._dynamo_source
    return made


def source_name(node: fx.Node) -> str:
    """The expression that Dynamo knows a graph input by; "" for inputs of other graphs."""
    source = source_of_input(node)
    if source is None:
        return ""
    name: Any = source.name() if callable(source.name) else source.name
    return str(name)


def owner(node: fx.Node) -> str:
    """Which module (or globals) a graph input is kept by, as Dynamo's source names it; "" for arguments of the call."""
    source = source_of_input(node)
    if source is None:
        return ""
    where: Any = source.guard_source() if callable(source.guard_source) else source.guard_source
    if "MODULE" not in where.name and "GLOBAL" not in where.name:
        return ""
    return "G" if where.name == "GLOBAL" else _OWN_ATTRIBUTE.sub("", source_name(node))


def is_random(target: Any) -> bool:
    """True for operators that draw random numbers, whatever they read."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def example_value(node: fx.Node) -> Any:
    """What Dynamo (``example_value``) or export (``val``) says the node yields."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_value(example: Any) -> bool:
    """True for tensors and collections, which may hold tensors."""
    return isinstance(example, (torch.Tensor, list, tuple)) and not isinstance(example, torch.Size)


OWN_OPS = frozenset({"kdacompile::linear_attention", "kdacompile::linear_attention_step"})
"""This package's functional operators, which the functional graph keeps as they are."""


def is_own_op(node: fx.Node) -> bool:
    """True for calls of this package's operators."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kdacompile"


ABSORBED = "kdacompile_absorbed"
"""Key of a node's meta: what an operator of ours took over from its surroundings."""

REPORTED = "kdacompile_reported"
"""Key of a node's meta: the match that an operator of ours was put into the graph for, where a report tells of it."""


def is_opaque_call(node: fx.Node) -> bool:
    """Calls the functional graph never looks into: higher-order operators, custom operators, in-graph modules."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return target._schema.name not in OWN_OPS


def is_detach(node: fx.Node | None) -> bool:
    """True if the user's own code cuts the gradient at this node."""
    if node is None:
        return False
    name = _name_called(node)
    return name in ("detach", "detach_", "_get_data_attr") or (name == "getattr" and node.args[1] == "data")


def detaches_in_place(node: fx.Node) -> bool:
    """True for ``x.detach_()``: who reads x before has its gradient, who reads it later has none."""
    return _name_called(node) == "detach_"


def _name_called(node: fx.Node) -> str:
    """Of a function, a method or an operator, whatever its overload."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.split(".")[0]


_AUTOCAST = {"_enter_autocast", "_exit_autocast"}


def is_mode_switch(node: fx.Node) -> bool:
    """Nodes that change a mode (grad, autocast, saved-tensor hooks) and compute nothing."""
    name = getattr(node.target, "__name__", "")
    return name in _AUTOCAST or name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


def switches_modes(graph: fx.Graph, *, grad: bool = True) -> bool:
    """True if autocast, inference mode, what asks for a gradient or (``grad``) the grad mode is not the same all along:
    a call that stands for several would be made under the mode of one of them. A functional graph tells the grad mode
    of every operator, so what works on one need not ask. Autocast that is switched off where it is off changes nothing.
    """
    return any(
        node.target == "requires_grad_"
        or inference_mode_change(node)
        or _turns_autocast(node)
        or (grad and getattr(node.target, "__name__", "") == "_set_grad_enabled")
        for node in graph.nodes
    )


def _turns_autocast(node: fx.Node) -> bool:
    if getattr(node.target, "__name__", "") != "_enter_autocast":
        return False
    device, _, *enabled = node.args
    return enabled[:1] != [False] or torch.is_autocast_enabled(str(device))


def grad_mode_after(node: fx.Node, before: bool) -> bool:
    """Grad mode once ``node`` has run."""
    if getattr(node.target, "__name__", "") == "_set_grad_enabled":
        return bool(node.args[0])
    return before


def inference_mode_change(node: fx.Node) -> int:
    """+1 where the graph enters inference mode, -1 where it leaves it."""
    return {"_enter_inference_mode": 1, "_exit_inference_mode": -1}.get(getattr(node.target, "__name__", ""), 0)


_WRITING_FUNCTIONS: tuple[Callable[..., Any], ...] = (operator.setitem,)


def writes_first_argument(node: fx.Node) -> bool:
    """True if the call may write its first argument in place (asked of calls that could not be replayed)."""
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    in_place = name.startswith("i") and hasattr(operator, f"__{name}__")
    return node.target in _WRITING_FUNCTIONS or in_place or (name.endswith("_") and not name.startswith("_"))


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments that a call nobody looks into may write."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes) if _may_write(node) else []
    if isinstance(node.target, torch._ops.OpOverload):
        named = dict(zip((spec.name for spec in node.target._schema.arguments), node.args, strict=False))
        given = {**named, **node.kwargs}
        written = [spec.name for spec in node.target._schema.arguments if spec.alias_info and spec.alias_info.is_write]
        return [arg for name in written for arg in _nodes(given.get(name))]
    first = _nodes(node.args[0]) if node.args and writes_first_argument(node) else []
    return [*first, *_nodes(node.kwargs.get("out"))]


def _nodes(tree: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(tree, found.append)
    return found


def _may_write(node: fx.Node) -> bool:
    """True if a higher-order operator writes its arguments: by its name, or in a body of its own."""
    if "mutation" in str(node.target):
        return True
    owner = node.graph.owning_module
    bodies = [attribute(owner, arg) for arg in node.all_input_nodes if owner is not None and arg.op == "get_attr"]
    return any(
        writes_first_argument(inner)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for inner in body.graph.nodes
        if inner.op in ("call_function", "call_method")
    )


_TRANSFORMS = frozenset(
    "_vmap_increment_nesting _jvp_increment_nesting _grad_increment_nesting _func_increment_nesting "
    "push_dynamic_layer_stack _enter_dual_level".split()
)


def transforms(graph: fx.Graph, *, vmap: bool = True) -> bool:
    """True if the graph runs under a transform of torch.func, whose tensors are not what their shapes say; without
    ``vmap``, under another than that.
    """
    names = _TRANSFORMS if vmap else _TRANSFORMS - {"_vmap_increment_nesting"}
    return any(getattr(node.target, "__name__", "") in names for node in graph.nodes)


def attribute(gm: fx.GraphModule | None, node: fx.Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def memory_of(tensor: torch.Tensor) -> Any:
    """What tensors that share memory have in common, fake ones included; their own identity where there is none."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without a storage
        return id(tensor)


def literal(node: fx.Node) -> Any:
    """What ``torch.tensor(numbers)`` or ``x.new_tensor(numbers)`` is made of, if it stands in the graph's text."""
    made = int(node.op == "call_method" and node.target == "new_tensor")  # x gives its dtype and device
    if (not made and node.target not in (torch.tensor, torch.as_tensor)) or len(node.all_input_nodes) > made:
        return None
    return node.args[made] if len(node.args) > made else node.kwargs.get("data")


def is_graph_constant(node: fx.Node) -> bool:
    """Tensors Dynamo lifted from literals (``torch.tensor([...])`` and the like): the same on every call."""
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


@contextlib.contextmanager
def fake_mode_of(node: fx.Node) -> Generator[Any]:
    """Enter the fake mode the node's example value lives in; of tensors around others, that of those."""
    value = next(iter(tree_leaves(example_value(node))), None)
    while is_traceable_wrapper_subclass(value):
        value = getattr(value, value.__tensor_flatten__()[0][0])
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        yield None
        return
    with tracing(None), mode:
        yield mode


@contextlib.contextmanager
def unlogged() -> Generator[None]:
    """torch writes an error for each operator that does not take its inputs: here the exception says so to a caller who
    tries whether it does.
    """
    here, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


RUN_ERRORS = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, NameError, AssertionError, ArithmeticError,
    StopIteration, OSError,
)  # fmt: skip
"""What code may raise that is run on stand-ins, or on sizes and numbers that it was not written for."""


def called(target: Any, args: Any, kwargs: Any) -> Any:
    """What a call yields: of a function, or of its first argument's method by that name."""
    return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)


def propagate_fake(node: fx.Node, like: fx.Node) -> None:
    """Give a node we inserted the place in the user's code that ``like`` has, and the example value its operator
    computes on its inputs' example values; raises what the operator raises.
    """
    args = map_arg(node.args, example_value)
    kwargs = map_arg(node.kwargs, example_value)
    with _disable_current_modes(), fake_mode_of(like), unlogged():
        put_in_place(node, like, called(node.target, args, kwargs))


def put_in_place(node: fx.Node, like: fx.Node, value: Any) -> None:
    """Give a node we inserted the place in the user's code that ``like`` has, and its example value."""
    node.meta |= {key: like.meta[key] for key in _PLACE if key in like.meta}
    node.meta["example_value" if "example_value" in like.meta else "val"] = value


_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")
