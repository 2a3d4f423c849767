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

from .scratch import Scratch

# exp() of these is exactly 0: below half of the smallest subnormal number
EXP_FLOOR = {torch.float32: -110.0, torch.float64: -800.0}

# Rows of a sub-chunk on targets with a matrix unit: blocks inside it are formed where the gates are, unrounded
SUB_CHUNK = 16


@dataclass(frozen=True)
class Decays:
    """``prefix[i] = decay(i, start)``, ``suffix[j] = decay(end, j)``, ``total``, and a Gram per row set."""

    prefix: Tensor
    suffix: Tensor
    total: Tensor
    grams: tuple[Tensor, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of one Gram matrix. ``strict`` drops the diagonal; ``lower_only``: nobody reads the upper triangle.

    ``operands`` and ``product``: dtypes that a plan hands the scaled rows and columns, and their product, over in
    (without ``scratch`` only: it is how a plan's accuracy is measured).
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


def chunk_decays(
    g: Tensor,
    rows: tuple[Rows, ...],
    cols: Tensor | None,
    *,
    factor: bool,
    scratch: Scratch | None,
    overwrite: bool = False,
) -> Decays:
    """Decays of gates ``g`` [M, C, K] or [M, C, 1], and the gated Gram matrix of each ``rows`` with ``cols``.

    C is a power of two. With ``scratch`` buffers are updated in place (``g`` itself too if it may be overwritten);
    without it every operation is functional and differentiable. Upper triangles are zero by selection.
    """
    if g.shape[-1] == 1 and not (factor and scratch is None):
        return _scalar_decays(g, rows, cols, factor, scratch)
    tree = _Tree(g, factor, scratch, overwrite)
    if cols is None:
        for _ in tree.levels():
            pass
        return tree.finish(())
    return tree.finish(_tree_grams(tree, rows, cols, scratch))


# ---- one gate per token


def _scalar_decays(
    g: Tensor, rows: tuple[Rows, ...], cols: Tensor | None, factor: bool, scratch: Scratch | None
) -> Decays:
    # exp of the floor is an exact 0, so a stronger gate is the same gate; and masking by a product is safe on finite
    # numbers
    g = (torch.log(g) if factor else g).clamp(min=EXP_FLOOR[g.dtype])
    size = g.shape[1]
    prefix = torch.exp(g.cumsum(1))
    total = prefix[:, -1:]
    after = torch.ones(size, size, dtype=g.dtype, device=g.device).tril(-1)
    if scratch is None:
        decay = torch.exp((g * after).cumsum(1))
    else:
        decay = torch.mul(g, after, out=scratch.empty((g.shape[0], size, size), g.dtype, g.device))
        torch.cumsum(decay, 1, out=decay)
        decay.exp_()
    grams: tuple[Tensor, ...] = ()
    if cols is not None:
        cols_t = _turned(cols)
        grams = tuple(_scalar_gram(r, cols_t, decay, scratch) for r in rows)
    return Decays(prefix, decay[:, -1:].mT.clone(), total, tuple(grams))


def _turned(cols: Tensor) -> Tensor:
    """``cols^T``; on a CPU products with a transposed second operand are half as fast as a copy and a plain product."""
    return cols.mT.contiguous() if cols.device.type == "cpu" else cols.mT


def _scalar_gram(r: Rows, cols_t: Tensor, decay: Tensor, scratch: Scratch | None) -> Tensor:
    gram = r.rounded_product(torch.bmm(r.rounded_operand(r.x), cols_t))
    gram = gram * decay if scratch is None else gram.mul_(decay)
    if r.lower_only:
        return gram
    diagonal = -1 if r.strict else 0
    return gram.tril(diagonal) if scratch is None else gram.tril_(diagonal)


# ---- one gate per channel


class _Tree:
    """The running P and F of every block, as exponents (or as factors)."""

    def __init__(self, g: Tensor, factor: bool, scratch: Scratch | None, overwrite: bool) -> None:
        self._factor = factor
        self._in_place = scratch is not None
        self._shape = g.shape
        self._prefix = g
        self._suffix = torch.ones_like(g) if factor else torch.zeros_like(g)
        if scratch is not None and not overwrite:
            self._prefix = scratch.empty(g.shape, g.dtype, g.device).copy_(g)

    def value(self, x: Tensor) -> Tensor:
        return x if self._factor else torch.exp(x)

    def levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield b with the decays of the second halves' rows and of the first halves' columns, each [blocks, b, K]."""
        half = 1
        while half < self._shape[1]:
            first, second = self._prefix.view(-1, 2, half, self._shape[2]).unbind(1)
            early, late = self._suffix.view(-1, 2, half, self._shape[2]).unbind(1)
            yield half, self.value(second), self.value(early)
            through_first, through_second = first[:, -1:], second[:, -1:]
            if self._in_place and self._factor:
                early.mul_(through_second)
                second.mul_(through_first)
            elif self._in_place:
                early.add_(through_second)
                second.add_(through_first)
            else:
                grow = torch.mul if self._factor else torch.add
                self._prefix = torch.stack((first, grow(second, through_first)), 1).view(self._shape)
                self._suffix = torch.stack((grow(early, through_second), late), 1).view(self._shape)
            half *= 2

    def finish(self, grams: tuple[Tensor, ...]) -> Decays:
        total = self.value(self._prefix[:, -1:])
        if not self._in_place:
            return Decays(self.value(self._prefix), self.value(self._suffix), total, grams)
        if self._factor:
            return Decays(self._prefix, self._suffix, total.clone(), grams)
        return Decays(self._prefix.exp_(), self._suffix.exp_(), total, grams)


def _tree_grams(tree: _Tree, rows: tuple[Rows, ...], cols: Tensor, scratch: Scratch | None) -> tuple[Tensor, ...]:
    """The decay enters the products: one batched product a level, for all row sets together."""
    count, (blocks, size, width) = len(rows), cols.shape
    gram = _Gram([r.x.new_zeros(blocks, size) if r.strict else (r.x * cols).sum(-1) for r in rows], scratch)
    scaled = _Scaled(scratch, cols, count)
    for half, row_decay, col_decay in tree.levels():
        x = [r.x.reshape(-1, 2, half, width)[:, 1] for r in rows]
        y = cols.reshape(-1, 2, half, width)[:, 0]
        if half >= SUB_CHUNK and any(r.operands or r.product for r in rows):
            gram.grow(_rounded_level(rows, x, y, row_decay, col_decay))
            continue
        product = torch.bmm(scaled.rows(x, row_decay), scaled.cols_t(y, col_decay))
        gram.grow(product.unflatten(1, (count, half)).transpose(0, 1))
    return gram.finish()


def _rounded_level(rows: tuple[Rows, ...], x: list[Tensor], y: Tensor, row_decay: Tensor, col_decay: Tensor) -> Tensor:
    """One level's products [sets, blocks, b, b] with the roundings of a plan."""
    sets = zip(rows, x, strict=True)
    products = (r.rounded_operand(part * row_decay) @ r.rounded_operand(y * col_decay).mT for r, part in sets)
    return torch.stack([r.rounded_product(product) for r, product in zip(rows, products, strict=True)])


class _Scaled:
    """Decayed rows and columns of a level; the buffered form reuses one buffer of each for all levels."""

    def __init__(self, scratch: Scratch | None, cols: Tensor, count: int) -> None:
        self._rows = self._cols = None
        if scratch is not None:
            half = cols.numel() // 2
            self._rows = scratch.empty((count * half,), cols.dtype, cols.device)
            self._cols = scratch.empty((half,), cols.dtype, cols.device)

    def rows(self, parts: list[Tensor], decay: Tensor) -> Tensor:
        """Every part [blocks, b, K] times the decay, stacked to [blocks, count * b, K]."""
        if self._rows is None:
            return torch.cat([x * decay for x in parts], 1)
        blocks, half, width = decay.shape
        out = self._rows.view(blocks, len(parts) * half, width)
        for x, target in zip(parts, out.split(half, 1), strict=True):
            torch.mul(x, decay, out=target)
        return out

    def cols_t(self, y: Tensor, decay: Tensor) -> Tensor:
        """The transpose of [blocks, b, K] times the same; in memory as well where the product gains by it."""
        blocks, half, width = y.shape
        if self._cols is None:
            return (y * decay).transpose(1, 2)
        if half < 4 or y.device.type != "cpu":
            return torch.mul(y, decay, out=self._cols.view(blocks, half, width)).transpose(1, 2)
        return torch.mul(y.transpose(1, 2), decay.transpose(1, 2), out=self._cols.view(blocks, width, half))


class _Gram:
    """Lower triangular matrices [count, M, C, C] grown from their diagonals: blocks of b, then of 2b, ..."""

    def __init__(self, diagonals: list[Tensor], scratch: Scratch | None) -> None:
        self._count = len(diagonals)
        self._in_place = scratch is not None
        self._half = 1
        blocks, self._size = diagonals[0].shape
        diagonal = torch.stack(diagonals)
        if scratch is None:
            self._matrix = diagonal.view(self._count, -1, 1, 1)
            return
        self._matrix = diagonal.new_zeros(self._count, blocks, self._size, self._size)
        self._matrix.diagonal(dim1=2, dim2=3).copy_(diagonal)

    def grow(self, lower: Tensor) -> None:
        """Put ``lower`` [count, blocks, b, b] below the diagonal of each pair of neighbouring blocks."""
        half, wide = self._half, 2 * self._half
        if self._in_place:
            shape = (self._count, -1, self._size // wide, wide, self._size // wide, wide)
            target = self._matrix.view(shape).diagonal(dim1=2, dim2=4)[:, :, half:, :half].permute(0, 1, 4, 2, 3)
            target.copy_(lower.unflatten(1, target.shape[1:3]))
        else:
            first, second = self._matrix.unflatten(1, (-1, 2)).unbind(2)
            top = torch.nn.functional.pad(first, (0, half))
            self._matrix = torch.cat((top, torch.cat((lower, second), -1)), -2)
        self._half = wide

    def finish(self) -> tuple[Tensor, ...]:
        return self._matrix.unbind(0)
