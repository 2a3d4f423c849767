"""Tensor subclasses around other tensors, DTensor above all: what a call on them does to the tensors inside.

``torch.distributed`` is asked for only where it was imported already: that takes a second.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from kdacompile.compat.nodes import RUN_ERRORS, called, example_value, fake_mode_of, is_detach, is_random, unlogged

_MODULE = "torch.distributed.tensor"
_SAME = ("aten::detach", "aten::alias")

Mesh = frozenset[int]
"""Dimensions of a mesh."""


def is_distributed(value: Any) -> bool:
    """True for a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, int, type(None))


def is_wrapped(value: Any) -> bool:
    """True for a tensor subclass around other tensors, and for collections that hold one."""
    if type(value) in _PLAIN:
        return False
    leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
    return any(isinstance(x, torch.Tensor) and is_traceable_wrapper_subclass(x) for x in leaves)


def touches(node: fx.Node) -> bool:
    """True for a call that reads or yields a tensor subclass."""
    given = (node, *node.all_input_nodes)
    return node.op in ("call_function", "call_method") and any(is_wrapped(example_value(each)) for each in given)


def is_to_local(node: fx.Node) -> bool:
    """True for ``x.to_local()`` without anything else said of its gradient."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name not in ("to_local", "prim_to_local") or not is_distributed(example_value(node.all_input_nodes[0])):
        return False
    held = inspect.getclosurevars(node.target).nonlocals if inspect.isfunction(node.target) else {}
    return not any([*node.args[1:], *node.kwargs.values(), held.get("args_as_value"), held.get("kwargs_as_value")])


def inside(value: Any) -> torch.Tensor:
    """This rank's tensor of a DTensor."""
    return value._local_tensor


def placements(value: Any) -> tuple[Any, ...]:
    """What a DTensor is along each dimension of its mesh."""
    return tuple(value.placements)


def cuts(value: Any) -> Mesh | None:
    """The dimensions of the mesh along which DTensors are sharded; None where a rank holds something else than a part
    or all of one (a partial sum, a strided shard), and for other tensors.
    """
    module, found = sys.modules.get(_MODULE), set[int]()
    for item in tree_leaves(value):
        if module is None or not isinstance(item, module.DTensor):
            return None
        for index, placement in enumerate(item.placements):
            if type(placement) is module.Shard:
                found.add(index)
            elif type(placement) is not module.Replicate:
                return None
    return frozenset(found)


def gradient_placements(value: Any, cut: Mesh) -> tuple[Any, ...]:
    """What the gradient of a rank's tensor is to that of the DTensor, where each rank computes its own part along the
    mesh's dimensions ``cut``: a part of it, or for what all ranks read one summand.
    """
    module = sys.modules[_MODULE]
    pairs = enumerate(value.placements)
    return tuple(module.Partial() if index in cut and place.is_replicate() else place for index, place in pairs)


def distributed_like(part: torch.Tensor, like: Any, places: tuple[Any, ...], sizes: Any, strides: Any) -> Any:
    """A DTensor of which ``part`` is this rank's part, on the mesh of ``like``."""
    given = {"shape": torch.Size(sizes), "stride": tuple(strides)}
    return sys.modules[_MODULE].DTensor.from_local(part, like.device_mesh, places, run_check=False, **given)


@dataclass
class Recorded:
    """One operator on plain tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def passes_on(self) -> bool:
        """True for autograd's own bookkeeping."""
        return getattr(self.target, "name", str)().startswith(_SAME)


@dataclass
class Trace:
    """What a call on DTensors does on a rank."""

    calls: list[Recorded]
    result: Any
    alike: bool
    """Whether the same call on the rank's parts comes to the same operators."""


class _InnerCalls(TorchDispatchMode):
    """Writes down the operators that calls on tensor subclasses come to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass comes first, and calls what is written down
        result = func(*args, **(kwargs or {}))
        self.calls.append(Recorded(func, args, kwargs or {}, result))
        return result


def trace(node: fx.Node) -> Trace | None:
    """What a call on DTensors does to this rank's parts; None where ranks exchange something, or nothing is known."""
    args, kwargs = map_arg((node.args, node.kwargs), example_value)
    whole, calls = _recorded(node, args, kwargs)
    if whole is None or cuts(whole) is None or not _agree(whole, example_value(node)):
        return None
    result = _parts(whole)
    calls = _needed(calls, result)
    if any(getattr(call.target, "namespace", "") != "aten" or is_random(call.target) for call in calls):
        return None
    again, others = _recorded(node, *_parts((args, kwargs)))
    alike = again is not None and _same((calls, result), (_needed(others, again), again))
    return Trace(calls, result, alike) if alike or not (is_detach(node) or isinstance(result, (list, tuple))) else None


