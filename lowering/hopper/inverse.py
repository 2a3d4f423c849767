"""Gluon: the inverse of a chunk's triangular matrix on the tensor cores, and how a tile's [64, 64] matrices leave."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import ACROSS, DOWN, LEFT, SEQUENCE, SQUARE, TILE, barrier, magnitude, over, pinned

BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # [4, 16, 16]
LEFT_BLOCKS = gl.constexpr(gl.DotOperandLayout(0, BLOCKS.value, 2))
RIGHT_BLOCKS = gl.constexpr(gl.DotOperandLayout(1, BLOCKS.value, 2))


@gluon.jit
def _diagonal(A, i, j):
    """The blocks of 16 on the diagonal [4, 16, 16] of A [64, 64]: each is its warp's own, and nothing moves."""
    own = gl.where((i >> 4) == (j >> 4), A, 0.0)
    return gl.convert_layout(gl.reshape(gl.sum(gl.reshape(own, [64, 4, 16]), 1), [4, 16, 16]), BLOCKS)


@gluon.jit
def _on_diagonal(x, i, j):
    """A [64, 64] of such blocks."""
    x = gl.reshape(gl.permute(gl.join(x, x), (0, 1, 3, 2)), [4, 16, 32])
    x = gl.reshape(gl.permute(gl.join(x, x), (0, 1, 3, 2)), [64, 64])
    return gl.where((i >> 4) == (j >> 4), gl.convert_layout(x, SQUARE), 0.0)


@gluon.jit
def _left(x):
    return gl.convert_layout(x.to(gl.float16), LEFT_BLOCKS)


@gluon.jit
def _right(x):
    return gl.convert_layout(x.to(gl.float16), RIGHT_BLOCKS)


@gluon.jit
def _invert_blocks(a):
    """(I + a)^-1 for strictly lower triangular a [4, 16, 16]; a warp has a block, and waits for no other."""
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCKS)))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS)))[None, None, :]
    same4 = (i >> 2) == (j >> 2)
    zero = gl.zeros([4, 16, 16], gl.float32, layout=BLOCKS)
    right = _right(a)
    n = gl.where(same4, a, 0.0)
    n2 = gl.where(same4, mma_v2(_left(n), right, zero), 0.0)
    n3 = gl.where(same4, mma_v2(_left(n2), right, zero), 0.0)
    x = gl.where(i == j, 1.0, 0.0) - n + n2 - n3
    n = _left(gl.where(same4, 0.0, mma_v2(_left(x), right, zero)))
    n_right = gl.convert_layout(n, RIGHT_BLOCKS)
    p = x - mma_v2(n, _right(x), zero)
    return mma_v2(_left(mma_v2(n, n_right, zero)), _right(p), p)


@gluon.jit
def _invert(A, a, z, i, j, tile_n, tile_x, tile_p):
    """(I + A)^-1 for A [64, 64] strictly lower triangular, in registers and as ``a`` (fp16) in shared memory.

    Blocks of 4, 16, 64 in turn: with X the inverse of the diagonal blocks and N = X L, L the rest of the next size,
    N^4 = 0 and (I + N)^-1 X = (I + N^2) (X - N X). Products with A instead of L, masked, need no tile of their own.
    Up to 16 a warp is on its own. ``tile_p`` may be ``a``.
    """
    x = _on_diagonal(_invert_blocks(_diagonal(A, i, j)), i, j)
    x16 = x.to(gl.float16)
    n = warpgroup_mma(gl.convert_layout(x16, LEFT), a, z, use_acc=False, is_async=True)
    tile_x.store(x16)
    n = warpgroup_mma_wait(0, [n])
    n16 = gl.where((i >> 4) == (j >> 4), 0.0, n).to(gl.float16)
    tile_n.store(n16)
    fence_async_shared()
    barrier()
    left = gl.convert_layout(n16, LEFT)
    nx = warpgroup_mma(left, tile_x, z, use_acc=False, is_async=True)
    nn = warpgroup_mma(left, tile_n, z, use_acc=False, is_async=True)
    nx = warpgroup_mma_wait(1, [nx])
    p = x - nx
    tile_p.store(p.to(gl.float16))
    nn = warpgroup_mma_wait(0, [nn])
    fence_async_shared()
    barrier()
    return warpgroup_mma(gl.convert_layout(nn.to(gl.float16), LEFT), tile_p, p)


