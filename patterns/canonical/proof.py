"""The proof of a hoist: what every piece of the whole is worth, next to what the loop computes in its place.

Both stand in the graph until the hoist is accepted. They are run on the same random values, in float64, from the first
tensors that the hoist did not touch: if they agree for any values of those, they agree for any input of the graph. A
second walk sees to what numbers do not tell: sizes, dtypes and devices, memory that results share, and readers that
ask for another layout than the pieces now have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.compat.schemas import write_count
from kdacompile.graph.ir import Graph

TOLERANCE = 1e-12
"""Relative error in float64: the same operators on the same numbers, products summed in another order at most."""

LIMIT = 1 << 25
"""Elements, of all values together, up to which a hoist is run."""

MAX_NODES = 20_000

PROBES = ("normal", "normal", "normal", "positive", "negative", "large", "zeros")
LARGE = 100.0

Pairs = Collection[tuple[fx.Node, fx.Node]]
"""(a piece of the whole, the node of the loop that it stands for)"""

RUN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
CASTS = frozenset({"float", "double", "half", "bfloat16"})


class _Refused(Exception):
    """The pieces cannot be compared."""


def agrees(pairs: Pairs, inside: Collection[fx.Node]) -> bool:
    """True if each piece equals its node whatever the tensors are that ``inside`` (old and new calls) reads."""
    if not all(_alike(compat.example_value(piece), compat.example_value(old)) for piece, old in pairs):
        return False
    try:
        nodes = _cone(pairs, inside)
        with torch.no_grad(), compat.no_fake_modes():
            return all(_agrees_on(probe, seed, nodes, pairs, inside) for seed, probe in enumerate(PROBES))
    except (_Refused, *RUN_ERRORS):
        return False


def _alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _cone(pairs: Pairs, inside: Collection[fx.Node]) -> list[fx.Node]:
    """What the pairs are computed from, first things first; the search ends at tensors that the hoist did not touch."""
    if not pairs:
        raise _Refused("nothing was brought together")
    found: set[fx.Node] = set()
    stack = [node for pair in pairs for node in pair]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes if _computed(node, inside) else ())
    total = sum(_elements(node) for node in found)
    if len(found) > MAX_NODES or total > LIMIT:
        raise _Refused("too much to run")
    return [node for node in next(iter(found)).graph.nodes if node in found]


def _computed(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """True for calls of the hoist, and for lists of pieces (``unbind``, ``split``, ``chunk``), which come before it."""
    return node in inside or isinstance(compat.example_value(node), (list, tuple))


def _elements(node: fx.Node) -> int:
    """Elements of a node's value; ``_Refused`` if one of its sizes is a symbol, or if it is no tensor."""
    tensors = list(_tensors(compat.example_value(node)))
    if not tensors or not all(type(size) is int for tensor in tensors for size in tensor.shape):
        raise _Refused(f"{node} has no plain sizes")
    return sum(tensor.numel() for tensor in tensors)


def _agrees_on(probe: str, seed: int, nodes: list[fx.Node], pairs: Pairs, inside: Collection[fx.Node]) -> bool:
    generator = torch.Generator().manual_seed(seed)
    env: dict[fx.Node, Any] = {}
    versions: list[tuple[Tensor, int]] = []
    for node in nodes:
        if _computed(node, inside):
            env[node] = _call(node, env)
        else:
            env[node] = _drawn(probe, compat.example_value(node), generator)
        versions.extend((tensor, write_count(tensor)) for tensor in _tensors(env[node]))
    if any(write_count(tensor) != version for tensor, version in versions):
        return False  # something was written in place
    return all(_equal(env[piece], env[old]) for piece, old in pairs)


def _drawn(probe: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of a tensor's shape: whole numbers where it holds such, else float64."""
    if not like.dtype.is_floating_point:
        if like.dtype.is_complex:
            raise _Refused("complex numbers")
        whole = torch.randint(-4, 5, tuple(like.shape), generator=generator)
        return whole > 0 if like.dtype == torch.bool else whole.to(like.dtype)
    noise = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64)
    if probe == "positive":
        return noise.abs()
    if probe == "negative":
        return -noise.abs()
    if probe == "large":
        return LARGE * noise
    return noise * (noise > 0) if probe == "zeros" else noise


def _call(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """The call itself, on the CPU, with float64 for every floating dtype."""
    args = _on_cpu(map_arg(node.args, env.__getitem__))
    kwargs = _on_cpu(map_arg(node.kwargs, env.__getitem__))
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op != "call_method":
        raise _Refused(f"{node} is no call")
    name = "double" if node.target in CASTS else str(node.target)
    return getattr(args[0], name)(*args[1:], **kwargs)


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, torch.device):
        return torch.device("cpu")
    if isinstance(tree, torch.dtype):
        return torch.float64 if tree.is_floating_point else tree
    if isinstance(tree, (list, tuple)):
        items = [_on_cpu(item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: "cpu" if key == "device" else _on_cpu(item) for key, item in tree.items()}
    return tree


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


# -- what numbers do not tell --------------------------------------------------------------------------------------


def readers_fit(nodes: Iterable[fx.Node], dirty: set[fx.Node], before: dict[fx.Node, dict[str, Any]]) -> bool:
    """True if everything that reads the pieces still runs and no result of the graph is laid out otherwise.

    Pieces of a whole lie further apart than tensors of their own. ``dirty``: nodes with a new argument. Example values
    follow the graph; ``before`` gets those that were there.
    """
    moved: set[fx.Node] = set()
    for node in nodes:
        if node not in dirty and moved.isdisjoint(node.all_input_nodes):
            continue
        if node.op == "output" or node.op == "call_module" or compat.is_opaque_call(node):
            return False
        known = compat.example_value(node)
        before[node] = dict(node.meta)
        try:
            compat.propagate_fake(node, node)
        except RUN_ERRORS:
            return False
        if _layout(compat.example_value(node)) != _layout(known):
            moved.add(node)
    return True


def _layout(value: Any) -> list[Any]:
    return [(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device) for x in _tensors(value)]


def results_share_memory(
    functional: Graph, new: Collection[fx.Node], results: Iterable[fx.Node], own: Collection[fx.Node]
) -> bool:
    """True if a result of the graph, or something it writes, lies in memory that a new call made. A new call that
    stands for a result itself (``own``) may, if it has the memory to itself.
    """
    first: dict[int, fx.Node] = {}
    for node, storage in functional.storages.items():
        first.setdefault(storage, node)
    made = {storage for storage, node in first.items() if node in new}
    seen = [(functional.storages[node], node) for node in results if node in functional.storages]
    shared = Counter(storage for storage, _ in seen)
    taken = {storage for storage, node in seen if node not in own or shared[storage] > 1}
    return not made.isdisjoint(taken | {mutation.storage for mutation in functional.mutations})
