"""Every torch-private name this project uses, in one place (torch 2.11 to 2.14).

``dynamo`` has what lifting needs of Dynamo, ``dispatcher`` what the ops need of the dispatcher, ``reporting`` what
torch tells its users.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import sympy
import torch
import torch._inductor
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import tracing
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._sympy.symbol import SymT, symbol_is_type

from kdacompile.compat.reporting import ShortenTraceback, dynamo_settings, graph_breaks, trace_artifact

__all__ = [
    "CustomGraphPass",
    "ShortenTraceback",
    "attribute",
    "compile_fx",
    "dynamo_settings",
    "example_value",
    "grad_mode_after",
    "graph_breaks",
    "is_detach",
    "is_functorch_wrapped_tensor",
    "is_mode_switch",
    "is_opaque_call",
    "is_random",
    "is_traceable_wrapper_subclass",
    "no_fake_modes",
    "propagate_fake",
    "size_hint",
    "trace_artifact",
    "writes_first_argument",
]


PASS_OPTION = "pre_grad_custom_pass"


_OWN_ATTRIBUTE = re.compile(r"(\._buffers\[[^\]]*\]|\.\w+)$")


def source_of_input(node: fx.Node) -> Any:
    """Where Dynamo found a graph input; None for inputs of other graphs."""
    argument = node.meta.get("grapharg")  # there while the graph is being captured
    return getattr(node, "_dynamo_source", getattr(argument, "source", None))


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


def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
    """Inductor itself; a graph module in gives a function back."""
    from torch._inductor import compile_fx as inductor  # slow to import

    compiled: Any = inductor.compile_fx(gm, inputs, config_patches=config_patches)
    return compiled


def as_passes(given: object) -> list[Callable[[fx.Graph], object]]:
    """The passes in an Inductor option that takes one, several (since torch 2.13) or none."""
    if given is None:
        return []
    passes = list(given) if isinstance(given, (list, tuple)) else [given]
    return [item for item in passes if callable(item)]


def pass_uuid(run: object) -> Any:
    """A pass's identity for caches; None for plain functions."""
    return run.uuid() if isinstance(run, CustomGraphPass) else None


def inductor_option(name: str) -> Any:
    return getattr(inductor_config, name)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The configuration each of torch.compile's modes stands for."""
    return torch._inductor.list_mode_options()


def inductor_options() -> list[str]:
    return torch._inductor.list_options()


def inductor_option_type(name: str) -> object:
    """What an option is declared as: a type, a union or a subscripted generic."""
    declared: Any = inductor_config  # get_type is installed at run time
    return declared.get_type(name)


def aot_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd with every operator run as it is."""
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(gm, list(inputs))


def inductor_cache_dir() -> str:
    return cache_dir()


def disk_caches() -> bool:
    return not inductor_config.force_disable_caches


def cache_key_tag(tag: str) -> contextlib.AbstractContextManager[Any]:
    """Add ``tag`` to the keys of all compile caches, beside what the user has put there."""
    config: Any = torch.compiler.config  # its fields are installed at run time
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}")


def is_random(target: Any) -> bool:
    """True for operators that draw random numbers, whatever they read."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def example_value(node: fx.Node) -> Any:
    """What Dynamo (``example_value``) or export (``val``) says the node yields."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_value(example: Any) -> bool:
    """True for tensors and collections, which may hold tensors."""
    return isinstance(example, (torch.Tensor, list, tuple)) and not isinstance(example, torch.Size)


class NoHint(RuntimeError):
    """A number that is known only once the graph runs."""


def size_hint(size: Any) -> Any:
    """The concrete size behind a symbolic one; raises ``NoHint`` for unbacked symbols."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        hint = size.node.hint
        if hint is None:
            raise NoHint(f"{size} has no hint")
        return hint
    return size


def is_one(size: Any) -> bool:
    """True for the number 1; a symbolic size is not asked, which would put a guard on it."""
    return isinstance(size, int) and size == 1


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a size, in a tensor's sizes, or in those of a collection."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return free_symbols(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in free_symbols(item)}
    return set()


def is_unbacked(symbol: Any) -> bool:
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def is_number(symbol: Any) -> bool:
    """True for the symbol of a float, which dynamic shapes make of a number that a module or a caller holds."""
    return symbol_is_type(symbol, SymT.FLOAT)


def settle(env: Any, symbol: Any) -> None:
    """Guard that a symbol stays what it is: with another value the graph is captured again."""
    env.evaluate_expr(sympy.Eq(symbol, env.backed_var_to_val[symbol]))


def tie(size: Any, other: Any) -> None:
    """Guard that two sizes are equal: from here on they have the same symbols."""
    if isinstance(size, torch.SymInt) or isinstance(other, torch.SymInt):
        bool(size == other)


