"""Caches that are gathered page by page: the op takes the pool and the block table, and nothing is gathered.

    cache[b, i * page + j] = pool[table[b, i], j]

What a gather is followed by is read off the graph: views keep the order of the elements, so a cache that is a view of
``pool[table]`` is that formula, whatever the tables and pools hold. Anything else leaves the gathered cache to the op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import first_column, root
from kdacompile.patterns.engine.vocabulary import ORDERED
from kdacompile.patterns.mla.definition import AXES, LatentAttention, place

CACHES = ("cache", "latent", "k_rope")
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Gather:
    """``pool[table]``, of which ``columns`` are meant; ``wraps``: an entry below zero counts from the pool's end."""

    pool: Value
    table: Value
    wraps: bool
    columns: tuple[int, int]


def pages_instead(binding: LatentAttention) -> LatentAttention:
    """The binding on pools and a block table in place of caches gathered from them, if all of them are.

    Only where every call attends to the latent itself: a prefill would rather expand what is gathered.
    """
    caches = {role: placement for role, placement in binding.inputs.items() if role in CACHES}
    if binding.prefix or (binding.weights and binding.sizes["T"] > 1):
        return binding
    found = {role: _gathered(placement) for role, placement in caches.items()}
    gathers = [gather for gather in found.values() if gather is not None]
    if len(gathers) != len(caches) or len({(gather.table, gather.wraps) for gather in gathers}) != 1:
        return binding
    placed = {role: _pool(role, gather) for role, gather in found.items() if gather is not None}
    table, tokens = gathers[0].table, binding.sizes["B"] * binding.sizes["S"]
    pages = {_page(placement) * math.prod(table.shape) for placement in placed.values() if placement is not None}
    if None in placed.values() or pages != {tokens} or len({gather.pool.shape[0] for gather in gathers}) != 1:
        return binding
    pools = {role: placement for role, placement in placed.items() if placement is not None}
    axes = "BM" if len(table.shape) == 2 and table.shape[0] == binding.sizes["B"] else "*" * len(table.shape)
    block_table = place("block_table", table, axes)
    inputs = binding.inputs | pools | {"block_table": block_table}
    return binding.with_(inputs=inputs, wraps=gathers[0].wraps)


def _pool(role: str, gather: _Gather) -> Placement | None:
    """The pool in the role of the cache gathered from it; a page has one dimension at most."""
    _, *between, _ = shape = gather.pool.shape
    long = [index for index, size in enumerate(between, 1) if size > 1]
    if len(long) > 1:
        return None
    axes = ["."] * len(shape)
    axes[0], axes[-1] = "P", AXES[role][-1]
    if between:
        axes[long[0] if long else 1] = "G"
    return place(role, gather.pool, "".join(axes), gather.columns)


def _page(pool: Placement) -> int:
    """Tokens of a page."""
    return pool.value.shape[pool.axes.index("G")] if "G" in pool.axes else 1


def _gathered(placement: Placement) -> _Gather | None:
    """The gather that a cache is a view of, with all its tokens."""
    bare = placement.axes.replace(".", "")
    if bare != "".join(axis for axis in placement.order if axis in bare):
        return None
    value, start, width = placement.value, 0, placement.value.shape[-1]
    while value.op is not None and value.op.name not in ("index", "index_select"):
        op = value.op
        if op.name in ORDERED and op.reads[0].shape[-1] == value.shape[-1]:
            value = op.reads[0]
            continue
        offset = first_column(value)
        if offset is None:
            return None
        start, value = start + offset, op.reads[0]
    if value.op is None:
        return None
    return _gather(value.op, (start, start + width))


def _gather(op: Op, columns: tuple[int, int]) -> _Gather | None:
    """``pool[table]`` or ``pool.index_select(0, table)``, along the first dimension."""
    if op.name == "index":
        pool, indices = op.args
        table = indices[0] if all(index is None for index in indices[1:]) else None
        wraps = True
    else:
        pool, dim, table = op.args
        table, wraps = (table if dim == 0 else None), False
    if table is None or table.dtype not in INTEGERS or len(pool.shape) < 2 or pool.node is None:
        return None
    entries = _named(table)
    if entries is None:
        return None
    return _Gather(pool, entries, wraps and not _counts_from_the_front(table), columns)


def _named(table: Value) -> Value | None:
    """The nearest value that a node yields with the same entries in the same order; widening changes none."""
    best, step = table if table.node is not None else None, table
    while step.op is not None:
        source = step.op.reads[0] if step.op.reads else step
        widened = step.op.name == "_to_copy" and source.dtype is torch.int32
        if not widened and (step.op.name not in ORDERED or (step is best and len(step.shape) == 2)):
            break
        step = source
        best = step if step.node is not None else best
    return best


def _counts_from_the_front(table: Value) -> bool:
    """True if no entry can be below zero."""
    source = root(table)
    if source.const:
        try:
            return bool((constant(source) >= 0).all())
        except EvaluationError:
            return False
    op = source.op
    if op is None or op.name not in ("clamp", "clamp_min", "relu"):
        return False
    least = 0 if op.name == "relu" else op.args[1] if len(op.args) > 1 else None
    return isinstance(least, int) and least >= 0
