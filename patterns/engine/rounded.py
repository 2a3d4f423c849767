"""What the model's own numbers of a constant are beside those in float64: the same, the same rounded, or others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile.graph.ir import Op
from kdacompile.patterns.engine.vocabulary import ADDING, LAYOUT, PICKING, PLACING, SELECTIONS

_FEW = 1 << 12
"""Numbers of a constant up to which it is looked whether they are the same as in float64."""

_FILLING = frozenset(("masked_fill", "constant_pad_nd", "scatter"))
"""Operators that place a number they are given."""


def keeps_numbers(op: Op) -> bool:
    """Whether an operator only moves and chooses numbers, and rounds none of them to the dtype of its result."""
    if op.name not in LAYOUT | PICKING | PLACING | SELECTIONS or op.name in ADDING:
        return False
    given = [item for item in (*op.args, *op.kwargs.values()) if isinstance(item, (int, float))]
    placed = [torch.tensor(item, dtype=torch.float64) for item in given] if op.name in _FILLING else []
    if any(bool(item.to(op.out.dtype) != item) for item in placed):
        return False
    read = {value.dtype for value in op.reads} - {torch.bool}
    return all(dtype.is_floating_point and torch.promote_types(dtype, op.out.dtype) == op.out.dtype for dtype in read)


def are_same(own: Tensor, exact: Tensor) -> bool:
    """Whether few numbers are the same in both dtypes."""
    own, exact = _apart(own, exact)
    return own.numel() <= _FEW and torch.equal(own.to(exact.dtype), exact)


def _apart(own: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Both without what repeats one number all along a dimension."""
    for dim in range(own.dim()):
        if own.shape[dim] and own.stride(dim) == 0 == exact.stride(dim):
            own, exact = own.narrow(dim, 0, 1), exact.narrow(dim, 0, 1)
    return own, exact


def float64(dtype: torch.dtype) -> torch.dtype:
    """The dtype that regions are run in where the model has this one."""
    return torch.float64 if dtype.is_floating_point else dtype


def widened(tensor: Tensor) -> Tensor:
    """The same numbers in the dtype that regions are run in."""
    return tensor.to(float64(tensor.dtype))


def widened_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [widened(tensor) for tensor in tensors]


ROUNDINGS = 4
"""Units of rounding by which a constant may be off, for each e-fold of its exponent."""

SINGLE = 1e-5
"""The same in float32, where constants are made in several steps, each of which rounds."""


def settled(own: Tensor, exact: Tensor, roundings: int) -> Tensor:
    """The constant in float64, or the model's own numbers where they are something else than that, rounded."""
    if not own.is_floating_point():
        return own
    wide, true = _apart(own, exact)
    wide = wide.double()
    single = own.dtype == torch.float32 or torch.equal(wide.float().double(), wide)  # or it was cast from there
    facts = torch.finfo(torch.float32 if own.dtype == torch.float64 and single else own.dtype)
    size = true.abs()
    exponent = torch.where(size > 0, size.clamp_min(1e-300).log().abs(), 0.0)
    least = SINGLE if single and own.dtype.itemsize >= torch.float32.itemsize else 0.0
    bound = least * size + roundings * facts.eps / 2 * size * (1 + exponent) + facts.tiny
    alike = (wide == true) | ((wide - true).abs() <= bound) | (wide.isnan() & true.isnan())
    return exact if bool(alike.all()) else wide.expand(own.shape)
