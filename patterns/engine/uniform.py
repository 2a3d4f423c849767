"""Dimensions along which a value is the same by construction: expanded ones, and pointwise functions of those.

Models expand a step size or a bias to the shape of the state before an activation; the recurrence wants the tensor
before the expand. One entry of a uniform dimension stands for all of them.
"""

from __future__ import annotations

from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.values import turn
from kdacompile.patterns.engine.vocabulary import AS_IS, ELEMENTWISE, TURNS

ALIKE = ELEMENTWISE | AS_IS | {"_to_copy"}


def mark_uniform(graph: Graph) -> None:
    """Fill in ``Value.uniform`` for every value of ``graph``."""
    for op in graph.ops:
        op.out.uniform = _of(op)
        if op.name in ("split", "split_with_sizes"):
            for out in op.outs:
                out.uniform = op.reads[0].uniform


def _of(op: Op) -> frozenset[int]:
    shape = op.out.shape
    if op.name == "expand":
        source = op.reads[0]
        offset = len(shape) - len(source.shape)
        grown = {d for d in range(len(shape)) if shape[d] > 1 and (d < offset or source.shape[d - offset] == 1)}
        return frozenset(grown | {d + offset for d in source.uniform})
    if op.name == "repeat":
        source = op.reads[0]
        offset = len(shape) - len(source.shape)
        return frozenset(d for d in range(len(shape)) if shape[d] > 1 and (d < offset or _same(source, d - len(shape))))
    if op.name == "cat" and op.reads:
        along = op.args[1] % len(shape) if len(op.args) > 1 else 0
        return frozenset(d for d in range(len(shape)) if d != along and all(d in v.uniform for v in op.reads))
    if op.name in ALIKE and op.reads:
        return frozenset(
            d for d in range(len(shape)) if shape[d] > 1 and all(_same(v, d - len(shape)) for v in op.reads)
        )
    source_dims = op.reads[0].uniform if len(op.reads) == 1 else frozenset()
    if not source_dims:
        return frozenset()
    rank = len(op.reads[0].shape)
    if op.name == "slice":
        return source_dims
    if op.name == "unsqueeze":
        at = op.args[1] % (rank + 1)
        return frozenset(d + (d >= at) for d in source_dims)
    if op.name in TURNS:
        return frozenset(i for i, d in enumerate(turn(op)) if d in source_dims)
    return frozenset()


def _same(value: Value, from_right: int) -> bool:
    """True if ``value`` does not vary along the dimension counted from the right."""
    dim = len(value.shape) + from_right
    return dim < 0 or value.shape[dim] == 1 or dim in value.uniform