def shape_env(nodes: list[fx.Node]) -> Any:
    """The environment that knows the graph's symbols, guards and ranges."""
    for node in nodes:
        value = example_value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, (torch.SymInt, torch.SymFloat)):
                return size.node.shape_env
    raise ValueError("the graph has no symbolic sizes")


def backed_hints(env: Any) -> dict[Any, int]:
    return {symbol: int(hint) for symbol, hint in env.backed_var_to_val.items() if getattr(hint, "is_integer", False)}


def in_range(env: Any, symbol: Any, size: int) -> bool:
    known = env.var_to_range.get(symbol)
    return size >= 2 and (known is None or (bool(known.lower <= size) and bool(size <= known.upper)))


def allowed(env: Any, sizes: dict[Any, int]) -> bool:
    """True if ``sizes`` satisfy every guard of the graph that can be evaluated with them."""
    numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
    numbers |= {symbol: expr.xreplace(numbers) for symbol, expr in env.replacements.items()}
    return all(guard.expr.xreplace(numbers) == sympy.true for guard in env.guards)


def size_at(size: Any, sizes: dict[Any, int]) -> Any:
    """A symbolic number at an instance; raises ``NoHint`` where the instance does not settle it."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    number = sympy.sympify(size.node.expr).xreplace({symbol: sympy.Integer(value) for symbol, value in sizes.items()})
    if number.free_symbols:
        raise NoHint(f"{size} is not settled")
    kind = int if isinstance(size, torch.SymInt) else float if isinstance(size, torch.SymFloat) else bool
    return kind(number)


def no_fake_modes() -> contextlib.AbstractContextManager[Any]:
    """Inductor runs passes under its own fake mode; work on plain meta tensors means leaving it."""
    return _disable_current_modes()


OWN_OPS = frozenset({"kdacompile::linear_attention", "kdacompile::linear_attention_step"})
"""This package's functional operators, which the shadow keeps as they are."""


def is_own_op(node: fx.Node) -> bool:
    """True for calls of this package's operators."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kdacompile"


ABSORBED = "kdacompile_absorbed"
"""Key of a node's meta: what an operator of ours took over from its surroundings."""


def no_python_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """Inductor runs its passes with torch's Python dispatcher on: operators then decompose otherwise than they do under
    other compilers, and a matmul of real tensors takes six times as long.
    """
    guard: Any = torch._C._DisablePythonDispatcher()
    return guard


def is_opaque_call(node: fx.Node) -> bool:
    """Calls the shadow never looks into: higher-order operators, custom operators, in-graph modules."""
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
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.split(".")[0] in ("detach", "detach_", "_get_data_attr") or (
        name == "getattr" and node.args[1] == "data"
    )


_AUTOCAST = {"_enter_autocast", "_exit_autocast"}


def is_mode_switch(node: fx.Node) -> bool:
    """Nodes that change a mode (grad, autocast, saved-tensor hooks) and compute nothing."""
    name = getattr(node.target, "__name__", "")
    return name in _AUTOCAST or name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")


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


def transforms(graph: fx.Graph) -> bool:
    """True if the graph runs under a transform of torch.func, whose tensors are not what their shapes say."""
    return any(getattr(node.target, "__name__", "") in _TRANSFORMS for node in graph.nodes)


def wrapped_tensors(graph: fx.Graph) -> bool:
    """True if an input of the graph is a tensor subclass around other tensors, such as a DTensor."""
    inputs = (example_value(node) for node in graph.nodes if node.op == "placeholder")
    return any(is_traceable_wrapper_subclass(value) for value in inputs)


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


def is_literal(node: fx.Node) -> bool:
    """``torch.tensor`` of plain numbers: a constant whose data stand in the graph's text."""
    return node.target in (torch.tensor, torch.as_tensor) and not node.all_input_nodes


def dtype_argument(node: fx.Node) -> torch.dtype | None:
    dtype = node.kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def is_graph_constant(node: fx.Node) -> bool:
    """Tensors Dynamo lifted from literals (``torch.tensor([...])`` and the like): the same on every call."""
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


@contextlib.contextmanager
def fake_mode_of(node: fx.Node) -> Generator[Any]:
    """Enter the fake mode the node's example value lives in."""
    value = example_value(node)
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        yield None
        return
    with tracing(None), mode:
        yield mode


def propagate_fake(node: fx.Node, like: fx.Node) -> None:
    """Give a node we inserted the example value its operator computes on its inputs' example values."""
    key = "example_value" if "example_value" in like.meta else "val"
    args = map_arg(node.args, example_value)
    kwargs = map_arg(node.kwargs, example_value)
    with _disable_current_modes(), fake_mode_of(like):
        if node.op == "call_method":
            node.meta[key] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            node.meta[key] = node.target(*args, **kwargs)  # type: ignore[operator]
