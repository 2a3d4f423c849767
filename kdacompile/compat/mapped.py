"""What runs under ``torch.vmap`` in Dynamo's graph, and the operators that it comes to on the tensors behind."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._C._functorch import get_dynamic_layer_stack_depth, pop_dynamic_layer_stack_and_undo_to_depth
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from kdacompile.compat.local import Recorded
from kdacompile.compat.nodes import RUN_ERRORS, called, example_value, fake_mode_of, unlogged
from kdacompile.compat.operators import TorchDispatchMode, map_tensors, operator_name, overload_name, tree_leaves

_CHANGES = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def mapping_change(node: fx.Node) -> int:
    """+1 where vmap begins, -1 where it ends."""
    return _CHANGES.get(getattr(node.target, "__name__", ""), 0)


class _Calls(TorchDispatchMode):
    """Writes down the operators that reach plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[fx.Node, Recorded]] = []
        self.node: Any = None
        """What is run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            return self.reshape(func, args, kwargs)
        result = func(*args, **kwargs)
        self.calls.append((self.node, Recorded(func, args, kwargs, result)))
        return result

    def reshape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that gives a tensor another shape: a view, and what came before has the tensor as it was."""
        before = torch.ops.aten.alias(args[0]).requires_grad_(args[0].requires_grad)
        for index in reversed(range(len(self.calls))):
            node, call = self.calls[index]
            args_before, kwargs_before, result = map_tensors(
                (call.args, call.kwargs, call.result), lambda x: before if x is args[0] else x
            )
            self.calls[index] = node, Recorded(call.target, args_before, kwargs_before, result)
            if call.result is args[0]:
                break
        else:
            raise RuntimeError("it gives what it was given another shape")
        name = operator_name(func).removeprefix("aten::").removesuffix("_")
        view = getattr(getattr(torch.ops.aten, name), overload_name(func))
        result = func(*args, **kwargs)
        self.calls.append((self.node, Recorded(view, (before, *args[1:]), kwargs, result)))
        return result


class Ran(NamedTuple):
    """The operators, in order, with the nodes that came to them; and what each node yielded."""

    calls: list[tuple[fx.Node, Recorded]]
    values: dict[fx.Node, Any]


def run(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> Ran | None:
    """Runs ``nodes``, from where vmap begins to where it ends, on the example values of ``inputs``, which they read.
    None where it takes data to run them, and where operators do not say all.
    """
    values = {node: example_value(node) for node in inputs}
    tensor = next((node for node in inputs if isinstance(values[node], torch.Tensor)), None)
    if tensor is None or torch.is_autocast_enabled(values[tensor].device.type):
        return None
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes):
        return None  # it may have a gradient of its own
    with _disable_current_modes(), fake_mode_of(tensor), unlogged(), _unwound(), _Calls() as inner:
        try:
            for node in nodes:
                inner.node = node
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = called(node.target, args, kwargs)
        except RUN_ERRORS:
            return None
    given = tree_leaves([(call.args, call.kwargs) for _, call in inner.calls])
    return None if any(isinstance(x, (torch.SymFloat, torch.SymBool)) for x in given) else Ran(inner.calls, values)


@contextmanager
def _unwound() -> Generator[None]:
    """Ends what vmap has begun where an error keeps its own end from being run."""
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        pop_dynamic_layer_stack_and_undo_to_depth(depth)
