"""Gluon: four warps of the backward's scan make the products of queries with keys, where no gate is between these.

The half of the scan that goes back has both in shared memory. So P passes through memory neither way, the first kernel
(``backward_scalar.py``) does not read q, and what one over the norms of q is leaves from here.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from .backward_blocks import SLIM, begun, narrow, widened
from .chunks import LINE
from .common import ACROSS, DOWN, SQUARE, barrier

ROW = gl.constexpr(gl.SliceLayout(1, SLIM.value))


@gluon.jit
def row_rates(tile, eps):
    """One over the norms of a tile's rows, from halves: registers do not hold them all beside products."""
    square = gl.zeros([64], gl.float32, layout=ROW)
    for half in gl.static_range(2):
        x = widened(tile.slice(64 * half, 64, 1).load(SLIM))
        square += gl.sum(x * x, 1)
    return gl.rsqrt(square + eps)


@gluon.jit
def pair_warps(
    rates_to, step, count, p_s, kd_s, qg_s, rates_s, full, made, eps, LEAVES, L2NORM: gl.constexpr,
):  # fmt: skip
    """P of every chunk, the last one first, as soon as its q and k are there.

    LEAVES: whether this block is the one of its head that leaves the rates of q, ``step`` from one chunk to the next.
    """
    STAGES: gl.constexpr = p_s.shape[0]
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    j = gl.arange(0, 64, layout=ACROSS)[None, :]
    token = gl.arange(0, 64, layout=ROW)
    for n in range(count):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        q_t = qg_s.index(stage)
        p = begun(q_t, kd_s.index(stage).permute((1, 0)), SQUARE)
        if L2NORM:
            rates = rates_s.index(stage)._reinterpret(gl.float32, [128], LINE)
            q_rate = row_rates(q_t, eps)
            rates.slice(0, 64).store(q_rate)
            gl.store(rates_to + n * step + token, q_rate, mask=(token >= 0) & LEAVES)
            barrier()
        p = warpgroup_mma_wait(0, [p])
        if L2NORM:
            p = p * rates.slice(0, 64).load(DOWN)[:, None] * rates.slice(64, 64).load(ACROSS)[None, :]
        p_s.index(stage).store(narrow(gl.where(i >= j, p, 0.0)))
        fence_async_shared()
        barrier()
        mbarrier.arrive(made.index(stage), count=1)
