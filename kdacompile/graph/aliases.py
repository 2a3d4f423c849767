"""Inputs that share memory: writing one changes the other, which the functional graph cannot see: there
every input is a buffer of its own.

Dynamo hands such inputs over as they are and AOTAutograd takes care of them afterwards; it also guards which inputs
overlap. So a graph that overwrites one of them is left alone as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import local
from kdacompile.graph.ir import Graph

MOST_WORK = 1 << 20
"""What is tried to find an element that two views share; views that take more count as overlapping."""


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
    if any(compat.free_symbols(view) for view in (one, other)):
        return True
    try:
        import numpy  # torch runs without it
    except ImportError:
        return True
    try:
        return numpy.shares_memory(*(numpy.asarray(_addresses(view)) for view in (one, other)), max_work=MOST_WORK)
    except RuntimeError:  # more work than that
        return True


def _addresses(view: torch.Tensor) -> SimpleNamespace:
    """What numpy makes an array of that lies as the view does, at addresses that nobody reads."""
    size = view.dtype.itemsize
    steps = tuple(int(stride) * size for stride in view.stride())
    start = (int(view.storage_offset()) + 1) * size  # no array is at address 0
    facts = {"data": (start, True), "shape": tuple(map(int, view.shape)), "strides": steps, "typestr": f"|V{size}"}
    return SimpleNamespace(__array_interface__={**facts, "version": 3})
