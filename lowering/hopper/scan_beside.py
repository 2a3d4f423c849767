"""Gluon: the scan where it runs beside the kernel that prepares its chunks, and where a gate is one number a token.

Beside: the scan of 32 heads takes 64 multiprocessors, one chunk after the other. It starts when as many blocks of
:mod:`.prepare` leave, while the others still prepare later chunks, and waits for each chunk to be announced.

One number a token: with the rows and numbers that :mod:`.prepare_scalar` left behind and the columns ``f_k``, ``f_q``
and ``f_left`` of the latter, every chunk is::

    R      = V - f_k (K S)                 V_new = M R
    O      = f_q (Q S) + A_qk V_new        S     = decay S + K^T (f_left V_new)

with q and k as they are: all value heads of a group read the same. Registers and products are those of :mod:`.scan`;
the load warp brings the numbers too, two chunks ahead of the rows, for a load from memory takes longer than a chunk.
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

from .common import TILE, TILE4, after_prepare, await_tiles, barrier
from .scan import first_state, leave_last, locate_chunks


@gluon.jit
def _await(flags, n, known, count, step, WRITERS: gl.constexpr):
    if n >= known:
        known = await_tiles(flags, n, count, step, WRITERS)
    return known


@gluon.jit
def _load_warp(
    d_buffer, d_v, d_q, d_k, factors, announced, i_b, i_h, i_v, step, GROUP, tile, token, count,
    parts, values, decays, full, empty,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 3 if SCALAR else 4
    FACTORS: gl.constexpr = 4 * 64 if SCALAR else 128
    WRITERS: gl.constexpr = 1 if SCALAR else 2
    place = gl.arange(0, FACTORS, layout=gl.BlockedLayout([4], [32], [1], [0]))
    factors += tile.to(gl.int64) * FACTORS + place
    known = 0
    if READY:
        known = await_tiles(announced + tile, 0, count, step, WRITERS)
    # Two chunks ahead: the loads take longer than a chunk.
    now = gl.load(factors, mask=count > 0, other=0.0)
    if READY:
        known = _await(announced + tile, gl.minimum(1, count - 1), known, count, step, WRITERS)
    ahead = gl.load(factors + gl.minimum(1, count - 1).to(gl.int64) * step * FACTORS, mask=count > 1, other=0.0)
    for n in range(count):
        stage = n % STAGES
        c = tile + n * step
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, (PARTS * 64 * 128 + 64 * BV) * 2)
        if SCALAR:
            at = [i_b, token + n * 64, i_h // GROUP, 0]
            k_to = parts.index(PARTS * stage)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
            tma.async_copy_global_to_shared(d_k, at, bar, k_to)
            q_to = parts.index(PARTS * stage + 1)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
            tma.async_copy_global_to_shared(d_q, at, bar, q_to)
            tma.async_copy_global_to_shared(d_buffer, [c * 64, 0], bar, parts.index(PARTS * stage + 2))
        else:
            for j in gl.static_range(PARTS):
                to = parts.index(PARTS * stage + j)
                tma.async_copy_global_to_shared(d_buffer, [c * 256 + j * 64, 0], bar, to)
        to = values.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
        tma.async_copy_global_to_shared(d_v, [i_b, token + n * 64, i_h, i_v * BV], bar, to)
        decays.index(stage).store(now)
        mbarrier.arrive(bar, count=1)
        then = gl.minimum(n + 2, count - 1)
        if READY:
            known = _await(announced + tile, then, known, count, step, WRITERS)
        now = ahead
        ahead = gl.load(factors + then.to(gl.int64) * step * FACTORS)


@gluon.jit
def _clear_beyond(k_rows, left, WARPS: gl.constexpr):
    """Zeros in the rows of the next sequence: what meets them in a product is zero, but they may be infinite or NaN."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    if left < 64:
        k_rows.store(gl.where(row < left, k_rows.load(ROWS), 0.0))
        fence_async_shared()
        barrier()


