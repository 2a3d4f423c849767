"""Masks that hide what lies past a number per request: the op takes the numbers instead.

    keep[b, t, s] = s < lengths[b] - T + 1 + t

A static cache is masked so, by the position it is filled up to, and so are gathered pages. Kernels then read no more of
a cache than is filled, which a mask cannot tell them. What a mask compares is read off the graph, not probed: the
tokens' numbers are a constant 0, 1, 2, .. and what they are compared with is an integer per request, for several
queries with a constant 0, 1, 2, .. added.

Where hidden scores become a finite number, a query that sees nothing averages over everything, which lengths cannot
say; and a length past the cache's end says something else for several queries. Both are ruled out if the model writes
its cache at that very position, by ``index_copy``, which takes none outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import has_node, root
from kdacompile.patterns.engine.vocabulary import ORDERED, SPREAD
from kdacompile.patterns.mla.definition import LatentAttention, place
from kdacompile.patterns.mla.masks import selection

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
NOT = frozenset({"logical_not", "bitwise_not"})
PLUS = {"lt": 0, "le": 1}
"""What makes a length of the number that a token's is below, or at most."""
INTEGERS = (torch.int32, torch.int64)


def lengths_instead(binding: LatentAttention) -> LatentAttention:
    """The binding with ``lengths`` in place of its mask, where the mask says nothing else."""
    if len(binding.masks) != 1 or binding.causal or binding.prefix:
        return binding
    (hiding,), sizes = binding.masks, binding.sizes
    mask = binding.inputs[hiding.role]
    if "H" in mask.axes:
        return binding
    causal = "T" in mask.axes
    if causal and sizes["B"] == sizes["T"]:  # then nothing tells requests from queries
        return binding
    value, keeps, fill = mask.value, hiding.keeps, hiding.fill
    if value.dtype is not torch.bool:
        read = selection(value)
        if read is None:
            return binding
        value, keeps, fill = read.value, read.keeps, read.fill
    found = _limit(value, keeps=keeps, tokens=sizes["S"])
    if found is None:
        return binding
    limit, plus = found
    placed = _placed(limit, sizes, causal=causal)
    if placed is None:
        return binding
    written = list(_written(limit, sizes["S"])) if causal or fill != -math.inf else []
    if fill != -math.inf and not any(bounds.seen_at_least(plus) >= 1 for bounds in written):
        return binding
    if causal and not any(bounds.past_the_end(plus) <= 0 for bounds in written):
        return binding
    inputs = {role: placement for role, placement in binding.inputs.items() if role != hiding.role}
    return binding.with_(inputs=inputs | {"lengths": placed}, masks=(), lengths_plus=plus, causal=causal)


def _limit(mask: Value, *, keeps: bool, tokens: int) -> tuple[Value, int] | None:
    """The number that tokens are compared with, and what to add to it."""
    op = mask.op
    while op is not None and op.name in NOT | SPREAD:
        keeps ^= op.name in NOT
        op = op.reads[0].op
    if op is None or op.name not in MIRRORED or len(op.reads) != 2:
        return None
    relation, (left, right) = op.name, op.reads
    if not left.const:
        relation, left, right = MIRRORED[relation], right, left
    relation = relation if keeps else NEGATED[relation]
    counts = left.shape[-1:] == (tokens,) and right.shape[-1:] in ((), (1,)) and _counts(left, tokens)
    if relation not in PLUS or right.dtype not in INTEGERS or not counts:
        return None
    return root(right, ORDERED, has_node), PLUS[relation]


def _counts(value: Value, many: int) -> bool:
    """True for the constant 0, 1, 2, .., and no other."""
    if not value.const or math.prod(value.shape) != many:
        return False
    try:
        return torch.equal(constant(value).flatten(), torch.arange(many))
    except EvaluationError:
        return False


def _placed(limit: Value, sizes: dict[str, int], *, causal: bool) -> Placement | None:
    """Where the numbers stand: one a request, or with ``causal`` one a query, each one more than that before."""
    named = {sizes["B"]: "B"} | ({sizes["T"]: "T"} if causal else {})
    axes = ["." if size == 1 else named.get(size, "") for size in limit.shape]
    if limit.node is None or "" in axes or any(axes.count(axis) > 1 for axis in "BT"):
        return None
    if causal and not ("T" in axes and _rises(limit, sizes["T"])):
        return None
    return place("lengths", limit, "".join(axes))


def _rises(limit: Value, tokens: int) -> bool:
    """True for a number that is the same for all queries plus the query's own: 0, 1, 2, .."""
    op = limit.op
    while op is not None and (op.name in SPREAD or _number(op) is not None):
        op = op.reads[0].op
    if op is None or op.name != "add" or len(op.reads) != 2 or op.kwargs:
        return False
    for steps, start in (op.reads, op.reads[::-1]):
        along = [index - len(steps.shape) for index, size in enumerate(steps.shape) if size > 1]
        same = len(along) == 1 and (len(start.shape) + along[0] < 0 or start.shape[along[0]] == 1)
        if same and _counts(steps, tokens):
            return True
    return False


# -- where the graph writes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Position:
    """``start`` plus numbers between ``least`` and ``most``."""

    start: Value
    least: int
    most: int


@dataclass(frozen=True)
class _Bounds:
    """What writing at ``written`` says of ``limit``, both counted from the same start."""

    limit: _Position
    written: _Position

    def seen_at_least(self, plus: int) -> int:
        """Tokens that every query sees: nothing is written below zero."""
        return self.limit.least - self.written.least + plus

    def past_the_end(self, plus: int) -> int:
        """By how many the longest length could exceed the cache: nothing is written past its end."""
        return self.limit.most - self.written.most + plus - 1


def _position(value: Value) -> _Position:
    """A position as something of the model with constants added."""
    least = most = 0
    while value.op is not None:
        op = value.op
        if op.name in SPREAD:
            value = op.reads[0]
            continue
        added = _added(op)
        if added is None:
            break
        value, low, high = added
        least, most = least + low, most + high
    return _Position(value, least, most)


def _number(op: Op) -> int | None:
    """The integer that an operator adds to a tensor."""
    if op.name not in ("add", "sub") or op.kwargs or len(op.reads) != 1 or not isinstance(op.args[1], int):
        return None
    return op.args[1] if op.name == "add" else -op.args[1]


def _added(op: Op) -> tuple[Value, int, int] | None:
    """What integers are added to, the least and the greatest of them."""
    number = _number(op)
    if number is not None:
        return op.reads[0], number, number
    if op.name != "add" or len(op.args) != 2 or op.kwargs:
        return None
    for start, other in (op.args, op.args[::-1]):
        if isinstance(start, Value) and isinstance(other, Value) and other.const and other.dtype in INTEGERS:
            try:
                numbers = constant(other)
            except EvaluationError:
                return None
            return start, int(numbers.min()), int(numbers.max())
    return None


def _written(limit: Value, tokens: int) -> Iterator[_Bounds]:
    """Where the graph writes dimensions of ``tokens`` at positions counted from the same start as ``limit``.

    ``index_copy`` takes none below zero and none past the end: a graph that gets further has neither.
    """
    own = _position(limit)

    def onward(value: Value) -> Iterator[Value]:
        return (out for op in value.users if op.name == "add" or op.name in SPREAD for out in op.outs)

    for value in reach([own.start], onward):
        for op in value.users:
            if op.name == "index_copy" and op.args[2] is value:
                there = _position(value)
                if there.start is own.start and op.out.shape[op.args[1]] == tokens:
                    yield _Bounds(own, there)
