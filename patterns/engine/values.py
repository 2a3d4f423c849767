"""What a value is, rearrangements aside: what it is taken from, whether it is a weight, which number it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kdacompile import compat
from kdacompile.graph import gradient
from kdacompile.graph.ir import Op, Value, map_values
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.vocabulary import AS_IS, LAYOUT, MAKERS, PICKING, TURNS, VIEWS, is_float8

WEIGHT = 3
"""How many dimensions a weight has at most: heads apart, or not."""


def root(value: Value, through: frozenset[str] = LAYOUT, until: Callable[[Value], bool] = lambda _: False) -> Value:
    """The value below casts and rearrangements (``through``), or the nearest for which ``until`` holds."""
    while not until(value) and value.op is not None and value.op.name in through and value.op.reads:
        value = value.op.reads[0]
    return value


def has_node(value: Value) -> bool:
    """Whether a Dynamo node yields the value."""
    return value.node is not None


def operand(value: Value) -> Value:
    """The same for an op to read: casts from 8-bit floating point stay, since the ops do not take that, and so does
    what puts a weight together that was computed in blocks.
    """
    found = root(value, until=lambda step: step.op is not None and any(is_float8(x.dtype) for x in step.op.reads))
    if found.op is None or len(found.shape) <= WEIGHT:
        return found
    return root(value, until=lambda step: step.node is not None and len(step.shape) <= WEIGHT)


def is_divided(value: Value) -> bool:
    """True for a rearrangement of a quotient."""
    op = root(value).op
    while op is not None and op.name == "mul" and sum(not read.const for read in op.reads) == 1:
        op = next(read for read in op.reads if not read.const).op
    return op is not None and op.name in ("reciprocal", "div")


def is_weight(value: Value) -> bool:
    """Parameters, rows picked from one (experts), and functional weights: a product with one is a projection."""
    if value.weight:
        return True
    while value.op is not None and value.op.name in PICKING:
        value = root(value.op.reads[0])
    return value.param


def number(item: object) -> float | None:
    """The number an operator's argument stands for: Python's own, or a tensor of one element that no input reaches."""
    if isinstance(item, bool):
        return None
    if isinstance(item, (int, float)):
        return float(item)
    if not isinstance(item, Value) or not item.const or math.prod(item.shape) != 1:
        return None
    try:
        return float(constant(item))
    except EvaluationError:
        return None


def cut_of(value: Value) -> tuple[int, int] | None:
    """Of a range of entries along one dimension: that dimension, and the range's first entry; None for what is none."""
    op = value.op
    if op is None or op.name not in ("slice", "split", "split_with_sizes"):
        return None
    dim = (*op.args, 0)[1 if op.name == "slice" else 2] % len(value.shape)
    if op.name != "slice":
        return dim, sum(earlier.shape[dim] for earlier in op.outs[: op.outs.index(value)])
    if op.args[4:] not in ((), (1,)):
        return None
    start = (*op.args, None)[2] or 0
    return dim, start if start >= 0 else start + op.reads[0].shape[dim]


def first_column(value: Value) -> int | None:
    """Which column of what it is cut from a value begins at; None if it is no range of columns."""
    found = cut_of(value)
    return found[1] if found is not None and found[0] == len(value.shape) - 1 else None


def turn(op: Op) -> list[int]:
    """Which dimension of its operand each dimension is, of an operator that has dimensions change places."""
    order = list(range(len(op.out.shape)))
    if op.name == "permute":
        return [dim % len(order) for dim in op.args[1]]
    if len(order) > 1:
        one, other = op.args[1:3] if op.name == "transpose" else (0, 1)
        order[one], order[other] = order[other], order[one]
    return order


Moves = list[tuple[str, tuple[object, ...]]]
"""Methods with their arguments, to be called one after the other."""


def moves(op: Op, front: int = 0) -> Moves | None:
    """A rearrangement, behind ``front`` dimensions more, that says no size which it leaves as it is: the model's may be
    open. None if it is none, or does more than that.
    """
    old, new = op.reads[0].shape, op.out.shape
    if op.name in VIEWS:
        return regrouped(old, new, front)
    if op.name in TURNS:
        return [("permute", (*range(front), *(front + dim for dim in turn(op))))]
    if op.name == "expand" and (len(old) == len(new) or not front):
        more = len(new) - len(old)
        kept = [-1 if size == had else size for size, had in zip(new[more:], old, strict=True)]
        return [("expand", (*[-1] * front, *new[:more], *kept))]
    if op.name == "_to_copy" and op.kwargs.keys() == {"dtype"}:
        return [("to", (op.kwargs["dtype"],))]
    return {"alias": [], "clone": [("clone", ())], "contiguous": []}.get(op.name)


