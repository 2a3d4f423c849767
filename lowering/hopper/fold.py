"""Gluon: what a chunk's triangular inverse does to its products with keys and queries, before the state is known.

V_new = M R meets only K_decayed^T and A_qk, so both are multiplied by M first::

    O = Q_gated S + (A_qk M) R            S = diag(decay) S + (M^T K_decayed)^T R

and what waits for the state is R = V - K_gated S and one product with it (:mod:`.scan_channel`). M^T K_decayed takes
the place of K_decayed, A_qk M that of A_qk, and K_gated leaves with its sign turned.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import SQUARE, TILE, barrier, put

ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def put_end(end, end_free, end_ready, it, k):
    """The row warps' part: K_decayed, once the chunk before has left."""
    mbarrier.wait(end_free, (it & 1) ^ 1)
    put(end, k)
    fence_async_shared()
    barrier()
    mbarrier.arrive(end_ready, count=1)


@gluon.jit
def leave_folded(tiles, zero, end, end_ready, it, d_out, row):
    """With M in tile 1 and A_qk in tile 4: M^T K_decayed into the rows before ``row``, A_qk M into those behind it."""
    M = tiles.index(zero + 1)._reinterpret(gl.bfloat16, [64, 64], TILE)
    A_qk = tiles.index(zero + 4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    own_out = tiles.index(zero + 2)._reinterpret(gl.bfloat16, [64, 64], TILE)
    halves = end._reinterpret(gl.bfloat16, [2, 64, 64], TILE)
    own = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    own = warpgroup_mma(A_qk, M, own, use_acc=False, is_async=True)
    mbarrier.wait(end_ready, it & 1)
    k = gl.zeros([64, 128], gl.float32, layout=ROWS)
    k = warpgroup_mma(M.permute((1, 0)), end, k, use_acc=False, is_async=True)
    own = warpgroup_mma_wait(1, [own])
    own_out.store(own.to(gl.bfloat16))
    k = warpgroup_mma_wait(0, [k])
    barrier()
    end.store(k.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(d_out, [row, 64], own_out)
    tma.async_copy_shared_to_global(d_out, [row - 64, 0], halves.index(0))
    tma.async_copy_shared_to_global(d_out, [row - 64, 64], halves.index(1))