@dataclass
class Coded:
    """A product with a weight that a tensor subclass holds as codes: ``calls`` make ``weight`` [in, out] of the tensors
    inside, and ``factors`` [out], which the product is multiplied by.
    """

    calls: list[Recorded]
    weight: torch.Tensor
    factors: list[torch.Tensor]


def coded_product(node: fx.Node) -> Coded | None:
    """What ``linear(x, weight)`` does with a weight that is a tensor subclass around plain tensors, no DTensor; None if
    that is anything but the product with a weight in x's dtype, times factors.
    """
    args: tuple[Any, ...] = map_arg(node.args, example_value)
    x, weight = args[:2]
    if node.kwargs or is_wrapped(x) or is_distributed(weight) or any(each is not None for each in args[2:]):
        return None
    held = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    result, calls = _recorded(node, args, {})
    if any(map(is_wrapped, held)) or result is None or result.dtype != x.dtype or not all(map(_is_pure, calls)):
        return None
    known, of_x = {id(each) for each in (x, *held)}, {id(x)}
    out, product, found = weight.shape[0], False, Coded([], x, [])
    for call in _needed(calls, result):
        leaves = tree_leaves((call.args, call.kwargs))
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        if not {id(each) for each in given} <= known:
            return None
        known.add(id(call.result))
        if of_x.isdisjoint(map(id, given)):
            found.calls.append(call)
            if any(isinstance(each, torch.SymInt) for each in leaves):
                return None
            continue
        of_x.add(id(call.result))
        name, others = str(call.target).removeprefix("aten.").partition(".")[0], given[1:]
        if id(given[0]) not in of_x or any(id(each) in of_x or each.dtype != x.dtype for each in others):
            return None
        if name == "mm" and not product and others[0].shape == weight.shape[::-1]:
            product, found.weight = True, others[0]
        elif name == "mul" and product and others and others[0].shape[-1:].numel() == others[0].numel() == out:
            if call.result.shape[-1] != out:
                return None
            found.factors += others
        elif name not in ("view", "_unsafe_view", "reshape"):
            return None
    return found if product else None


def _is_pure(call: Recorded) -> bool:
    """True for an operator of torch's own that draws nothing and writes nothing."""
    target: Any = call.target
    own = getattr(target, "namespace", "") in ("aten", "prim")
    return own and not target._schema.is_mutable and not is_random(target)


def _recorded(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, list[Recorded]]:
    """The result of a call on example values, and its operators; no result where it cannot be made."""
    with _disable_current_modes(), fake_mode_of(node), torch.no_grad(), unlogged(), _InnerCalls() as inner:
        try:
            return called(node.target, args, kwargs), inner.calls
        except RUN_ERRORS:
            return None, []


def _parts(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: inside(x) if is_distributed(x) else x, tree)


def _agree(one: Any, other: Any) -> bool:
    """Whether DTensors are of the same sizes and sharded alike."""
    pairs = [tree_leaves(one), tree_leaves(other)]
    told = [[(str(tuple(x.shape)), str(tuple(inside(x).shape)), placements(x)) for x in each] for each in pairs]
    return told[0] == told[1]


def _needed(calls: Iterable[Recorded], result: Any) -> list[Recorded]:
    """Those that the result is made by: a subclass also computes what its results will look like."""
    wanted, kept = {id(x) for x in tree_leaves(result)}, list[Recorded]()
    for call in reversed(list(calls)):
        if any(id(x) in wanted for x in tree_leaves(call.result)):
            kept.append(call)
            wanted |= {id(x) for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor)}
    return kept[::-1]


def _same(one: tuple[list[Recorded], Any], other: tuple[list[Recorded], Any]) -> bool:
    """Whether the same operators are called on the same tensors, in the same order."""
    (calls, result), (others, again) = one, other
    names: dict[int, int] = {}

    def told(tree: Any, known: dict[int, int]) -> list[Any]:
        return [known.get(id(x), id(x)) if isinstance(x, torch.Tensor) else str(x) for x in tree_leaves(tree)]

    if len(calls) != len(others):
        return False
    for call, second in zip(calls, others, strict=True):
        given = (second.args, second.kwargs)
        if call.target is not second.target or told((call.args, call.kwargs), {}) != told(given, names):
            return False
        pairs = zip(tree_leaves(second.result), tree_leaves(call.result), strict=False)
        names |= {id(new): id(old) for new, old in pairs if isinstance(new, torch.Tensor)}
    return told(result, {}) == told(again, names)
