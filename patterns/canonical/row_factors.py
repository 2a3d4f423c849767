"""Factors per row of what a product sums over: behind the product. Row sums: as one more column of it.

    (A / r) v = (A v) / r
    A = mask(q k^T);  o = (A / f(A.sum(-1, keepdim=True))) v    becomes    [n | s] = A [v | 1];  o = n / f(s)

A factor per row commutes with a product from the right, and a row sum is a product with ones. Written like this, scores
are read by one product only, and that is linear attention with one more value column. Factors are taken out of scores
whose rows are summed or that are divided by them, be it within an einsum of three operands: in front of the product
they would be part of the region, and no role of the recurrence. RetNet sums scores that are detached: the column is.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.canonical.proof import FINITE, agrees
from kdacompile.patterns.engine.values import is_divided, moves, regrouped, turn, undone
from kdacompile.patterns.engine.vocabulary import AS_IS, TURNS, VIEWS

PRODUCTS = frozenset("mm bmm".split())


@dataclass
class Site:
    """A product, one operand of which is scores with factors per row, be they laid out in another way."""

    product: Op
    along: int
    """The dimension that is summed over, counted from the right: -1 of scores on the left."""
    other: Value
    """What the scores are multiplied with, before the call lays it out."""
    column: int
    """Which of its dimensions the scores do not have."""
    beside: list[Op]
    """Rearrangements on the way from there to the product."""
    scores: Value
    place: int
    """That dimension of the scores."""
    steps: list[Op]
    """Rearrangements and factors on the way from the scores to the product."""
    places: dict[Op, int]
    """That dimension of what each of them yields."""
    sums: list[Op]
    below: list[Op]
    """The same from the product to the first value that a node of the model yields."""

    @property
    def result(self) -> Value:
        return self.below[-1].out if self.below else self.product.out


def apply(edit: Edit) -> None:
    """Redefine every product of scores whose rows are summed, or divided within one call, and the sums."""
    for op in tuple(edit.functional.ops):
        for along in (-1, -2) if op.name in PRODUCTS and op.node is not None else ():
            site = _site(op, along)
            if site is not None and not _follows(edit, site):
                with contextlib.suppress(CannotEdit):
                    _rewrite(edit, site)


def _site(product: Op, along: int) -> Site | None:
    value, other = product.reads if along == -1 else product.reads[::-1]
    place, steps, sums = len(value.shape) + along, list[Op](), list[Op]()
    below = _below(product, along)
    divided = any(_is_factor(op) for op in below or ())
    places: dict[Op, int] = {}
    while value.op is not None:
        op = value.op
        sums = _row_sums(value, place)
        factor = None if sums else _factor(op, place, spread=True)
        before = place if factor is not None else None if sums else _before(op, place)
        if before is None:
            break
        steps.insert(0, op)
        places[op] = place
        value, place = (op.reads[0] if factor is not op.reads[0] else op.reads[1]), before
        divided |= factor is not None and (op.name == "div" or is_divided(factor))
        if factor is not None and op.node is product.node and is_divided(factor):
            break
    if below is None or not (sums or divided):
        return None
    if not (sums or any(map(_is_factor, steps))):
        steps, value = [], product.reads[0 if along == -1 else 1]
    beside, column = list[Op](), len(other.shape) + along
    while other.node is None and other.op is not None:
        before = _before(other.op, column)
        if before is None:
            return None
        beside.insert(0, other.op)
        other, column = other.op.reads[0], before
    dtypes = {each.dtype for each in (value, other, *(op.out for op in (product, *steps, *sums, *below)))}
    if len(dtypes) > 1 or (torch.float16 in dtypes and any(map(_is_factor, steps))):
        return None  # what is not yet normalised may be too large for fp16
    return Site(product, along, other, column, beside, value, place, steps, places, sums, below)


def _below(product: Op, along: int) -> list[Op] | None:
    """What a call does with a product: rearrangements and, in an einsum of three operands, a factor per row."""
    value, place, found = product.out, len(product.out.shape) + along, list[Op]()
    while value.node is None:
        if len(value.users) != 1 or value.users[0].node is not product.node:
            return None
        op = value.users[0]
        factor = _factor(op, place) if op.reads[0] is value or op.name == "mul" else None
        after = place if factor is not None and is_divided(factor) else _after(op, place)
        if after is None:
            return None
        found.append(op)
        value, place = op.out, after
    return found


def _is_factor(op: Op) -> bool:
    return op.name in ("mul", "div")


def _after(op: Op, place: int) -> int | None:
    """Where a rearrangement puts a dimension."""
    order = range(len(op.out.shape))
    return next((dim for dim in order if _before(op, dim) == place and op.out.shape[dim] > 1), None)


def _before(op: Op, place: int) -> int | None:
    """Which dimension of what a rearrangement reads a dimension is; None if that is none, or elements are repeated."""
    old, new = op.reads[0].shape if op.reads else (), op.out.shape
    if op.name in TURNS:
        return turn(op)[place]
    if op.name in VIEWS:
        ahead = math.prod(new[:place])
        fits = (dim for dim, size in enumerate(old) if size == new[place] and math.prod(old[:dim]) == ahead)
        return next(fits, None)
    return place if (op.name in AS_IS or op.name == "expand") and old == new else None


def _factor(op: Op, place: int, *, spread: bool = False) -> Value | None:
    """The factor per row of ``A / r`` or ``A * r``: one number along the dimension that is summed over; ``spread``: it
    may be the same all along others.
    """
    if op.name not in ("mul", "div") or len(op.reads) != 2 or op.kwargs or len(op.out.users) != 1:
        return None
    for whole, factor in (op.reads, op.reads[::-1]) if op.name == "mul" else (op.reads,):
        behind = place - len(whole.shape)
        deep = -behind <= len(factor.shape) if spread else len(factor.shape) == len(whole.shape)
        several = not spread or math.prod(factor.shape) > 1
        if whole.shape == op.out.shape and deep and several and factor.shape[behind] == 1 < whole.shape[place]:
            return factor
    return None


def _row_sums(scores: Value, place: int) -> list[Op]:
    """The sums over a dimension of scores, or of scores whose gradient is cut."""
    read = [scores, *(user.out for user in scores.users if user.name == "detach")]
    return [user for value in read for user in value.users if _is_row_sum(user, place)]


def _is_row_sum(op: Op, place: int) -> bool:
    if op.name != "sum" or op.kwargs or len(op.args) < 2 or not op.args[1]:
        return False
    return [dim % len(op.reads[0].shape) for dim in op.args[1]] == [place]


def _follows(edit: Edit, site: Site) -> bool:
    """True if what the scores are multiplied with follows from their sums."""
    above = edit.above(site.other)
    return any(total.out in above for total in site.sums)


def _rewrite(edit: Edit, site: Site) -> None:
    op, other, like = site.product, site.other, site.product.node
    width, place = other.shape[site.column], len(op.out.shape) + site.along
    if site.sums:
        ones = edit.call(torch.ones_like, edit.call("narrow", other, site.column, 0, 1, like=like), like=like)
        other = edit.call(torch.cat, [other, ones], site.column, like=like)
    scores, other = _laid(edit, site.scores, site.steps, like), _laid(edit, other, site.beside, like)
    operands = (scores, other) if site.along == -1 else (other, scores)
    result = whole = _laid(edit, edit.call(op.target, *operands, like=like), site.below, like)
    pairs: list[tuple[Value, Value]] = []
    if site.sums:
        for step in site.below:
            place = place if _is_factor(step) else _after(step, place) or 0
        result = edit.call("narrow", whole, place, 0, width, like=like)
        column = _back(edit, site, edit.call("narrow", whole, place, width, 1, like=like), place, like)
        for total in site.sums:
            keeps = len(total.out.shape) == len(site.scores.shape)
            new = column if keeps else edit.call("squeeze", column, site.place, like=like)
            new = new if total.reads[0] is site.scores else edit.call("detach", new, like=like)
            pairs.append((new, total.out))
    steps = [*site.steps, *site.below]
    for index, step in enumerate(steps):
        if _is_factor(step):
            factor = min(step.reads, key=lambda read: math.prod(read.shape))
            if step in site.places:
                row = edit.call("narrow", step.out, site.places[step], 0, 1, like=like)
                factor = factor if factor.shape == row.shape else edit.call("expand_as", factor, row, like=like)
            factor = _laid(edit, factor, steps[index + 1 :], like)
            result = edit.call(step.target, result, factor, like=like)
    pairs.append((result, site.result))
    cuts = {read.op for total in site.sums for read in total.reads if read is not site.scores and read.op is not None}
    if agrees(edit, pairs, {op, *steps, *site.beside, *site.sums, *cuts}, FINITE):
        edit.redefine_all([(old, new) for new, old in pairs])


def _laid(edit: Edit, value: Value, steps: list[Op], like: fx.Node) -> Value:
    """Laid out as the steps do it."""
    for op in steps:
        value = edit.moved(value, moves(op) if op.name in VIEWS | TURNS else [], like)
    return value


def _back(edit: Edit, site: Site, column: Value, place: int, like: fx.Node) -> Value:
    """A column of the product, laid out like the scores with one entry a row."""
    for op in reversed([*site.steps, *site.below]):
        before = place if _is_factor(op) else _before(op, place)
        if before is None:
            raise CannotEdit("not a rearrangement")
        if op.name in VIEWS:
            shapes = [list(op.out.shape), list(op.reads[0].shape)]
            shapes[0][place] = shapes[1][before] = 1
            column = edit.moved(column, regrouped(tuple(shapes[0]), tuple(shapes[1])), like)
        elif op.name in TURNS:
            column = edit.moved(column, undone(op), like)
        place = before
    return column
