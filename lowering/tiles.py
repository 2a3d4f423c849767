"""Torch implementations of the tile ops that are more than one torch call."""

from __future__ import annotations

import torch
from torch import Tensor


def cumsum(x: Tensor, *, reverse: bool) -> Tensor:
    """Sums over rows ``<= i``; with ``reverse`` over rows ``> i``."""
    if not reverse:
        return x.cumsum(1)
    later = x[:, 1:].flip(1).cumsum(1).flip(1)
    return torch.nn.functional.pad(later, (0, 0, 0, 1))


def cumprod(x: Tensor, *, reverse: bool) -> Tensor:
    """Products over rows as ``cumsum`` has sums, by doubling: torch's own backward asks for zeros on the host."""
    if reverse:
        later = cumprod(x[:, 1:].flip(1), reverse=False).flip(1)
        return torch.nn.functional.pad(later, (0, 0, 0, 1), value=1.0)
    shift = 1
    while shift < x.shape[1]:
        x = x * torch.nn.functional.pad(x[:, :-shift], (0, 0, shift, 0), value=1.0)
        shift *= 2
    return x


def lower(x: Tensor, *, strict: bool) -> Tensor:
    """The (strict) lower triangle; what is above is selected away, whatever it is."""
    return x.tril(-1 if strict else 0)


def unit_lower_inverse(x: Tensor) -> Tensor:
    """``(I + strict lower triangle)^-1``; what is above the diagonal, and on it, is not read."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    return torch.linalg.solve_triangular(x, eye, upper=False, unitriangular=True)


def gated_dot(weights: Tensor, y: Tensor, g: Tensor, *, trans: bool) -> Tensor:
    """``sum_j weights[i,j] y[j,d] exp(g[j+1,d] + ... + g[i,d])`` over j <= i, or with ``trans`` the same over rows.

    By halves: a row of the second and a column of the first have the decay up to the middle and the one from it.
    Gates are summed and never subtracted.
    """
    rows = y.shape[1]
    if rows == 1:
        return weights * y
    half = rows // 2
    first, second = slice(half), slice(half, rows)
    until = cumsum(g[:, first], reverse=True).exp()
    since = cumsum(g[:, second], reverse=False).exp()
    top, bottom = (gated_dot(weights[:, part, part], y[:, part], g[:, part], trans=trans) for part in (first, second))
    below = weights[:, second, first]
    if trans:
        top = top + until * (below.mT @ (y[:, second] * since))
    else:
        bottom = bottom + since * (below @ (y[:, first] * until))
    return torch.cat((top, bottom), 1)


def row_max(x: Tensor) -> Tensor:
    """Largest of each row, but no less than the lowest finite number."""
    return x.amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).min)


def shared_product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y`` for ``[B, heads, rows, cols]`` tensors; where one side has one head, it is read once for all heads."""
    if y.shape[1] == 1 and x.shape[1] > 1:
        return (x.flatten(1, 2) @ y.squeeze(1)).unflatten(1, x.shape[1:3])
    return x @ y
