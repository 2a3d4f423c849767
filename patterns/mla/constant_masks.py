"""What a constant mask hides: read off its numbers once, and remembered by what the mask is computed from.

A prompt of 4096 tokens has a mask of 16 million entries, every layer makes it anew, and a graph is read several times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.constants import Place, constant, parts_of_constant
from kdacompile.patterns.engine.field import unreached
from kdacompile.patterns.engine.structure import digest_of_constant


@dataclass(frozen=True)
class Constant:
    """A constant mask, as numbers that are added to scores."""

    shape: tuple[int, ...]
    changes: bool
    """Whether it does anything to some score."""
    raises: bool
    """Whether it adds something to a score that does not hide it: more than zero, or a NaN."""
    gone: bool
    """Whether it adds 0 or -inf, and nothing else."""
    causal: frozenset[tuple[int, int]]
    """Pairs of its dimensions, from the right, that may be queries and tokens: it hides just what comes after each
    query, of which the last sees all tokens.
    """

    def is_causal(self, layout: str, sizes: dict[str, int]) -> bool:
        """Whether it is, on scores whose dimensions are ``layout``."""
        if len(self.shape) > len(layout) or "T" not in layout or "S" not in layout:
            return False
        queries, tokens = dims = layout.index("T") - len(layout), layout.index("S") - len(layout)
        return dims in self.causal and (self.shape[queries], self.shape[tokens]) == (sizes["T"], sizes["S"])


_known: dict[tuple[object, ...], Constant] = {}


def added(mask: Value, dtype: torch.dtype) -> Constant:
    """A mask of numbers that are added to scores of this dtype; EvaluationError if it cannot be computed here."""

    def read() -> Constant:
        found = _chosen(mask)
        return of_numbers(mask.shape, parts_of_constant(mask), dtype) if found is None else _of_choice(*found, dtype)

    return _remembered((digest_of_constant(mask), dtype), read)


def selected(mask: Value, *, keeps: bool, infinite: bool) -> Constant:
    """A selection that leaves scores where it is ``keeps``, and hides the others, by -inf or by finite numbers."""

    def read() -> Constant:
        facts = _Facts(mask.shape)
        for place, data in parts_of_constant(mask):
            hides = data != keeps
            facts.add(place, hides, ~hides, gone=infinite or not bool(hides.any()), raises=False)
        return facts.constant()

    return _remembered((digest_of_constant(mask), keeps, infinite), read)


def _remembered(key: tuple[object, ...], read: Callable[[], Constant]) -> Constant:
    if key not in _known:
        _known[key] = read()
    return _known[key]


def of_numbers(shape: Sequence[int], parts: Iterable[tuple[Place, Tensor]], dtype: torch.dtype) -> Constant:
    """Of what is added to scores of this dtype."""
    facts = _Facts(shape)
    for place, data in parts:
        least = data.aminmax().min
        after = facts.only_after(place, data, least)
        unseen = data <= unreached(dtype) if after is None else after & (least <= unreached(dtype))
        hides = unseen if data.is_floating_point() else torch.zeros_like(unseen)
        zero = data == 0 if after is None else ~after | (least == 0)
        gone = _all(zero | (hides & (data == -math.inf))) if after is None else float(least) in (0, -math.inf)
        facts.add(place, hides, zero, gone=gone, raises=not gone and not _all(data <= 0))
    return facts.constant()


def _chosen(mask: Value) -> tuple[Value, float, float] | None:
    """A mask that is one of two numbers everywhere: where it is the first, and both."""
    op = mask.op
    if op is None or op.name != "where" or not all(isinstance(item, Value) for item in op.args):
        return None
    where, *numbers = op.args
    if where.shape != mask.shape or any(math.prod(each.shape) != 1 for each in numbers):
        return None
    first, second = (float(constant(each).to(mask.dtype)) for each in numbers)
    return where, first, second


def _of_choice(where: Value, first: float, second: float, dtype: torch.dtype) -> Constant:
    """The same as ``of_numbers`` finds, without the numbers."""
    facts = _Facts(where.shape)
    for place, data in parts_of_constant(where):

        def of(fact: Callable[[float], bool], data: Tensor = data) -> Tensor:
            one, other = fact(first), fact(second)
            return torch.full((), one).expand(data.shape) if one == other else data if one else ~data

        gone = _all(of(lambda number: number in (0, -math.inf)))
        raises = not gone and not _all(of(lambda number: number <= 0))
        hides, zero = of(lambda number: number <= unreached(dtype)), of(lambda number: number == 0)
        facts.add(place, hides, zero, gone=gone, raises=raises)
    return facts.constant()


class _Facts:
    """What is known of a mask after some of its parts."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.changes, self.raises, self.gone = False, False, True
        several = [dim - len(self.shape) for dim, size in enumerate(self.shape) if size > 1]
        pairs = itertools.permutations(several, 2)
        self.causal = [(queries, tokens) for queries, tokens in pairs if self.shape[queries] <= self.shape[tokens]]

    def only_after(self, place: Place, data: Tensor, number: Tensor) -> Tensor | None:
        """Where a part has ``number``, if it has that in all that comes after each query, and 0 in the rest: most masks
        are so, and that is seen with less work than what else they could be.
        """
        dtype = _BITS[data.itemsize]
        for pair in self.causal:
            after = self.after(*pair, place)
            if _all(data.view(dtype) == after.to(dtype) * number.view(dtype)):
                return after.expand_as(data)
        return None

    def add(self, place: Place, hides: Tensor, zero: Tensor, *, gone: bool, raises: bool) -> None:
        """``hides`` and ``zero``: where it hides a score, and where it leaves one as it is."""
        self.changes |= not _all(zero)
        self.raises |= raises
        self.gone &= gone
        if self.causal and not _all(zero | hides):
            self.causal.clear()
        self.causal = [pair for pair in self.causal if _all(hides == self.after(*pair, place))]

    def after(self, queries: int, tokens: int, place: Place) -> Tensor:
        """What comes after each query in a part, along two dimensions of which the last query sees all."""
        dim, start, size = place
        rows, columns = (size if dim == each else self.shape[each] for each in (queries, tokens))
        first = self.shape[tokens] - self.shape[queries] + start * ((dim == queries) - (dim == tokens))
        after = torch.ones(rows, columns, dtype=torch.bool).triu(1 + first)
        sizes = {queries: rows, tokens: columns}
        after = after if queries < tokens else after.mT
        return after.view([sizes.get(dim, 1) for dim in range(-len(self.shape), 0)])

    def constant(self) -> Constant:
        return Constant(self.shape, self.changes, self.raises, self.gone, frozenset(self.causal))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _all(mask: Tensor) -> bool:
    """``mask.all()``, which takes several times as long."""
    return not mask.numel() or bool(mask.view(torch.uint8).min())
