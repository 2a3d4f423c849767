"""Masks that follow a value through its rearrangements: what is chosen of a product is chosen of what it is made of.

    where(m[:, None], x.view(B, K), 0)    is    where(m, x, 0).view(B, K)

A mask is kept as what varies of it, and which dimensions that lies along. So one mask of one value is one call, however
the model has laid the value out where it uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import moves, segments, turn
from kdacompile.patterns.engine.vocabulary import LAYOUT, TURNS, VIEWS


@dataclass(frozen=True)
class Mask:
    """Booleans of some ``rank``, that vary along ``dims`` as ``core`` does along its own."""

    core: Value
    dims: tuple[int, ...]
    rank: int

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a value of this shape has every dimension of the mask."""
        sizes = tuple(shape[dim] for dim in self.dims) if len(shape) == self.rank else None
        return sizes == self.core.shape

    def placed(self, dims: Sequence[int], rank: int) -> Mask:
        return Mask(self.core, tuple(dims), rank)


class Masks:
    """Masks and what is chosen by them, as calls of one edit."""

    def __init__(self, edit: Edit, like: fx.Node) -> None:
        self.edit, self.like = edit, like
        self.joined: dict[Value, tuple[Mask, int, tuple[int, ...]]] = {}
        """A core, one of whose dimensions several were joined to: the mask before, which one, and their sizes."""

    def call(self, target: object, *args: object) -> Value:
        return self.edit.call(target, *args, like=self.like)

    def of(self, value: Value) -> Mask:
        core, dims = value, [dim for dim, size in enumerate(value.shape) if size != 1]
        for dim in sorted(set(range(len(value.shape))) - set(dims), reverse=True):
            core = self.call("squeeze", core, dim)
        return Mask(core, tuple(dims), len(value.shape))

    def value(self, mask: Mask) -> Value:
        found = mask.core
        for dim in range(mask.rank):
            found = found if dim in mask.dims else self.call("unsqueeze", found, dim)
        return found

    def filled(self, value: Value, mask: Mask, number: float) -> Value:
        """``value`` with a number where the mask is true: below its rearrangements, as far as the mask goes."""
        steps: list[Op] = []
        with contextlib.suppress(CannotEdit):
            while mask.fits(value.shape) and (op := value.op) is not None and _rearranges(op):
                mask = self.below(mask, op)
                steps.append(op)
                value = op.reads[0]
        chosen = self.value(mask)
        if torch.broadcast_shapes(value.shape, chosen.shape) != value.shape:
            value = self.call(torch.add, value, self.call(torch.mul, self.call("to", chosen, value.dtype), 0.0))
        value = self.call("masked_fill", value, chosen, number)
        for op in reversed(steps):
            value = self.edit.moved(value, moves(op), self.like)
        return value

    def below(self, mask: Mask, op: Op) -> Mask:
        """The mask of what a rearrangement yields as that of what it reads."""
        old, new = op.reads[0].shape, op.out.shape
        if op.name in TURNS:
            return self._turned(mask, turn(op))
        if op.name in VIEWS and old != new:
            return self._regrouped(mask, new, old)
        more = len(new) - len(old)
        found = mask.placed([dim - more for dim in mask.dims], len(old))
        if any(dim < 0 for dim in found.dims) or not found.fits(old):
            raise CannotEdit("what is repeated is not chosen alike")
        return found

    def _turned(self, mask: Mask, order: list[int]) -> Mask:
        dims = [order[dim] for dim in mask.dims]
        places = sorted(range(len(dims)), key=dims.__getitem__)
        core = mask.core if places == list(range(len(dims))) else self.call("permute", mask.core, places)
        return Mask(core, tuple(sorted(dims)), mask.rank)

    def _regrouped(self, mask: Mask, new: tuple[int, ...], old: tuple[int, ...]) -> Mask:
        runs = segments(new, old)
        if runs is None:
            raise CannotEdit("nothing is in it")
        found = mask.placed([], len(old))
        left = list(mask.dims)
        for before, after in runs:
            has = [dim for dim in before if dim in left]
            at = len(found.dims)
            if not has:
                continue
            if len(before) == len(after) == 1:
                found = found.placed([*found.dims, after[0]], len(old))
                continue
            sizes = tuple(old[dim] for dim in after)
            known, place, had = self.joined.get(found.core, (mask, -1, ()))
            if len(before) == 1 and (place, had) == (at, sizes):
                found = Mask(known.core, (*found.dims, *(after[dim] for dim in known.dims)), len(old))
                continue
            core = self._one(found.core, at, before, has, new)
            if len(after) > 1:
                core = self.call("unflatten", core, at, (-1, *sizes[1:]))
            elif len(before) > 1:
                within = Mask(found.core, tuple(map(before.index, has)), len(before))
                self.joined[core] = within, at, tuple(new[dim] for dim in before)
            found = Mask(core, (*found.dims, *after), len(old))
        return found

    def _one(self, core: Value, at: int, before: list[int], has: list[int], new: tuple[int, ...]) -> Value:
        """Dimensions of a run as one; those that the mask has not are repeated."""
        sizes = [-1] * at
        for place, dim in enumerate(before, at):
            sizes.append(-1 if dim in has else new[dim])
            core = core if dim in has else self.call("unsqueeze", core, place)
        sizes += [-1] * (len(core.shape) - len(sizes))
        if len(has) < len(before):
            core = self.call("expand", core, sizes)
        return self.call("flatten", core, at, at + len(before) - 1) if len(before) > 1 else core


def _rearranges(op: Op) -> bool:
    return op.name in LAYOUT and moves(op) is not None
