"""The proof of a hoist: what a value was, next to what it is to be.

Both are computed on the same random values, in float64, from the first values that the hoist did not touch: if they
agree for any values of those, they agree for any input of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kdacompile import compat
from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine.evaluate import Region
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.vocabulary import LAYOUT

TOLERANCE = 1e-12
"""Relative error in float64: the same operators on the same numbers, products summed in another order at most."""

LIMIT = 1 << 25
"""Elements, of all values together that are no rearrangements, up to which a hoist is run."""

MAX_OPS = 40_000

FINITE = ("no zeros", "positive")
"""Probes where nothing is divided by zero: what has no value either way need not have the same."""

PROBES = ("normal", "normal", "normal", "positive", "negative", "large", "zeros")
LARGE = 100.0


class _Refused(Exception):
    """The values cannot be compared."""


def agrees(
    edit: Edit,
    pairs: Collection[tuple[Value, Value]],
    inside: Collection[Op],
    probes: Sequence[str] = PROBES,
    batch: Sequence[int] = (),
) -> bool:
    """True if each new value equals the old one whatever the new calls and operators of ``inside`` read. Of the first
    dimensions of all tensors, which are ``batch``, one entry stands for all.
    """

    def untouched(value: Value) -> bool:
        return value.op is None or not (value.op in inside or edit.calls.owns(value.op.node))

    ops = ancestors([value for pair in pairs for value in pair], untouched)
    made = {value for op in ops for value in op.outs}
    read = sorted({value for op in ops for value in op.reads} - made, key=lambda value: value.index)
    computed = [value for value in {*made, *read} if value.op is None or value.op.name not in LAYOUT]
    if not pairs or len(ops) > MAX_OPS or sum(math.prod(value.shape) for value in computed) > LIMIT * math.prod(batch):
        return False
    region = Region(list(ops), read, [value for pair in pairs for value in pair])
    try:
        with torch.no_grad(), compat.no_fake_modes():
            return all(_agrees_on(probe, seed, region, batch) for seed, probe in enumerate(probes))
    except (_Refused, EvaluationError):
        return False


def _agrees_on(probe: str, seed: int, region: Region, batch: Sequence[int]) -> bool:
    generator, one = torch.Generator().manual_seed(seed), (slice(0, 1),) * len(batch)
    results = region([_drawn(probe, value, generator)[one] for value in region.inputs])
    return all(_equal(one, other) for one, other in zip(results[::2], results[1::2], strict=True))


def _drawn(probe: str, like: Value, generator: torch.Generator) -> Tensor:
    """Random values of a tensor's shape: whole numbers where it holds such, else float64."""
    if not like.dtype.is_floating_point:
        if like.dtype.is_complex:
            raise _Refused("complex numbers")
        whole = torch.randint(-4, 5, tuple(like.shape), generator=generator)
        if probe in FINITE:
            whole = torch.where(whole == 0, 5, whole) if probe == "no zeros" else whole.abs() + 1
        return whole > 0 if like.dtype == torch.bool else whole.to(like.dtype)
    noise = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64)
    if probe == "positive":
        return noise.abs()
    if probe == "negative":
        return -noise.abs()
    if probe == "large":
        return LARGE * noise
    return noise * (noise > 0) if probe == "zeros" else noise


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
