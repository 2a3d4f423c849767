"""Pieces of a tensor along one dimension: how loops over tokens and chunks spell them.

x[:, t]   x[:, t, :, None]   x[0, t]   x.select(1, t)   x.unbind(1)[t]   for x_t in x   one index: the dimension goes
x[:, i:j]   x.narrow(1, i, n)   x.split(n, 1)[i]   x.chunk(n, 1)[i]                        a slice: it stays
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kdacompile import compat


@dataclass(frozen=True)
class Piece:
    """Piece ``index`` of the ``count`` equal ones that ``source`` consists of along ``dim``."""

    source: fx.Node
    dim: int
    index: int
    count: int
    width: int
    """Entries in each; 0 where the dimension goes."""
    rest: tuple[Any, ...] = ()
    """What else the index holds (``:``, ``None``), without the part that picks the piece."""


def piece_of(node: fx.Node) -> Piece | None:
    """The piece a node takes; None if it takes none, or one that is not like the others."""
    if node.op == "call_method" and node.target in ("select", "narrow") and not node.kwargs:
        dim, start, *width = node.args[1:]
        return _piece(node.args[0], dim, start, width[0] if width else 0)
    base: Any = node.args[0] if node.args else None
    if node.target is not operator.getitem or not isinstance(base, fx.Node):
        return None
    index: Any = node.args[1]
    value = compat.example_value(base)
    if isinstance(value, torch.Tensor):
        return piece_at(base, index)
    return _by_list(base, value, index) if isinstance(value, (list, tuple)) and isinstance(index, int) else None


def piece_at(base: fx.Node, index: Any) -> Piece | None:
    """The piece of a tensor that ``base[index]`` is."""
    return _by_index(base, compat.example_value(base), index if isinstance(index, tuple) else (index,))


def _by_index(base: fx.Node, value: torch.Tensor, index: tuple[Any, ...]) -> Piece | None:
    """``base[index]`` with one number or one slice in it that takes less than everything: the number of a dimension of
    size one only takes that away.
    """
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in index):
        return None
    if any(isinstance(item, bool) for item in index) or index.count(Ellipsis) > 1:
        return None
    spelled = sum(item is not None and item is not Ellipsis for item in index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (value.dim() - spelled), *index[place + 1 :])
    dims = [sum(item is not None for item in index[:i]) for i in range(len(index))]
    sizes: list[Any] = [value.shape[dim] if item is not None else 0 for dim, item in zip(dims, index, strict=True)]
    picks = [i for i, item in enumerate(index) if item is not None and item != slice(None)]
    alone = [i for i in picks if isinstance(index[i], int) and isinstance(sizes[i], int) and sizes[i] == 1]
    alone = alone[: len(picks) - 1]
    if len(picks) - len(alone) != 1:
        return None
    place = next(i for i in picks if i not in alone)
    dim = dims[place]
    rest = (*index[:place], *index[place + 1 :])
    pick = index[place]
    if isinstance(pick, int):
        return _piece(base, dim, pick, 0, rest if alone or None in rest else ())
    size: Any = value.shape[dim]  # may be a symbol
    if pick.step not in (None, 1) or alone or None in rest or not isinstance(size, int):
        return None
    bounds = (pick.start, pick.stop)
    if any(not (bound is None or isinstance(bound, int)) for bound in bounds):
        return None
    start, stop, _ = pick.indices(size)
    return _piece(base, dim, start, stop - start)


def _by_list(base: fx.Node, value: Any, index: int) -> Piece | None:
    """Element ``index`` of ``unbind``, ``split`` or ``chunk``."""
    name = base.target if isinstance(base.target, str) else getattr(base.target, "__name__", "")
    if name not in ("unbind", "split", "chunk") or not base.args or not isinstance(base.args[0], fx.Node):
        return None
    place = 1 if name == "unbind" else 2
    dim = base.args[place] if len(base.args) > place else base.kwargs.get("dim", 0)
    if not isinstance(dim, int) or not -len(value) <= index < len(value):
        return None
    index %= len(value)
    if name == "unbind":
        return _piece(base.args[0], dim, index, 0)
    widths = [part.shape[dim] for part in value]
    width = widths[0]
    if not isinstance(width, int) or any(not isinstance(each, int) or each != width for each in widths):
        return None  # symbols cannot be compared without a guard
    return _piece(base.args[0], dim, index * width, width)


def _piece(source: Any, dim: Any, start: Any, width: Any, rest: tuple[Any, ...] = ()) -> Piece | None:
    value = compat.example_value(source) if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in (dim, start, width)):
        return None
    dim %= max(1, value.dim())
    size = value.shape[dim]
    step = max(1, width)
    if not isinstance(size, int) or size % step or start % step or not -size <= start < size:
        return None
    return Piece(source, dim, start % size // step, size // step, width, rest)