@gluon.jit
def _split(x):
    """x as a sum of two bf16, which keep 16 bits of it and all of its range."""
    high = x.to(gl.bfloat16)
    return high, (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _keep(x, tile_high, tile_low):
    """x in two tiles, once nobody reads them any more."""
    high, low = _split(x)
    barrier()
    tile_high._reinterpret(gl.bfloat16, [64, 64], TILE).store(high)
    tile_low._reinterpret(gl.bfloat16, [64, 64], TILE).store(low)
    fence_async_shared()
    barrier()


@gluon.jit
def _times(x, tile_high, tile_low, acc):
    """acc + x times what was kept."""
    high, low = _split(x)
    high = gl.convert_layout(high, LEFT)
    right_high = tile_high._reinterpret(gl.bfloat16, [64, 64], TILE)
    acc = warpgroup_mma(gl.convert_layout(low, LEFT), right_high, acc)
    acc = warpgroup_mma(high, tile_low._reinterpret(gl.bfloat16, [64, 64], TILE), acc)
    return warpgroup_mma(high, right_high, acc)


@gluon.jit
def _invert_unbounded(z, i, j, a_high, a_low, high, low):
    """:func:`_invert` for any A, which is kept: products of 16 bits and fp32's range, which take three times as long.

    Blocks of 1, 2, .. 64 in turn, in a loop, for it is rarely met: X - X L X, L the rest of the next size.
    """
    x = gl.where(i == j, 1.0, 0.0)
    for level in range(6):
        _keep(x, high, low)
        n = _times(x, a_high, a_low, z)
        n = gl.where((((i >> level) ^ (j >> level)) == 1) & (i > j), n, 0.0)
        x = x - _times(n, high, low, z)
    return x


@gluon.jit
def first_steep(square, beta):
    """The first token whose step, I - beta k k^T, may enlarge what it meets; 64 without one.

    square: |k|^2; both of all 64 tokens in every warp. Until there every product of the inverse is one of contractions,
    and fp16 holds it. Keys that were normalised before they were rounded pass with a beta of 2.
    """
    step = square * beta
    place = gl.arange(0, 64, layout=SEQUENCE)
    return gl.min(gl.where((step >= 0.0) & (step <= 2.03125), 64, place), 0)


@gluon.jit
def factors_of(betas, k_squares, RAW: gl.constexpr, CHECKED: gl.constexpr):
    """What multiplies the rows of A, and the first token from which on fp16 may not hold the inverse.

    RAW keys were divided by powers of two, ``d``: with A = diag(d)^-1 A' diag(d) the inverse of I + A is
    diag(d)^-1 (I + A')^-1 diag(d), and the rows of A' have the factors beta d^2.
    """
    row = betas.load(DOWN)
    steep = 64
    if RAW:
        power = magnitude(k_squares.load(DOWN))
        row = row * power * power
    if CHECKED:
        square = gl.full([64], 1.0, gl.float32, layout=SEQUENCE)
        if RAW:
            square = k_squares.load(SEQUENCE)
        steep = first_steep(square, betas.load(SEQUENCE))
    return row, steep


@gluon.jit
def keep_steep(A, i, steep, tiles, FIRST: gl.constexpr = 0):
    """For :func:`leave_inverse`: A [64, 64] as a sum of two bf16 in the two tiles behind the first, if rows ask for it.

    Rows before ``steep`` are what fp16 has of them, which two bf16 hold. No product may be under way: ptxas would wait
    for every product of the kernel.
    """
    if steep < 64:
        high, low = _split(gl.where(pinned(i) < steep, A.to(gl.float16).to(gl.float32), A))
        tiles.index(FIRST + 1)._reinterpret(gl.bfloat16, [64, 64], TILE).store(high)
        tiles.index(FIRST + 2)._reinterpret(gl.bfloat16, [64, 64], TILE).store(low)


@gluon.jit
def scaled_back(qk, k_squares, q_squares, scale, RAW: gl.constexpr, FOLDED: gl.constexpr = False):
    """A_qk of rows as they are, from that of RAW rows divided by powers of two; FOLDED, of keys still divided."""
    if RAW:
        qk = qk * (magnitude(q_squares.load(DOWN)) * scale)[:, None]
        if not FOLDED:
            qk = qk * magnitude(k_squares.load(ACROSS))[None, :]
    return qk


@gluon.jit
def _finished(x, betas, k_squares, RAW: gl.constexpr, APART: gl.constexpr, FOLDED: gl.constexpr):
    """M of the inverse x."""
    if RAW:
        if not FOLDED:  # keys that are still divided meet it
            x = x * over(magnitude(k_squares.load(DOWN)))[:, None]
        across = magnitude(k_squares.load(ACROSS))
        if not APART:
            across = betas.load(ACROSS) * across
        x = x * across[None, :]
    elif not APART:
        x = x * betas.load(ACROSS)[None, :]
    return x.to(gl.bfloat16)


@gluon.jit
def _steep_rows(
    i, j, betas, k_squares, steep, tiles, at, RAW: gl.constexpr, APART: gl.constexpr, FOLDED: gl.constexpr
):  # fmt: skip
    """M by products that keep fp32's range into the last tile, and into the first what is left of A for the others."""
    i += steep >> 7  # 0, or ptxas would keep masks from before the branch, packed into registers bit by bit
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    high, low = tiles.index(at + 1), tiles.index(at + 2)
    y = _invert_unbounded(z, i, j, high, low, tiles.index(at + 3), tiles.index(at))
    y = _finished(y, betas, k_squares, RAW, APART, FOLDED)
    barrier()
    tiles.index(at + 3)._reinterpret(gl.bfloat16, [64, 64], TILE).store(y)
    A = high._reinterpret(gl.bfloat16, [64, 64], TILE).load(SQUARE).to(gl.float32)
    A += low._reinterpret(gl.bfloat16, [64, 64], TILE).load(SQUARE).to(gl.float32)
    tiles.index(at).store(gl.where(i < steep, A, 0.0).to(gl.float16))
    fence_async_shared()
    barrier()


@gluon.jit
def leave_inverse(
    z, i, j, betas, k_squares, steep, tiles, zero, d_out, row, CHECKED: gl.constexpr, RAW: gl.constexpr,
    APART: gl.constexpr = False, FIRST: gl.constexpr = 0, FOLDED: gl.constexpr = False,
):  # fmt: skip
    """Send M, the inverse of I + A with columns times beta, to the buffer's rows from ``row``; see ``factors_of``.

    A is in ``tiles[FIRST]`` as fp16, and read again: registers did not hold it beside the products of q. zero: see
    ``unknown_zero``. CHECKED: rows from ``steep`` on may have an inverse that fp16 does not hold, and ``keep_steep``
    has been called. The rows before never change with them: outputs are causal bit for bit. APART: without beta.
    FOLDED: it stays in the second tile, for :mod:`.fold`.

    The branch has a zero of its own. With one for all ptxas (12.8) keeps descriptors in uniform registers, and where
    the branch is not taken reads some that nobody has written: addresses beyond the shared memory, or other tiles. So
    it does with constants from which it may compute them in advance.
    """
    at = FIRST + zero
    if CHECKED:
        if steep < 64:
            _steep_rows(i, j, betas, k_squares, steep, tiles, FIRST + (steep >> 7), RAW, APART, FOLDED)
        i += steep >> 8
    A = tiles.index(at).load(SQUARE).to(gl.float32)
    P: gl.constexpr = 0 if CHECKED else 3  # the last one has the rows from ``steep`` on
    x = _invert(A, tiles.index(at), z, i, j, tiles.index(at + 1), tiles.index(at + 2), tiles.index(at + P))
    x = _finished(x, betas, k_squares, RAW, APART, FOLDED)
    m_out = tiles.index(at + 1)._reinterpret(gl.bfloat16, [64, 64], TILE)
    m_out.store(x)
    if CHECKED:
        if steep < 64:
            y = tiles.index(at + 3)._reinterpret(gl.bfloat16, [64, 64], TILE)
            m_out.store(gl.where(i < steep, x, y.load(SQUARE)))
    fence_async_shared()
    barrier()
    if not FOLDED:
        tma.async_copy_shared_to_global(d_out, [row, 0], m_out)


@gluon.jit
def solved(tiles, spare, beta, BETA: gl.constexpr, CHECKED: gl.constexpr):
    """(I + L diag(beta))^-1 L, in registers, of keys of norm 1; L in the first of four tiles, fp16.

    CHECKED: beta may be anything. Rows from the first token on whose step may enlarge (see ``first_steep``) are made by
    products that keep fp32's range, with a ``spare`` tile; the rows before do not change with them.
    """
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    j = gl.arange(0, 64, layout=ACROSS)[None, :]
    A = tiles.index(0).load(SQUARE).to(gl.float32)
    if BETA:
        A = A * gl.load(beta + j)
    if CHECKED:
        place = gl.arange(0, 64, layout=SEQUENCE)
        steep = first_steep(gl.full([64], 1.0, gl.float32, layout=SEQUENCE), gl.load(beta + place))
        A = gl.where(i < steep, A, 0.0)
    tiles.index(1).store(A.to(gl.float16))
    fence_async_shared()
    barrier()
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    x = _invert(A, tiles.index(1), z, i, j, tiles.index(2), tiles.index(3), tiles.index(1))
    x = warpgroup_mma(gl.convert_layout(x.to(gl.float16), LEFT), tiles.index(0), z, use_acc=False)
    if CHECKED:
        if steep < 64:  # apart: one is known to the compiler, the other is not
            i = pinned(i)
            x = gl.where(i < steep, x, _solved_unbounded(tiles, spare, beta, steep >> 7, i, j))
    return x


@gluon.jit
def _solved_unbounded(tiles, spare, beta, zero, i, j):
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    A = tiles.index(zero).load(SQUARE).to(gl.float32) * gl.load(beta + j)
    _keep(A, tiles.index(zero + 1), tiles.index(zero + 2))
    y = _invert_unbounded(
        z, i, j, tiles.index(zero + 1), tiles.index(zero + 2), tiles.index(zero + 3), spare
    )  # fmt: skip
    _keep(tiles.index(zero).load(SQUARE).to(gl.float32), tiles.index(zero + 3), spare)
    y = _times(y, tiles.index(zero + 3), spare, z)
    barrier()  # and nobody reads them any more
    return y


@gluon.jit
def unknown_zero(n):
    """0 for a loop's n-th turn, which the compiler does not know.

    Where tiles are indexed with it, it computes the descriptors of their products where they are used. It would keep
    them in registers otherwise, more than there are.
    """
    return n >> 30
