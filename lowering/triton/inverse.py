"""The inverse of ``I + A``, A strictly lower triangular, as Triton functions that the kernels of both passes call.

Both make ``X = (I + A diag(b))^-1 A`` (see ``lowering/adjoint.py``), the emitted inverse kernel with b = 1, where the
inverse is ``I - X``. Blocks of 16 tokens: a tensor core's tile, so that a product costs what it is, and one warp holds
all of a chunk's. By doubling, X of a block of 2b from those of its halves::

    A = [[P, 0], [L, Q]]        X = [[X_P, 0], [(I - X_Q b_Q) L (I - b_P X_P), X_Q]]
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
def _times_beta(x, b, at: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr):
    """The block's rows, or its columns, times those of b that belong to block ``at``."""
    if SCALED:
        scale = tl.load(b + at * 16 + tl.arange(0, 16))
        x *= scale[:, None] if ROWS else scale[None, :]
    return x


@triton.jit
def _erased(x, b, at: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr):
    """``I - b X`` or, without ROWS, ``I - X b``: of a block at the diagonal."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    return tl.where(i == j, 1.0, 0.0) - _times_beta(x, b, at, ROWS, SCALED)


@triton.jit
def _block(a, b, at: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """X of the block at the diagonal."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    block = block_of(a, at, at, C)
    x = tl.where(((i >> 1) == (j >> 1)) & (i > j), block, 0.0)
    for level in tl.static_range(1, 4):
        pair = ((i >> (level + 1)) == (j >> (level + 1))) & (((i >> level) & 1) > ((j >> level) & 1))
        right = product(tl.where(pair, block, 0.0), _erased(x, b, at, True, SCALED), PRECISION)
        x += product(_erased(x, b, at, False, SCALED), right, PRECISION)
    return x


@triton.jit
def _two_blocks(a, b, at: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """The three lower blocks of X of two blocks of rows."""
    p, q = _block(a, b, at, C, SCALED, PRECISION), _block(a, b, at + 1, C, SCALED, PRECISION)
    right = product(block_of(a, at + 1, at, C), _erased(p, b, at, True, SCALED), PRECISION)
    return p, product(_erased(q, b, at + 1, False, SCALED), right, PRECISION), q


@triton.jit
def _leave(x, m, scale, row: tl.constexpr, column: tl.constexpr, C: tl.constexpr, SCALED: tl.constexpr,
           INVERSE: tl.constexpr):  # fmt: skip
    """A block of X, or of the inverse, its columns scaled."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    if INVERSE:
        x = -x
        if row == column:
            x += tl.where(i == j, 1.0, 0.0)
        x = _times_beta(x, scale, column, False, SCALED)
    tl.store(m + (row * 16 + i) * C + column * 16 + j, x.to(m.dtype.element_ty))


@triton.jit
def _all_blocks(a, b, m, scale, C: tl.constexpr, BETA: tl.constexpr, SCALED: tl.constexpr, INVERSE: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    if C == 16:
        _leave(_block(a, b, 0, C, BETA, PRECISION), m, scale, 0, 0, C, SCALED, INVERSE)
    else:
        x00, x10, x11 = _two_blocks(a, b, 0, C, BETA, PRECISION)
        _leave(x00, m, scale, 0, 0, C, SCALED, INVERSE)
        _leave(x10, m, scale, 1, 0, C, SCALED, INVERSE)
        _leave(x11, m, scale, 1, 1, C, SCALED, INVERSE)
        if C == 64:
            p00, p11 = _erased(x00, b, 0, True, BETA), _erased(x11, b, 1, True, BETA)
            p10 = -_times_beta(x10, b, 1, True, BETA)
            x22, x32, x33 = _two_blocks(a, b, 2, C, BETA, PRECISION)
            _leave(x22, m, scale, 2, 2, C, SCALED, INVERSE)
            _leave(x32, m, scale, 3, 2, C, SCALED, INVERSE)
            _leave(x33, m, scale, 3, 3, C, SCALED, INVERSE)
            q00, q11 = _erased(x22, b, 2, False, BETA), _erased(x33, b, 3, False, BETA)
            q10 = -_times_beta(x32, b, 2, False, BETA)
            for column in tl.static_range(2):
                if column == 0:
                    y0 = product(block_of(a, 2, 0, C), p00, PRECISION) + product(block_of(a, 2, 1, C), p10, PRECISION)
                    y1 = product(block_of(a, 3, 0, C), p00, PRECISION) + product(block_of(a, 3, 1, C), p10, PRECISION)
                else:
                    y0 = product(block_of(a, 2, 1, C), p11, PRECISION)
                    y1 = product(block_of(a, 3, 1, C), p11, PRECISION)
                low = product(q10, y0, PRECISION) + product(q11, y1, PRECISION)
                _leave(product(q00, y0, PRECISION), m, scale, 2, column, C, SCALED, INVERSE)
                _leave(low, m, scale, 3, column, C, SCALED, INVERSE)
    _clear_above(m, C)


@triton.jit
def unit_lower_inverse(a, m, scale, C: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """m = (I + strict lower triangle of a)^-1 diag(scale), tiles ``[C, C]``; of a only the lower triangle is read."""
    _all_blocks(a, a, m, scale, C, False, SCALED, True, PRECISION)


@triton.jit
def solved(a, b, x, C: tl.constexpr, BETA: tl.constexpr, PRECISION: tl.constexpr):
    """x = (I + A diag(b))^-1 A, A the strict lower triangle of a; b counts as 1 without BETA."""
    _all_blocks(a, b, x, x, C, BETA, False, False, PRECISION)


@triton.jit
def _clear_above(m, C: tl.constexpr):
    """The blocks above the diagonal are zero."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    for row in tl.static_range(C // 16):
        for column in tl.static_range(row + 1, C // 16):
            tl.store(m + (row * 16 + i) * C + column * 16 + j, tl.zeros([16, 16], m.dtype.element_ty))
