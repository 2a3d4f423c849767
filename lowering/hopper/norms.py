"""Gluon: the norms of the rows of q and k in the prepare kernels with a gate per channel."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .common import magnitude, over

BLOCKS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))  # [WIDTH / 16, 16, 16]
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def squares_buffer(WIDTH: gl.constexpr):
    """Shared memory for ``leave_squares``."""
    return gl.allocate_shared_memory(gl.float32, [WIDTH // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def leave_squares(tile, squares):
    """The squared norms of a tile's rows [64, WIDTH] into ``squares``: of the first 64 columns, and of the others.

    They are the diagonals of the products of 16 rows by 64 columns with themselves, a warp each: 50 instructions where
    sums over a warp's lanes take 250, of which 80 are exchanges.
    """
    COUNT: gl.constexpr = tile.shape[1] // 16
    blocks = tile._reinterpret(gl.bfloat16, [COUNT, 16, 64], BLOCKS)
    left = blocks.load(gl.DotOperandLayout(0, PRODUCTS, 2))
    right = blocks.permute((0, 2, 1)).load(gl.DotOperandLayout(1, PRODUCTS, 2))
    x = mma_v2(left, right, gl.zeros([COUNT, 16, 16], gl.float32, layout=PRODUCTS))
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, PRODUCTS)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, PRODUCTS)))[None, None, :]
    squares.store(gl.sum(gl.where(i == j, x, 0.0), 2))


@gluon.jit
def squares_of(squares, live, ROWS: gl.constexpr, PACKED: gl.constexpr):
    """What ``leave_squares`` left, of each warp's rows [8, 8, 1]; 0 of rows of the next sequence."""
    HALVES: gl.constexpr = squares.shape[0] // 4
    OWN: gl.constexpr = gl.BlockedLayout([HALVES, 1, 8], [1, 1, 32], [1, 8, 1], [2, 1, 0])
    x = squares._reinterpret(gl.float32, [HALVES, 8, 8], LINES).load(OWN)
    x = gl.convert_layout(gl.sum(x, 0), gl.SliceLayout(2, ROWS))[:, :, None]
    if PACKED:
        x = gl.where(live, x, 0.0)
    return x


@gluon.jit
def row_factor(square, eps, RAW: gl.constexpr):
    """What a row of squared norm ``square`` is multiplied by to meet another in a Gram matrix.

    One over its norm; RAW, the power of two that leaves a norm in [1, 2), so that products stay in range and the digits
    are those of the row as it is. Gram matrices and what leaves are multiplied back.
    """
    if RAW:
        factor = over(magnitude(square))
    else:
        factor = gl.rsqrt(square + eps)
    return factor


@gluon.jit
def keep_line(line, x):
    """A number of every token [8, 8] into 64 in shared memory."""
    line.store(gl.reshape(x, [64]))


@gluon.jit
def kept_line(line, ROWS: gl.constexpr):
    """What ``keep_line`` kept [64], of each warp's eight tokens [8, 8, 1]."""
    rows = line._reinterpret(gl.float32, [8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return rows.load(gl.SliceLayout(2, ROWS))[:, :, None]
