"""Decay tables: tensors a module owns that stand for one decay per head, rounded to their dtype.

    t[h, i, j] = gamma_h ** (a i + b j + c)  or 0        (powers: a causal decay mask, the decay up to a chunk's end)
    r[h] = m log(gamma_h)                                (rates: a slope per head)

with integers a, b, c, m that are the same for all heads. Lightning attention and RetNet keep such tables as buffers.
Rounded numbers never satisfy the recurrence exactly, so a region is proven with the exact ones in their place; what
stands in the model must be those up to rounding, entry by entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kdacompile.patterns.engine.evaluate import PRECISE

ROUNDINGS = 4
"""Units of the dtype's rounding (half its spacing) by which an entry may be off, for each e-fold of its exponent."""

SAMPLE = 4096
"""Entries the exponents are fitted to; all entries are checked."""

_TINY = 1e-30
"""Entries below this carry no exponent worth fitting."""


def exact(table: Tensor) -> bool:
    """True for tables without rounding: masks of zeros and ones."""
    return not table.is_floating_point() or bool(((table == 0) | (table == 1) | (table == -math.inf)).all())


def ideal(table: Tensor, logs: Tensor) -> Tensor | None:
    """The table, in float64, with each entry as ``logs`` (log gamma per head, ``[H]``, float64) have it.

    None if some entry is not that of a table of powers or rates up to rounding.
    """
    if exact(table):
        return table
    if not torch.isfinite(table).all():
        return None
    unit = torch.finfo(table.dtype).eps / 2
    smallest = torch.finfo(table.dtype).tiny
    for dim in _head_dims(table, logs):
        entries = table.double() if dim is None else table.double().movedim(dim, 0)
        flat = entries[None] if dim is None else entries
        own = logs[:1] if dim is None else logs
        for found in (_powers(flat, own, smallest), _rates(flat, own)):
            if found is not None and _rounds_to(flat, found, unit, smallest):
                return found[0] if dim is None else found.movedim(0, dim)
    return None


def _head_dims(table: Tensor, logs: Tensor) -> Iterator[int | None]:
    """Dimensions that could count heads; None (all heads share the table) where all decays agree."""
    yield from (dim for dim, size in enumerate(table.shape) if size == len(logs))
    if bool((logs - logs[0]).abs().max() <= 1e-6 * logs[0].abs()):
        yield None


def steps(table: Tensor, logs: Tensor) -> tuple[Tensor, int | None] | None:
    """The whole n for which each entry of a table is ``gamma_h ** n`` or zero, up to float64's rounding, with the
    dimension that counts heads (None: none does); None if there are none.
    """
    for dim in _head_dims(table, logs):
        flat = table.double()[None] if dim is None else table.double().movedim(dim, 0)
        own = logs[:1] if dim is None else logs
        found = _exponents(flat, own)
        if found is None:
            continue
        powers = torch.where(flat == 0, 0.0, (found * own.reshape(-1, *[1] * (flat.dim() - 1))).exp())
        if _rounds_to(flat, powers, PRECISE, 1e-300):
            found = found.expand(flat.shape).to(torch.int64)
            return (found[0], None) if dim is None else (found.movedim(0, dim), dim)
    return None


def _powers(table: Tensor, logs: Tensor, smallest: float) -> Tensor | None:
    """``gamma_h ** n`` with n affine in the indices of ``table [H, ...]``; zeros stay, but for powers that are smaller
    than the dtype's ``smallest``: 0 is what they round to.
    """
    n = _exponents(table, logs)
    if n is None:
        return None
    powers = (n * logs.reshape(-1, *[1] * (table.dim() - 1))).exp()
    return torch.where((table == 0) & (powers >= smallest), 0.0, powers)


def _exponents(table: Tensor, logs: Tensor) -> Tensor | None:
    """The n of ``_powers``, ``[1, ...]``."""
    if bool((table < 0).any()) or bool((logs == 0).any()):
        return None
    places = (table > _TINY).nonzero()
    if not len(places):
        return None
    if len(places) > SAMPLE:
        places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:SAMPLE]]
    weight = logs[places[:, 0]].abs()  # an entry tells its exponent the better, the stronger its head's decay
    exponents = table[tuple(places.T)].log() / logs[places[:, 0]]
    columns = torch.cat([places[:, 1:].double(), torch.ones(len(places), 1, dtype=torch.float64)], dim=1)
    fit = torch.linalg.lstsq(columns * weight[:, None], (exponents * weight)[:, None], driver="gelsd").solution[:, 0]
    steps = fit.round()
    n = torch.full((), float(steps[-1]), dtype=torch.float64)
    for dim, step in enumerate(steps[:-1].tolist(), 1):
        index = torch.arange(table.shape[dim], dtype=torch.float64) * step
        n = n + index.reshape([-1 if d == dim else 1 for d in range(table.dim())])
    return n


def _rates(table: Tensor, logs: Tensor) -> Tensor | None:
    """``m log(gamma_h)`` for a table with one number per head."""
    if table.numel() != len(logs):
        return None
    own = logs.reshape(table.shape)
    power = own.square().sum()
    multiple = round(float((table * own).sum() / power)) if power > 0 else 0
    return multiple * own if multiple else None


def _rounds_to(table: Tensor, wanted: Tensor, unit: float, smallest: float) -> bool:
    """True if ``table`` is ``wanted`` up to rounding, that of an exponent included."""
    exponent = torch.where(wanted > 0, wanted.clamp_min(_TINY).log().abs(), 0.0)
    bound = ROUNDINGS * unit * wanted.abs() * (1 + exponent) + smallest
    return bool(((table - wanted).abs() <= bound).all())
