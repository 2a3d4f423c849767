"""What a constant mask hides: read off its numbers once, and remembered by what the mask is computed from.

A prompt of 4096 tokens has a mask of 16 million entries, every layer makes it anew, and a graph is read several times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.evaluate import constant
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
    return _remembered((digest_of_constant(mask), dtype), lambda: _of_numbers(constant(mask), dtype))


def selected(mask: Value, *, keeps: bool, infinite: bool) -> Constant:
    """A selection that leaves scores where it is ``keeps``, and hides the others, by -inf or by finite numbers."""

    def read() -> Constant:
        hides = constant(mask) != keeps
        return _read(hides, ~hides, gone=infinite or not bool(hides.any()), raises=False)

    return _remembered((digest_of_constant(mask), keeps, infinite), read)


def _remembered(key: tuple[object, ...], read: Callable[[], Constant]) -> Constant:
    if key not in _known:
        _known[key] = read()
    return _known[key]


def _of_numbers(data: Tensor, dtype: torch.dtype) -> Constant:
    zero, infinite = data == 0, data == -math.inf
    hides = data <= unreached(dtype) if data.is_floating_point() else torch.zeros_like(zero)
    gone = bool((zero | infinite).all())
    return _read(hides, zero, gone=gone, raises=not gone and not bool((data <= 0).all()))


def _read(hides: Tensor, zero: Tensor, *, gone: bool, raises: bool) -> Constant:
    sizes = [(dim - hides.dim(), size) for dim, size in enumerate(hides.shape) if size > 1]
    causal = frozenset[tuple[int, int]]()
    if bool((zero | hides).all()):
        pairs = itertools.permutations(sizes, 2)
        causal = frozenset(
            (queries, tokens) for (queries, _), (tokens, _) in pairs if _is_causal(hides, queries, tokens)
        )
    return Constant(tuple(hides.shape), not bool(zero.all()), raises, gone, causal)


def _is_causal(hides: Tensor, queries: int, tokens: int) -> bool:
    """Whether just what comes after each query is hidden along two dimensions, and the last query sees all tokens."""
    count, length = hides.shape[queries], hides.shape[tokens]
    if count > length:
        return False
    after = torch.ones(count, length, dtype=torch.bool).triu(1 + length - count)
    after = after if queries < tokens else after.mT
    after = after.view([size if dim - hides.dim() in (queries, tokens) else 1 for dim, size in enumerate(hides.shape)])
    first = [each.narrow(queries, 0, 1) for each in (hides, after)]  # one row tells most other masks apart
    return bool((first[0] == first[1]).all()) and bool((hides == after).all())
