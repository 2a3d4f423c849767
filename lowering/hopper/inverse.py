"""Gluon: the inverse of a chunk's triangular matrix on the tensor cores, and how a tile's [64, 64] matrices leave."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import LEFT, TILE, barrier


@gluon.jit
def _invert(A, a, z, i, j, tile_n, tile_x, tile_p):
    """(I + A)^-1 for A [64, 64] strictly lower triangular, in registers and as ``a`` (fp16) in shared memory.

    Blocks of 4, 16, 64 in turn: with X the inverse of the diagonal blocks and N = X L, L the rest of the next size,
    N^4 = 0 and (I + N)^-1 X = (I + N^2) (X - N X). Products with A instead of L, masked, need no tile of their own.
    """
    same4 = (i >> 2) == (j >> 2)
    same16 = (i >> 4) == (j >> 4)
    n = gl.where(same4, A, 0.0)
    n2 = gl.where(same4, warpgroup_mma(gl.convert_layout(n.to(gl.float16), LEFT), a, z, use_acc=False), 0.0)
    n3 = gl.where(same4, warpgroup_mma(gl.convert_layout(n2.to(gl.float16), LEFT), a, z, use_acc=False), 0.0)
    x = gl.where(i == j, 1.0, 0.0) - n + n2 - n3
    for level in gl.static_range(2):
        x16 = x.to(gl.float16)
        n = warpgroup_mma(gl.convert_layout(x16, LEFT), a, z, use_acc=False, is_async=True)
        tile_x.store(x16)
        n = warpgroup_mma_wait(0, [n])
        if level == 0:
            n = gl.where(same16, gl.where(same4, 0.0, n), 0.0)
        else:
            n = gl.where(same16, 0.0, n)
        n16 = n.to(gl.float16)
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
        x = warpgroup_mma(gl.convert_layout(nn.to(gl.float16), LEFT), tile_p, p)
    return x


@gluon.jit
def leave_inverse(A, z, i, j, beta_j, tiles, at: gl.constexpr, d_out, row):
    """Send M = (I + A)^-1 diag(beta) to the buffer's rows from ``row``; A is in ``tiles[at]`` too, as fp16."""
    x = _invert(A, tiles.index(at), z, i, j, tiles.index(at + 1), tiles.index(at + 2), tiles.index(at + 3))
    # The tile that nobody has read since the last barrier.
    m_out = tiles.index(at + 1)._reinterpret(gl.bfloat16, [64, 64], TILE)
    m_out.store((x * beta_j[None, :]).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(d_out, [row, 0], m_out)
