"""Softmaxes over the last dimension, as one operator or by hand.

w = exp(s - max s)
softmax(s) v  =  (w / sum w) v  =  (w v) / sum w  =  exp(s - logsumexp s) v
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kdacompile.patterns.ir import Graph, Op, Value
from kdacompile.patterns.vocabulary import LAYOUT

WHOLE = frozenset({"_softmax", "_safe_softmax"})
MAX_STEPS = 8


@dataclass(frozen=True)
class Softmax:
    """``op`` has the scores' shape and stands for the softmax in reports."""

    op: Op
    scores: Value
    weights: Value
    """What the values are multiplied with."""
    sums: list[Op] = field(default_factory=list[Op])
    """Other readers of the weights that belong to the softmax: their sum, where it divides the result instead."""


def find_softmaxes(graph: Graph) -> Iterator[Softmax]:
    for op in graph.ops:
        if op.out.const:
            continue
        if op.name in WHOLE and _is_last(op.args[1], op.out):
            yield Softmax(op, op.reads[0], op.out)
        elif op.name == "exp" and len(op.out.shape) > 1:
            found = _by_hand(op)
            if found is not None:
                yield found


def _by_hand(exp: Op) -> Softmax | None:
    scores = _below_its_logsumexp(exp.reads[0])
    if scores is not None:
        return Softmax(exp, scores, exp.out)
    sums = [user for user in exp.out.users if user.name == "sum" and _sums_last(user)]
    if len(sums) != 1:
        return None
    divided = next((user for user in exp.out.users if divides(user, sums)), None)
    if divided is not None:
        return Softmax(exp, exp.reads[0], divided.out)
    return Softmax(exp, exp.reads[0], exp.out, sums)


def divides(op: Op, sums: list[Op]) -> bool:
    """True for ``x / sum`` and ``x * (1 / sum)``."""
    if op.name not in ("div", "mul") or len(op.reads) != 2:
        return False
    step = _source(op.reads[1])
    if op.name == "mul":
        if step is None or step.name != "reciprocal":
            return False
        step = _source(step.reads[0])
    return step in sums


def _source(value: Value) -> Op | None:
    """What makes a value, rearrangements aside."""
    op = value.op
    while op is not None and op.name in LAYOUT:
        op = op.reads[0].op
    return op


def _below_its_logsumexp(value: Value) -> Value | None:
    op = value.op
    if op is None or op.name != "sub" or len(op.reads) != 2:
        return None
    scores, total = op.reads[0], _source(op.reads[1])
    if total is None or total.name != "logsumexp" or total.reads[0] is not scores:
        return None
    return scores if _is_last(total.args[1], scores) else None


def _sums_last(op: Op) -> bool:
    return len(op.args) > 1 and _is_last(op.args[1], op.reads[0])


def _is_last(dim: object, value: Value) -> bool:
    last = len(value.shape) - 1
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]  # type: ignore[arg-type]
    return len(dims) == 1 and dims[0] in (-1, last)