def undone(op: Op) -> Moves | None:
    """The way back from what a rearrangement yields; None where it does more than rearrange."""
    if op.name in TURNS:
        order = turn(op)
        return [("permute", tuple(map(order.index, range(len(order)))))]
    old, new = op.reads[0].shape, op.out.shape
    if op.name in VIEWS:
        return regrouped(new, old)
    return [] if old == new and (op.name in AS_IS or op.name == "expand") else None


def segments(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The smallest runs of dimensions of a view and of its result that hold the same elements; without sizes of one.
    None where something is empty.
    """
    if 0 in (*old, *new):
        return None
    left, right = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (old, new))
    found: list[tuple[list[int], list[int]]] = []
    while left:
        before, after = [left.pop(0)], [right.pop(0)]
        have, want = old[before[0]], new[after[0]]
        while have != want:
            if have < want:
                before.append(left.pop(0))
                have *= old[before[-1]]
            else:
                after.append(right.pop(0))
                want *= new[after[-1]]
        found.append((before, after))
    return found


def regrouped(old: tuple[int, ...], new: tuple[int, ...], front: int = 0) -> Moves | None:
    """A view as dimensions that are taken together, and such as are taken apart; none of them is empty."""
    runs = segments(old, new)
    if runs is None:
        return None
    first, last = 0, 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    gone = [dim for dim in range(first, len(old) - last) if old[dim] == 1]
    found: Moves = [("squeeze", (front + dim,)) for dim in reversed(gone)]
    at = front + first
    for before, after in runs:
        if before[0] < first or before[-1] >= len(old) - last:
            continue
        if len(before) > 1:
            found.append(("flatten", (at, at + len(before) - 1)))
        if len(after) > 1:
            found.append(("unflatten", (at, (-1, *(new[dim] for dim in after[1:])))))
        at += len(after)
    made = [dim for dim in range(first, len(new) - last) if new[dim] == 1]
    return found + [("unsqueeze", (front + dim,)) for dim in made]


# -- values that are the same by construction -------------------------------------------------------------------------
# Code that keeps a cache writes ``cache[:batch, :end]`` wherever it needs it, and a loop the same mask in every turn.
# Each of them is a value of its own in the functional graph, though all of them hold the same numbers.

TAKEN = LAYOUT | PICKING


FIXED_MAKERS = frozenset(name for name in MAKERS if "empty" not in name)


class Numbering:
    """Value numbering: the same number for values that are made alike of the same.

    By rearranging and picking, or, ``everything``, by any operator that reads something and draws no random numbers.
    Values are apart where a gradient of one is cut (``detach_`` leaves no operator) and of the other not.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything, self.grad = everything, torch.is_grad_enabled()
        self.known: dict[Value, int] = {}
        self.numbers: dict[str, int] = {}

    def of(self, value: Value) -> int:
        chain = [value]
        while chain:
            last = chain[-1]
            missing = [read for read in self._sources(last) if read not in self.known]
            if missing:
                chain += missing
                continue
            chain.pop()
            self.known[last] = self.numbers.setdefault(self._text(last), len(self.numbers))
        return self.known[value]

    def _text(self, value: Value) -> str:
        op = value.op
        if op is None or not (self._sources(value) or (self.everything and op.name in FIXED_MAKERS)):
            return f"value {value.index}"
        args, kwargs = (map_values(tree, self.known.get) for tree in (op.args, op.kwargs))
        cut = self.grad and gradient.ends_at(value)
        return f"{op.target} {args} {kwargs} {op.outs.index(value)} {self.everything and op.grad} {cut}"

    def _sources(self, value: Value) -> list[Value]:
        """What a value is made of, where that alone makes it; nothing for every other value."""
        op = value.op
        if op is None or not (op.name in TAKEN or (self.everything and not compat.is_random(op.target))):
            return []
        return op.reads
