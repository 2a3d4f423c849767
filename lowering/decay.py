"""Decays inside a chunk, exact for any gate: only sums of log gates, never a difference of cumulative sums.

``decay(i, j) = exp(g_{j+1} + ... + g_i)`` is needed for all pairs j < i of a chunk. As ``exp(G_i - G_j)`` it is inf -
inf after a gate of ``-inf``, and after one of -1000 the difference has lost the digits of its mild neighbours. So
nothing is subtracted here.

*One gate per channel*, by doubling. Split a block of ``2b`` tokens in two halves; for i in the second and j in the
first half

    decay(i, j) = exp(P_i) exp(F_j)      P_i = sum of g from the second half's first token to i
                                         F_j = sum of g from j + 1 to the first half's last token

Both exponents are sums of log gates, never positive, so nothing overflows; P_i reads tokens up to i only, so outputs
are causal bit for bit. Doubling b from 1 covers every pair once, and P and F of the next level are one addition away.
It is the two-level scheme of the literature taken to its last level: no diagonal block is left to treat one by one.
With gates given as factors in [0, 1] the same tree multiplies instead and needs no exponential: alpha = 0 is exact,
and so is its gradient.

*One gate per token*: the decays form a matrix [C, C] that scales the plain Gram matrix; its exponents are cumulative
sums down the columns, each starting at its own token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# exp() of these is exactly 0: below half of the smallest subnormal number
EXP_FLOOR = {torch.float32: -110.0, torch.float64: -800.0}

# Rows of a sub-chunk on targets with a matrix unit: blocks inside it are formed where the gates are, unrounded
SUB_CHUNK = 16


@dataclass(frozen=True)
class Rows:
    """The rows of one Gram matrix. ``strict`` drops the diagonal; ``lower_only``: nobody reads the upper triangle.

    ``operands`` and ``product``: dtypes that a plan hands the scaled rows and columns, and their product, over in.
    """

    x: Tensor
    strict: bool
    lower_only: bool = False
    operands: torch.dtype | None = None
    product: torch.dtype | None = None

    def rounded_operand(self, x: Tensor) -> Tensor:
        return x if self.operands is None else x.to(self.operands).to(x.dtype)

    def rounded_product(self, x: Tensor) -> Tensor:
        return x if self.product is None else x.to(self.product).to(x.dtype)


def gated_grams(rows: tuple[Rows, ...], cols: Tensor, g: Tensor, *, factor: bool) -> tuple[Tensor, ...]:
    """The gated Gram matrix [M, C, C] of each ``rows`` with ``cols`` [M, C, K], for gates ``g`` [M, C, K] or [M, C, 1].

    C is a power of two. Upper triangles are zero by selection.
    """
    return _by_doubling(rows, cols, g, factor) if factor or g.shape[-1] > 1 else _of_one_gate(rows, cols, g)


def _of_one_gate(rows: tuple[Rows, ...], cols: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    # exp of the floor is an exact 0, so a stronger gate is the same gate; and masking by a product is safe on finite
    # numbers
    g = g.clamp(min=EXP_FLOOR[g.dtype])
    after = torch.ones(g.shape[1], g.shape[1], dtype=g.dtype, device=g.device).tril(-1)
    decay = torch.exp((g * after).cumsum(1))
    # On a CPU products with a transposed second operand are half as fast as a copy and a plain product.
    turned = cols.mT.contiguous() if cols.device.type == "cpu" else cols.mT
    grams = (r.rounded_product(torch.bmm(r.rounded_operand(r.x), turned)) * decay for r in rows)
    return tuple(x if r.lower_only else x.tril(-1 if r.strict else 0) for r, x in zip(rows, grams, strict=True))


def _levels(g: Tensor, factor: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    """b with the decays of the second halves' rows and of the first halves' columns, each [blocks, b, K]."""
    half, shape = 1, g.shape
    prefix, suffix = g, torch.ones_like(g) if factor else torch.zeros_like(g)
    while half < shape[1]:
        first, second = prefix.view(-1, 2, half, shape[2]).unbind(1)
        early, late = suffix.view(-1, 2, half, shape[2]).unbind(1)
        yield half, *((second, early) if factor else (second.exp(), early.exp()))
        grow = torch.mul if factor else torch.add
        prefix = torch.stack((first, grow(second, first[:, -1:])), 1).view(shape)
        suffix = torch.stack((grow(early, second[:, -1:]), late), 1).view(shape)
        half *= 2


def _by_doubling(rows: tuple[Rows, ...], cols: Tensor, g: Tensor, factor: bool) -> tuple[Tensor, ...]:
    """The decay enters the products: one batched product a level, for all row sets together.

    The matrices [sets, blocks, b, b] grow from their diagonals: blocks of b, then of 2b, ...
    """
    blocks, size, width = cols.shape
    diagonals = [r.x.new_zeros(blocks, size) if r.strict else (r.x * cols).sum(-1) for r in rows]
    matrix = torch.stack(diagonals).view(len(rows), -1, 1, 1)
    for half, row_decay, col_decay in _levels(g, factor):
        x = [r.x.reshape(-1, 2, half, width)[:, 1] for r in rows]
        y = cols.reshape(-1, 2, half, width)[:, 0]
        if half >= SUB_CHUNK and any(r.operands or r.product for r in rows):
            lower = _rounded_level(rows, x, y, row_decay, col_decay)
        else:
            product = torch.bmm(torch.cat([part * row_decay for part in x], 1), (y * col_decay).transpose(1, 2))
            lower = product.unflatten(1, (len(rows), half)).transpose(0, 1)
        first, second = matrix.unflatten(1, (-1, 2)).unbind(2)
        top = torch.nn.functional.pad(first, (0, half))
        matrix = torch.cat((top, torch.cat((lower, second), -1)), -2)
    return matrix.unbind(0)


def _rounded_level(rows: tuple[Rows, ...], x: list[Tensor], y: Tensor, row_decay: Tensor, col_decay: Tensor) -> Tensor:
    """One level's products [sets, blocks, b, b] with the roundings of a plan."""
    sets = zip(rows, x, strict=True)
    products = (r.rounded_operand(part * row_decay) @ r.rounded_operand(y * col_decay).mT for r, part in sets)
    return torch.stack([r.rounded_product(product) for r, product in zip(rows, products, strict=True)])