@gluon.jit
def _state_warps(
    d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl, f_sk, f_rows, f_columns,
    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, leaves, token, count, end,
    parts, values, decays, out, full, empty,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr,
    OUTPUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = BV // 16
    PARTS: gl.constexpr = 3 if SCALAR else 4
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    LEFT_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_KEYS: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    LINE: gl.constexpr = gl.SliceLayout(0, TOKENS)
    keys = gl.arange(0, 128, layout=gl.SliceLayout(0, KEYS))[None, :]
    columns = (i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, KEYS)))[:, None]
    places = gl.arange(0, 64, layout=LINE)[None, :]
    S = first_state(
        initial, s_ss, s_sn, s_sh, s_sk, s_sv, K, V, VP, i_n, i_h, segment, keys, columns, HAS_INITIAL, OUTPUT
    )  # fmt: skip
    zero = gl.zeros([BV, 64], gl.float32, layout=TOKENS)
    S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    o16 = zero.to(gl.bfloat16)
    out4 = out._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
    for n in range(count):
        stage = n % STAGES
        k_rows = parts.index(PARTS * stage)
        q_rows = parts.index(PARTS * stage + 1)
        k_left = parts.index(PARTS * stage + (0 if SCALAR else 2))
        square = parts.index(PARTS * stage + PARTS - 1)
        factors = decays.index(stage)
        left = end - token - n * 64
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        if SCALAR and PACKED:
            _clear_beyond(k_rows, left, WARPS)
        v = values.index(stage).permute((1, 0)).load(TOKENS).to(gl.float32)
        KS = warpgroup_mma(S16, k_rows.permute((1, 0)), zero, use_acc=False, is_async=True)
        if PACKED:
            v = gl.where(places < left, v, 0.0)
        if OUTPUT:
            tma.store_wait(0)
        barrier()
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % STAGES), count=1)
        if OUTPUT:
            out.permute((1, 0)).store(o16)
            fence_async_shared()
            barrier()
            if n > 0:
                tma.async_copy_shared_to_global(d_o, [i_b, token + (n - 1) * 64, i_h, i_v * BV], out4)
        if SCALAR:
            down = factors.slice(3 * 64, 1).load(gl.SliceLayout(0, KEYS))[None, :]
            k_factor = factors.slice(0, 64).load(LINE)[None, :]
            left_factor = factors.slice(2 * 64, 64).load(LINE)[None, :]
        else:
            down = factors.load(gl.SliceLayout(0, KEYS))[None, :]
        KS = warpgroup_mma_wait(0, [KS])
        if SCALAR:
            KS = KS * k_factor
            if PACKED:
                KS = gl.where(places < left, KS, 0.0)
        R = gl.convert_layout((v - KS).to(gl.bfloat16), LEFT_TOKENS)
        # Here nothing else is under way: the compiler lets nobody touch S beside a product.
        S = S * down
        V_new = warpgroup_mma(R, square.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            o = warpgroup_mma(S16, q_rows.permute((1, 0)), zero, use_acc=False, is_async=True)
            V_new = warpgroup_mma_wait(1, [V_new])
        else:
            V_new = warpgroup_mma_wait(0, [V_new])
        V16 = V_new.to(gl.bfloat16)
        V_left = V16
        if SCALAR:
            V_left = (V_new * left_factor).to(gl.bfloat16)
        S = warpgroup_mma(gl.convert_layout(V_left, LEFT_KEYS), k_left, S, is_async=True)
        if OUTPUT:
            A_qk = square.slice(64, 64, 1).permute((1, 0))
            V_right = gl.convert_layout(V16, LEFT_TOKENS)
            if SCALAR:
                own = warpgroup_mma(V_right, A_qk, zero, use_acc=False, is_async=True)
                S, o, own = warpgroup_mma_wait(0, [S, o, own])
                o = o * factors.slice(64, 64).load(LINE)[None, :] + own
            else:
                o = warpgroup_mma(V_right, A_qk, o, is_async=True)
                S, o = warpgroup_mma_wait(0, [S, o])
            o16 = o.to(gl.bfloat16)
        else:
            S = warpgroup_mma_wait(0, [S])
        S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    if OUTPUT:
        last = token + (count - 1) * 64
        leave_last(d_o, o_rows, out, out4, o16, i_b, i_h, i_v, last, end, V, HV, count > 0, BV, PACKED)
    if leaves:
        lane = i_n * HV + i_h
        final += lane.to(gl.int64) * f_sl + segment.to(gl.int64) * f_ss
        gl.store(final + keys * f_sk + columns, S, mask=(keys < f_rows) & (columns < f_columns))
    if READY:
        after_prepare()


@gluon.jit(do_not_specialize=["T", "first", "chunks", "length"])  # they change from run to run
def scan_beside(
    d_buffer, d_v, d_q, d_k, factors, announced, d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl,
    f_sk, f_rows, f_columns, cu_seqlens, chunk_offsets, T, K, V, VP, HV, GROUP, first, chunks, length,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr,
    OUTPUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As :func:`.scan.scan`. SCALAR: d_q, d_k ``[B, T, heads, K]``, GROUP value heads to each of theirs; d_buffer and
    factors are what :mod:`.prepare_scalar` writes, else what :mod:`.prepare` does. READY: ``announced`` counts the
    parts of every tile that are in memory, and the kernel before this one in the stream may still be at work.
    """
    i_v = gl.program_id(0)
    segment = gl.program_id(2)
    i_n, i_h, i_b, tile, step, count, token, end = locate_chunks(
        cu_seqlens, chunk_offsets, T, HV, first, chunks, length, segment, PACKED
    )  # fmt: skip
    leaves = segment == gl.num_programs(2) - 1
    if not OUTPUT:
        leaves = segment >= 0
        count = gl.where((segment == 0) & (i_v * BV >= VP), 0, count)
    PARTS: gl.constexpr = 3 if SCALAR else 4
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, 64, 128], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BV], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 256 if SCALAR else 128], LINE)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, BV], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_state_warps, (
                d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl, f_sk, f_rows, f_columns,
                K, V, VP, HV, i_n, i_b, i_h, i_v, segment, leaves, token, count, end,
                parts, values, decays, out, full, empty, BV, STAGES, SCALAR, READY, HAS_INITIAL, OUTPUT, PACKED,
            )),
            (_load_warp, (
                d_buffer, d_v, d_q, d_k, factors, announced, i_b, i_h, i_v, step, GROUP, tile, token, count,
                parts, values, decays, full, empty, BV, STAGES, SCALAR, READY,
            )),
        ],
        [1], [40],
    )  # fmt: skip
