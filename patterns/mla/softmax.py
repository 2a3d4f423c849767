"""Softmaxes over one dimension, as one operator or by hand; that it is the keys' the proof says.

w = exp(s - max s)
softmax(s) v  =  (w / sum w) v  =  (w v) / sum w  =  exp(s - logsumexp s) v  =  exp(log_softmax s) v
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import SOFTMAXES

LOG = "_log_softmax"
MAX_STEPS = 8


@dataclass(frozen=True)
class Softmax:
    """``op`` has the scores' shape and stands for the softmax in reports."""

    op: Op
    scores: Value
    weights: Value
    """What the values are multiplied with."""
    dim: int
    """Along which weights add up to one; below zero if that is not one dimension."""
    sums: list[Op] = field(default_factory=list[Op])
    """Other readers of the weights that belong to the softmax: their sum, where it divides the result instead."""


def find_softmaxes(graph: Graph) -> Iterator[Softmax]:
    for op in graph.ops:
        if op.out.const:
            continue
        if op.name in SOFTMAXES:
            yield Softmax(op, op.reads[0], op.out, _dim(op.out, op.args[1]))
        elif op.name == "exp" and len(op.out.shape) > 1:
            found = _by_hand(op)
            if found is not None:
                yield found


def _by_hand(exp: Op) -> Softmax | None:
    before = _source(exp.reads[0])
    if before is not None and before.name == LOG:
        return Softmax(exp, before.reads[0], exp.out, _dim(before.out, before.args[1]))
    below = _below_its_logsumexp(exp.reads[0])
    if below is not None:
        return Softmax(exp, below[0], exp.out, below[1])
    sums = [user for user in exp.out.users if user.name == "sum" and len(user.args) > 1]
    if len(sums) != 1:
        return None
    dim = _dim(exp.out, sums[0].args[1])
    divided = next((user for user in exp.out.users if divides(user, sums)), None)
    if divided is not None:
        return Softmax(exp, exp.reads[0], divided.out, dim)
    return Softmax(exp, exp.reads[0], exp.out, dim, sums)


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
    return root(value).op


def _below_its_logsumexp(value: Value) -> tuple[Value, int] | None:
    op = value.op
    if op is None or op.name != "sub" or len(op.reads) != 2:
        return None
    scores, total = op.reads[0], _source(op.reads[1])
    if total is None or total.name != "logsumexp" or total.reads[0] is not scores:
        return None
    return scores, _dim(scores, total.args[1])


def _dim(value: Value, dims: int | Sequence[int]) -> int:
    one = [dims] if isinstance(dims, int) else list(dims)
    return one[0] % len(value.shape) if len(one) == 1 else -1
