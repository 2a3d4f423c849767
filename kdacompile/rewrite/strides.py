"""How a value lies in memory, be its sizes fixed or open, and what a copy in some order of dimensions would change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.prefilter import concatenated


def order(want: torch.Tensor) -> list[int]:
    """Dimensions, those that are farthest apart in memory first."""
    return sorted(range(want.dim()), key=lambda d: (-compat.size_hint(want.stride(d)), d))


def packed(want: torch.Tensor) -> list[Any]:
    """The strides of a copy without gaps in this order of dimensions."""
    found, run = list[Any](want.stride()), 1
    for dim in reversed(order(want)):
        found[dim], run = run, run * want.shape[dim]
    return found


def has_gaps(want: torch.Tensor) -> bool:
    """Whether ``want`` lies otherwise than such a copy at some of its sizes."""
    pairs = zip(want.shape, want.stride(), packed(want), strict=True)
    return any(not compat.is_one(size) and not compat.alike(own, dense) for size, own, dense in pairs)


def same(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether both have the same strides wherever a dimension has more than one entry."""
    pairs = zip(want.shape, have.stride(), want.stride(), strict=True)
    return all(compat.is_one(size) or str(ours) == str(theirs) for size, ours, theirs in pairs)


def like_channels(x: torch.Tensor, steps: Sequence[Any] | None = None) -> bool:
    """Whether torch takes the second dimension of ``x`` (with the strides ``steps``) for the innermost, as it does
    before ``cat`` and ``roll`` choose how their results lie: strides of dimensions of size one decide that too.
    """
    if x.dim() not in (4, 5):
        return False
    sizes, found = ([int(compat.size_hint(n)) for n in numbers] for numbers in (x.shape, steps or x.stride()))
    least = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if found[dim] < least or found[1] == 0 or (dim == 0 and least == found[1]):
            return False
        least = found[dim] * sizes[dim]
    return True


# -- caches that are empty yet ----------------------------------------------------------------------------------------
# ``torch.cat([empty, keys])`` is contiguous. Inductor makes it a copy of ``keys`` that keeps their strides, and those
# are of another order where heads and tokens have been exchanged. The first step over such a cache would be captured
# for these strides, and the second, whose cache a step has made, once more. Where a cache has no columns (rotated keys
# of width 0), Inductor returns ``keys`` themselves, with strides of 0.


def settle(graph: fx.Graph) -> bool:
    """Have results that are one tensor concatenated with nothing copied into the strides of eager mode.

    True if there were any.
    """
    changed = False
    for node in list(concatenated(graph)):
        full = [each for each in node.all_input_nodes if _sizes(each) != [0]]  # what caches begin as
        if len(full) != 1 or len(node.all_input_nodes) == 1:
            continue
        if compat.example_value(full[0]).dtype != compat.example_value(node).dtype:
            continue
        nothing = 0 in _sizes(node) and not compat.example_value(node).requires_grad
        if not nothing and _layout(full[0]) == _layout(node):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(
                torch.empty_like if nothing else torch.clone,
                (full[0],),
                {"memory_format": torch.contiguous_format},
            )
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        changed = True
    return changed


def _sizes(node: fx.Node) -> list[int | None]:
    """The shape, with None for open sizes."""
    return [size if isinstance(size, int) else None for size in compat.example_value(node).shape]


def _layout(node: fx.Node) -> list[int]:
    return [compat.size_hint(stride) for stride in compat.example_value(node).stride()]
