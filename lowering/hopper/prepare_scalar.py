"""Gluon: what :mod:`.prepare` makes, for a gate that is one number a token and head (gated delta rule, K = 128).

The decays between two tokens of a chunk, 2^(G_i - G_j), are then one [64, 64] matrix for all channels: it multiplies
the plain Gram matrices of the normalised q and k, its exponents are never positive, and gates need no bound. The rows
left for the scan are the same, and so are the two roles of a block.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

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

from .prepare import (
    LOG2E,
    ROWS,
    SQUARE,
    STAGES,
    TILE,
    TILE4,
    _add,
    _exp2,
    _invert,
    _pinned,
    _put,
    _rows_of,
    _sigmoid2,
    _tile,
    barrier,
)

# 2^-256 of anything fp32 holds is 0, and 64 of these still leave a sum of log2 gates accurate to 2^-10.
FLOOR = gl.constexpr(-256.0)
PAIR = gl.constexpr(gl.SliceLayout(2, ROWS.value))
SEQUENCE = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # every warp holds all 64 tokens


@gluon.jit
def _load_tile(c, total, HV, GROUP, chunks, first, d_q, d_k, inputs, full, stage):
    here = c < total
    i_b, i_n, i_h = _tile(c, HV, chunks)
    at = [i_b, (first + i_n) * 64, i_h // GROUP, 0]
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * 64 * 128 * 2, pred=here)
    k_to = inputs.index(2 * stage)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
    tma.async_copy_global_to_shared(d_k, at, bar, k_to, pred=here)
    q_to = inputs.index(2 * stage + 1)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
    tma.async_copy_global_to_shared(d_q, at, bar, q_to, pred=here)


@gluon.jit
def _log2_gate(x, i_h, A_log, dt_bias, SOFTPLUS: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr):
    """The gate function of ``kdacompile.ops.semantics``, in powers of two."""
    g = x * LOG2E
    if SOFTPLUS:
        if HAS_DT:
            g += gl.load(dt_bias + i_h).to(gl.float32) * LOG2E
        # softplus(y) = max(y, 0) + log(1 + exp(-|y|)); the series where 1 + exp(y) would lose exp(y)
        e = gl.exp2(-gl.abs(g))
        log = gl.where(e < 1e-3, e * (1.0 - 0.5 * e) * LOG2E, gl.log2(1.0 + e))
        g = -(gl.maximum(g, 0.0) + log)
        if HAS_A:
            g *= gl.exp2(gl.load(A_log + i_h).to(gl.float32) * LOG2E)
    return gl.where(g < FLOOR, FLOOR, g)


@gluon.jit
def _row_warps(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, decay,
    T, HV, GROUP, first, chunks, total, scale, eps,
    inputs, rows, betas, sums, full, ready, free,
    SOFTPLUS: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr,
    SIGMOID_BETA: gl.constexpr,
):  # fmt: skip
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    place = gl.arange(0, 64, layout=SEQUENCE)
    to = (group.to(gl.int64) * 8 + row.to(gl.int64)) * 128 + column[None, None, :].to(gl.int64)
    step = gl.num_programs(0)
    for s in gl.static_range(STAGES):
        _load_tile(gl.program_id(0) + s * step, total, HV, GROUP, chunks, first, d_q, d_k, inputs, full, s)
    it = 0
    for c in range(gl.program_id(0), total, step):
        i_b, i_n, i_h = _tile(c, HV, chunks)
        token = (first + i_n) * 64 + place
        valid = token < T
        g_at = g + i_b.to(gl.int64) * g_sb + i_h.to(gl.int64) * g_sh + token.to(gl.int64) * g_st
        x = gl.load(g_at, mask=valid, other=0.0).to(gl.float32)
        log2 = gl.where(valid, _log2_gate(x, i_h, A_log, dt_bias, SOFTPLUS, HAS_A, HAS_DT), 0.0)
        b = gl.full([64], 1.0, gl.float32, layout=SEQUENCE)
        if HAS_BETA:
            b_at = beta + i_b.to(gl.int64) * beta_sb + i_h.to(gl.int64) * beta_sh + token.to(gl.int64) * beta_st
            b = gl.load(b_at, mask=valid, other=0.0).to(gl.float32)
            if SIGMOID_BETA:
                b = _sigmoid2(b * LOG2E)
        betas.index(it & 1).store(gl.where(valid, b, 0.0))
        sums.index(it & 1).store(gl.associative_scan(log2, 0, _add))
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        k = _rows_of(inputs.index(2 * stage))
        k = k * gl.rsqrt(gl.sum(k * k, 2) + eps)[:, :, None]
        q = _rows_of(inputs.index(2 * stage + 1))
        q = q * (gl.rsqrt(gl.sum(q * q, 2) + eps) * scale)[:, :, None]
        mbarrier.wait(free, (it & 1) ^ 1)
        _put(rows.slice(0, 64, 0), k)
        _put(rows.slice(64, 64, 0), q)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready, count=1)
        _load_tile(c + STAGES * step, total, HV, GROUP, chunks, first, d_q, d_k, inputs, full, stage)
        table = sums.index(it & 1)._reinterpret(gl.float32, [8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        G = table.load(PAIR)[:, :, None]
        end = table.slice(7, 1, 0).slice(7, 1, 1).load(PAIR)[:, :, None]
        chunk = ((i_b * HV + i_h) * chunks + i_n).to(gl.int64)
        out = buffer + chunk * (256 * 128)
        up = _exp2(G)
        gl.store(out + to, (k * up).to(gl.bfloat16))
        gl.store(out + 64 * 128 + to, (q * up).to(gl.bfloat16))
        gl.store(out + 128 * 128 + to, (k * _exp2(end - G)).to(gl.bfloat16))
        gl.store(
            decay + chunk * 128 + column[None, None, :], gl.zeros([1, 1, 128], gl.float32, layout=ROWS) + _exp2(end)
        )
        it += 1


@gluon.jit
def _gram_warps(d_out, HV, chunks, total, rows, betas, sums, tiles, ready, free):
    a = tiles.index(0)
    m_out = tiles.index(4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    qk_out = tiles.index(5)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=gl.SliceLayout(1, SQUARE))
    j0 = gl.arange(0, 64, layout=gl.SliceLayout(0, SQUARE))
    it = 0
    for c in range(gl.program_id(0), total, gl.num_programs(0)):
        i_b, i_n, i_h = _tile(c, HV, chunks)
        row = ((i_b * HV + i_h) * chunks + i_n) * 256 + 192
        i = _pinned(i0)[:, None]
        j = j0[None, :]
        mbarrier.wait(ready, it & 1)
        keys = rows.slice(0, 64, 0).permute((1, 0))
        kk = warpgroup_mma(rows.slice(0, 64, 0), keys, z, use_acc=False, is_async=True)
        qk = warpgroup_mma(rows.slice(64, 64, 0), keys, z, use_acc=False, is_async=True)
        beta_i = betas.index(it & 1).load(gl.SliceLayout(1, SQUARE))
        beta_j = betas.index(it & 1).load(gl.SliceLayout(0, SQUARE))
        G_i = sums.index(it & 1).load(gl.SliceLayout(1, SQUARE))
        G_j = sums.index(it & 1).load(gl.SliceLayout(0, SQUARE))
        decays = gl.where(i >= j, _exp2(G_i[:, None] - G_j[None, :]), 0.0)
        tma.store_wait(0)
        barrier()
        kk = warpgroup_mma_wait(1, [kk])
        A = gl.where(i > j, kk * decays * beta_i[:, None], 0.0)
        a.store(A.to(gl.float16))
        qk = warpgroup_mma_wait(0, [qk])
        qk_out.store((qk * decays).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        tma.async_copy_shared_to_global(d_out, [row, 64], qk_out)
        x = _invert(A, a, z, i, j, tiles.index(1), tiles.index(2), tiles.index(3))
        m_out.store((x * beta_j[None, :]).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(d_out, [row, 0], m_out)
        it += 1
    tma.store_wait(0)


@gluon.jit
def prepare_scalar(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, d_out, decay,
    T, HV, GROUP, first, chunks, total, scale, eps,
    SOFTPLUS: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr,
    SIGMOID_BETA: gl.constexpr, GRAM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As :func:`.prepare.prepare`; g ``[B, T, HV]`` with its strides, before the function that SOFTPLUS names."""
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 128], TILE)
    rows = gl.allocate_shared_memory(gl.bfloat16, [128, 128], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [6, 64, 64], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_row_warps, (
                d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, decay,
                T, HV, GROUP, first, chunks, total, scale, eps, inputs, rows, betas, sums, full, ready, free,
                SOFTPLUS, HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA,
            )),
            (_gram_warps, (d_out, HV, chunks, total, rows, betas, sums, tiles, ready, free)),
        ],
        [4], [GRAM_REGISTERS],
    )  # fmt: skip
