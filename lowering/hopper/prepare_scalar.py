"""Gluon: what :mod:`.prepare` makes, for a gate that is one number a token and head (gated delta rule, K = 128).

The decays between two tokens of a chunk, 2^(G_i - G_j), are then one [64, 64] matrix for all channels: it multiplies
the plain Gram matrices of the normalised q and k, its exponents are never positive, and gates need no bound. The rows
left for the scan are the same, and so are the two roles of a block.
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

from .common import (
    ROWS,
    SQUARE,
    STAGES,
    TILE,
    TILE4,
    add,
    barrier,
    exp2,
    fetch,
    given_beta,
    given_rate,
    locate,
    log2_gate,
    pinned,
    put,
    rows_within,
    tiles_of,
)
from .inverse import leave_inverse

PAIR = gl.constexpr(gl.SliceLayout(2, ROWS.value))
SEQUENCE = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))  # every warp holds all 64 tokens


@gluon.jit
def _load_tile(c, total, T, HV, GROUP, chunks, first, places, d_q, d_k, inputs, full, stage, PACKED: gl.constexpr):
    here = c < total
    i_b, token, _, i_h = locate(gl.minimum(c, total - 1), T, HV, chunks, first, places, PACKED)
    at = [i_b, token, i_h // GROUP, 0]
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * 64 * 128 * 2, pred=here)
    k_to = inputs.index(2 * stage)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
    tma.async_copy_global_to_shared(d_k, at, bar, k_to, pred=here)
    q_to = inputs.index(2 * stage + 1)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
    tma.async_copy_global_to_shared(d_q, at, bar, q_to, pred=here)


@gluon.jit
def _fetch(
    c, T, HV, chunks, first, places, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, place,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """What a tile needs besides q and k: first token, end of its sequence, A_log, beta, g and dt_bias as given."""
    i_b, start, end, i_h, A, b = fetch(
        c, T, HV, chunks, first, places, A_log, beta, beta_sb, beta_st, beta_sh, place, HAS_A, HAS_BETA, PACKED
    )  # fmt: skip
    token = start + place
    at = g + i_b.to(gl.int64) * g_sb + i_h.to(gl.int64) * g_sh + token.to(gl.int64) * g_st
    x = gl.load(at, mask=token < end, other=0.0)
    bias = i_h
    if HAS_DT:
        bias = gl.load(dt_bias + i_h)
    return start, end, A, b, x, bias


@gluon.jit
def _row_warps(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, buffer, decay,
    T, HV, GROUP, first, chunks, begin, total, scale, eps, gate_scale,
    inputs, rows, betas, sums, full, ready, free,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))
    place = gl.arange(0, 64, layout=SEQUENCE)
    to = (group.to(gl.int64) * 8 + row.to(gl.int64)) * 128 + column[None, None, :].to(gl.int64)
    step = gl.num_programs(0)
    total = tiles_of(total, HV, first, places, PACKED)
    for s in gl.static_range(STAGES):
        c = begin + gl.program_id(0) + s * step
        _load_tile(c, total, T, HV, GROUP, chunks, first, places, d_q, d_k, inputs, full, s, PACKED)
    c0 = begin + gl.program_id(0)
    it = 0
    for c in range(c0, total, step):
        start, end, A, b, x, bias = _fetch(
            c, T, HV, chunks, first, places, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh,
            place, HAS_A, HAS_DT, HAS_BETA, PACKED,
        )  # fmt: skip
        valid = start + place < end
        gate = x.to(gl.float32)
        if HAS_DT:
            gate += bias.to(gl.float32)
        log2 = gl.where(valid, log2_gate(gate, given_rate(A, HAS_A), gate_scale, FN), 0.0)
        betas.index(it & 1).store(given_beta(b, start + place, end, SIGMOID_BETA))
        sums.index(it & 1).store(gl.associative_scan(log2, 0, add))
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        live = start + group * 8 + row < end
        k = rows_within(inputs.index(2 * stage), live, PACKED)
        k = k * gl.rsqrt(gl.sum(k * k, 2) + eps)[:, :, None]
        q = rows_within(inputs.index(2 * stage + 1), live, PACKED)
        q = q * (gl.rsqrt(gl.sum(q * q, 2) + eps) * scale)[:, :, None]
        mbarrier.wait(free, (it & 1) ^ 1)
        put(rows.slice(0, 64, 0), k)
        put(rows.slice(64, 64, 0), q)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready, count=1)
        then = c + STAGES * step
        _load_tile(then, total, T, HV, GROUP, chunks, first, places, d_q, d_k, inputs, full, stage, PACKED)
        table = sums.index(it & 1)._reinterpret(gl.float32, [8, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        G = table.load(PAIR)[:, :, None]
        whole = table.slice(7, 1, 0).slice(7, 1, 1).load(PAIR)[:, :, None]
        out = buffer + c.to(gl.int64) * (256 * 128)
        up = exp2(G)
        gl.store(out + to, (k * up).to(gl.bfloat16))
        gl.store(out + 64 * 128 + to, (q * up).to(gl.bfloat16))
        gl.store(out + 128 * 128 + to, (k * exp2(whole - G)).to(gl.bfloat16))
        last = gl.zeros([1, 1, 128], gl.float32, layout=ROWS) + exp2(whole)
        gl.store(decay + c.to(gl.int64) * 128 + column[None, None, :], last)
        it += 1


@gluon.jit
def _gram_warps(d_out, HV, first, places, begin, total, rows, betas, sums, tiles, ready, free, PACKED: gl.constexpr):
    qk_out = tiles.index(4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=gl.SliceLayout(1, SQUARE))
    j0 = gl.arange(0, 64, layout=gl.SliceLayout(0, SQUARE))
    it = 0
    for c in range(begin + gl.program_id(0), tiles_of(total, HV, first, places, PACKED), gl.num_programs(0)):
        row = c * 256 + 192
        i = pinned(i0)[:, None]
        j = j0[None, :]
        mbarrier.wait(ready, it & 1)
        keys = rows.slice(0, 64, 0).permute((1, 0))
        kk = warpgroup_mma(rows.slice(0, 64, 0), keys, z, use_acc=False, is_async=True)
        qk = warpgroup_mma(rows.slice(64, 64, 0), keys, z, use_acc=False, is_async=True)
        beta_i = betas.index(it & 1).load(gl.SliceLayout(1, SQUARE))
        beta_j = betas.index(it & 1).load(gl.SliceLayout(0, SQUARE))
        G_i = sums.index(it & 1).load(gl.SliceLayout(1, SQUARE))
        G_j = sums.index(it & 1).load(gl.SliceLayout(0, SQUARE))
        decays = gl.where(i >= j, exp2(G_i[:, None] - G_j[None, :]), 0.0)
        tma.store_wait(0)
        barrier()
        kk = warpgroup_mma_wait(1, [kk])
        A = gl.where(i > j, kk * decays * beta_i[:, None], 0.0)
        tiles.index(0).store(A.to(gl.float16))
        qk = warpgroup_mma_wait(0, [qk])
        qk_out.store((qk * decays).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        tma.async_copy_shared_to_global(d_out, [row, 64], qk_out)
        leave_inverse(A, z, i, j, beta_j, tiles, d_out, row)
        it += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "first", "chunks", "begin", "total"])  # they change from run to run
def prepare_scalar(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, buffer, d_out, decay,
    T, HV, GROUP, first, chunks, begin, total, scale, eps, gate_scale,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, GRAM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As :func:`.prepare.prepare`; g ``[B, T, HV]`` with its strides, before the gate function FN."""
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, 128], TILE)
    rows = gl.allocate_shared_memory(gl.bfloat16, [128, 128], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [5, 64, 64], TILE)
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
                d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, buffer, decay,
                T, HV, GROUP, first, chunks, begin, total, scale, eps, gate_scale,
                inputs, rows, betas, sums, full, ready, free, FN, HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA, PACKED,
            )),
            (_gram_warps, (d_out, HV, first, places, begin, total, rows, betas, sums, tiles, ready, free, PACKED)),
        ],
        [4], [GRAM_REGISTERS],
    )  # fmt: skip
