"""Inputs that share memory: writing one changes the other, which the functional graph cannot see: there
every input is a buffer of its own.

Dynamo hands such inputs over as they are and AOTAutograd takes care of them afterwards; it also guards which inputs
overlap. So a graph that overwrites one of them is left alone as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import local
from kdacompile.graph.ir import Graph

LARGEST = 1 << 22
"""Blocks of memory that are compared one by one; views spread over more count as overlapping."""


def overwritten(functional: Graph, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """What the graph writes while something else lies, in part, in the same memory: an input beside another input, what
    a call on a tensor subclass has yielded.
    """
    written = {mutation.storage for mutation in functional.mutations}
    if not written:
        return None
    nodes = list(nodes)
    for node in nodes:
        inside = local.is_wrapped(compat.example_value(node)) or local.touches(node)
        if inside and functional.storages.get(node) in written:
            return node
    shared: dict[Any, list[tuple[fx.Node, torch.Tensor]]] = {}
    for node in nodes:
        value = compat.example_value(node)
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            shared.setdefault(compat.memory_of(value), []).append((node, value))
    for inputs in shared.values():
        for pair in itertools.combinations(inputs, 2):
            target = next((node for node, _ in pair if functional.storages.get(node) in written), None)
            if target is not None and overlap(pair[0][1], pair[1][1]):
                return target
    return None


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True unless two views of one storage have no element in common (their sizes must be fixed to tell)."""
    if one.dtype.itemsize != other.dtype.itemsize or any(compat.free_symbols(view) for view in (one, other)):
        return True
    starts = [int(view.storage_offset()) for view in (one, other)]
    extents = [sum((n - 1) * s for n, s in _dims(view)) + 1 for view in (one, other)]
    if one.numel() == 0 or other.numel() == 0:
        return False
    if starts[0] + extents[0] <= starts[1] or starts[1] + extents[1] <= starts[0]:
        return False
    return _share_blocks(_dims(one), _dims(other), starts, max(a + b for a, b in zip(starts, extents, strict=True)))


def _share_blocks(one: list[tuple[int, int]], other: list[tuple[int, int]], starts: list[int], end: int) -> bool:
    """Compare the views by blocks that both hold in one piece."""
    run = _run(one)
    if run != _run(other):
        run = 1
    outer = [[(n, s) for n, s in dims if s >= run] for dims in (one, other)]
    unit = math.gcd(starts[1] - starts[0], *(s for dims in outer for _, s in dims))
    if unit < run:
        outer, unit = [one, other], 1
    first = min(starts)
    if (end - first) // unit >= LARGEST:
        return True
    taken = torch.zeros((end - first) // unit + 1, dtype=torch.bool)
    views = [
        taken.as_strided([n for n, _ in dims], [s // unit for _, s in dims], (start - first) // unit)
        for dims, start in zip(outer, starts, strict=True)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _dims(view: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions along which a view moves, innermost first."""
    pairs = ((int(n), int(s)) for n, s in zip(view.shape, view.stride(), strict=True))
    return sorted(((n, s) for n, s in pairs if n > 1 and s > 0), key=lambda pair: pair[1])


def _run(dims: list[tuple[int, int]]) -> int:
    """How many elements lie side by side."""
    run = 1
    for size, stride in dims:
        if stride != run:
            break
        run *= size
    return run
