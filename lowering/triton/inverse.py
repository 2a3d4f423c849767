"""The inverse of ``I + A``, A strictly lower triangular, as Triton functions that the emitted inverse kernel calls.

Blocks of 16 tokens: a tensor core's tile, so that a product costs what it is, and one warp holds all of a chunk's. By
doubling, the inverse of a block of 2b from those of its halves::

    [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x y of two blocks. "fp16": operands in fp16, for matrices whose inverse is known to be small."""
    if PRECISION == "fp16":
        result = tl.dot(x.to(tl.float16), y.to(tl.float16))
    else:
        result = tl.dot(x, y, input_precision=PRECISION)
    return result


@triton.jit
def block_of(a, row: tl.constexpr, column: tl.constexpr, C: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    return tl.load(a + (row * 16 + i) * C + column * 16 + j).to(tl.float32)


@triton.jit
def store_block(x, m, scale, row: tl.constexpr, column: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr):
    """A block of the inverse, its columns scaled."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    if SCALED:
        x *= tl.load(scale + column * 16 + j)
    tl.store(m + (row * 16 + i) * C + column * 16 + j, x.to(m.dtype.element_ty))


@triton.jit
def inverse_1(a, at: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of the block at the diagonal."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    block = block_of(a, at, at, C)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(((i >> 1) == (j >> 1)) & (i > j), block, 0.0)
    for level in tl.static_range(1, 4):
        pair = ((i >> (level + 1)) == (j >> (level + 1))) & (((i >> level) & 1) > ((j >> level) & 1))
        inverse -= product(inverse, product(tl.where(pair, block, 0.0), inverse, PRECISION), PRECISION)
    return inverse


@triton.jit
def inverse_2(a, at: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The three lower blocks of the inverse of two blocks of rows."""
    p, q = inverse_1(a, at, C, PRECISION), inverse_1(a, at + 1, C, PRECISION)
    low = product(q, product(block_of(a, at + 1, at, C), p, PRECISION), PRECISION)
    return p, -low, q


@triton.jit
def unit_lower_inverse(a, m, scale, C: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """m = (I + strict lower triangle of a)^-1 diag(scale), tiles ``[C, C]``; of a only the lower triangle is read."""
    if C == 16:
        store_block(inverse_1(a, 0, C, PRECISION), m, scale, 0, 0, C, SCALED)
    else:
        p00, p10, p11 = inverse_2(a, 0, C, PRECISION)
        store_block(p00, m, scale, 0, 0, C, SCALED)
        store_block(p10, m, scale, 1, 0, C, SCALED)
        store_block(p11, m, scale, 1, 1, C, SCALED)
        if C == 64:
            q00, q10, q11 = inverse_2(a, 2, C, PRECISION)
            store_block(q00, m, scale, 2, 2, C, SCALED)
            store_block(q10, m, scale, 3, 2, C, SCALED)
            store_block(q11, m, scale, 3, 3, C, SCALED)
            for column in tl.static_range(2):
                if column == 0:
                    y0 = product(block_of(a, 2, 0, C), p00, PRECISION) + product(block_of(a, 2, 1, C), p10, PRECISION)
                    y1 = product(block_of(a, 3, 0, C), p00, PRECISION) + product(block_of(a, 3, 1, C), p10, PRECISION)
                else:
                    y0 = product(block_of(a, 2, 1, C), p11, PRECISION)
                    y1 = product(block_of(a, 3, 1, C), p11, PRECISION)
                low = product(q10, y0, PRECISION) + product(q11, y1, PRECISION)
                store_block(-product(q00, y0, PRECISION), m, scale, 2, column, C, SCALED)
                store_block(-low, m, scale, 3, column, C, SCALED)
    _clear_above(m, C)


@triton.jit
def _clear_above(m, C: tl.constexpr):
    """The blocks above the diagonal are zero."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    for row in tl.static_range(C // 16):
        for column in tl.static_range(row + 1, C // 16):
            tl.store(m + (row * 16 + i) * C + column * 16 + j, tl.zeros([16, 16], m.dtype.element_ty))
