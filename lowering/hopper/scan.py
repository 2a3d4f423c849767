"""Gluon: the state of every head through a run of chunks, and their outputs (K <= 128, C = 64).

A block owns BV columns of V of one value head and keeps that part of the state, transposed, fp32, in registers. With
the rows that :mod:`.prepare` left behind, every chunk is::

    R      = V - K_gated S             V_new = M R
    O      = Q_gated S + A_qk V_new    S     = diag(decay) S + K_decayed^T V_new

Where a gate is one number a token (SCALAR), :mod:`.prepare_scalar` leaves M, A_qk and numbers behind, the columns
``f_k``, ``f_q``, ``f_left`` and ``decay``. All value heads of a group then read the same q and k, as they are::

    R      = V - f_k (K S)                 V_new = M R
    O      = f_q (Q S) + A_qk V_new        S     = decay S + K^T (f_left V_new)

APART, beta is what the call gives, not its sigmoid, and may be large: it multiplies R, not M's columns, whose rounding
was most of the state's error. M's diagonal is then exactly one. The fourth column is beta, and decay the quotient of
f_k and f_left of the last token.

All five products have S^T, R^T or V_new^T as the operand in registers: what one leaves in an accumulator is already in
place as the next one's operand. One warp loads STAGES chunks ahead; o leaves through shared memory, a chunk late, and
beside the products that nothing can be done without.

The scan of 32 heads takes 64 multiprocessors, one chunk after the other. READY, it starts when as many blocks of
:mod:`.prepare` leave, while the others still prepare later chunks, and waits for each chunk to be announced.

Where there are too few heads for the machine, a sequence is cut into segments that run at once. A chunk is affine in
the state, and so is a segment: S -> A S + B. A first pass (without OUTPUT) finds both, B from a state of zeros and A
as what becomes of the identity when V is zero; :mod:`.combine` carries the state from segment to segment, and the
second pass is the one described above, a block per segment.
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

from .chunks import LINE, await_known, clear_beyond, first_state, keep_outputs, leave_last, locate_chunks
from .common import TILE, TILE4, barrier, next_may_start, previous_is_over, squares_rows, tf32


@gluon.jit
def _load_warp(
    d_buffer, d_M, d_v, d_q, d_k, d_factors, announced, i_b, i_h, i_v, step, GROUP, tile, token, count,
    parts, values, lines, full, empty,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = parts.shape[2]
    SQUARES: gl.constexpr = squares_rows(WIDTH) // 64
    PARTS: gl.constexpr = parts.shape[0] // STAGES
    ROWS: gl.constexpr = PARTS - SQUARES  # keys and queries
    BYTES: gl.constexpr = 2 * 64 * (PARTS * WIDTH if OUTPUT else (ROWS - 1) * WIDTH + 64)  # without queries and A_qk
    FACTORS: gl.constexpr = lines.shape[1]
    known = 0
    for n in range(count):
        stage = n % STAGES
        c = tile + n * step
        if READY:
            known = await_known(announced + tile, n, known, count, step)
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES + 64 * BV * 2 + FACTORS * 4)
        if SCALAR:
            at = [i_b, token + n * 64, i_h // GROUP, 0]
            k_to = parts.index(PARTS * stage)._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
            tma.async_copy_global_to_shared(d_k, at, bar, k_to)
            if OUTPUT:
                q_to = parts.index(PARTS * stage + 1)._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
                tma.async_copy_global_to_shared(d_q, at, bar, q_to)
            row = c * SQUARES * 64
        else:
            for j in gl.static_range(ROWS):
                if OUTPUT or j != 1:
                    to = parts.index(PARTS * stage + j)
                    tma.async_copy_global_to_shared(d_buffer, [(c * PARTS + j) * 64, 0], bar, to)
            row = (c * PARTS + ROWS) * 64
        if OUTPUT:
            for j in gl.static_range(SQUARES):
                to = parts.index(PARTS * stage + ROWS + j)
                tma.async_copy_global_to_shared(d_buffer, [row + j * 64, 0], bar, to)
        else:
            to = parts.index(PARTS * stage + ROWS)._reinterpret(gl.bfloat16, [WIDTH // 64, 64, 64], TILE).index(0)
            tma.async_copy_global_to_shared(d_M, [row, 0], bar, to)
        to = values.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
        tma.async_copy_global_to_shared(d_v, [i_b, token + n * 64, i_h, i_v * BV], bar, to)
        tma.async_copy_global_to_shared(d_factors, [c * FACTORS], bar, lines.index(stage))


@gluon.jit
def _state_warps(
    d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl, f_sk, f_rows, f_columns,
    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, leaves, token, count, end,
    parts, values, lines, out, full, empty,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr,
    OUTPUT: gl.constexpr, AHEAD: gl.constexpr, PACKED: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = BV // 16
    WIDTH: gl.constexpr = parts.shape[2]
    PARTS: gl.constexpr = parts.shape[0] // STAGES
    FACTORS: gl.constexpr = lines.shape[1]
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    LEFT_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_KEYS: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    PLACES: gl.constexpr = gl.SliceLayout(0, TOKENS)
    LATE: gl.constexpr = SCALAR  # Q S after V_new: beside K S the compiler would wait for both before it scales K S
    keys = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, KEYS))[None, :]
    columns = (i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, KEYS)))[:, None]
    places = gl.arange(0, 64, layout=PLACES)[None, :]
    if AHEAD:
        previous_is_over()
    S = first_state(
        initial, s_ss, s_sn, s_sh, s_sk, s_sv, K, V, VP, i_n, i_h, segment, keys, columns, HAS_INITIAL, OUTPUT
    )  # fmt: skip
    zero = gl.zeros([BV, 64], gl.float32, layout=TOKENS)
    S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    o = zero
    out4 = out._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
    for n in range(count):
        stage = n % STAGES
        k_rows = parts.index(PARTS * stage)
        q_rows = parts.index(PARTS * stage + 1)
        k_left = parts.index(PARTS * stage + (0 if SCALAR else 2))
        M = parts.index(PARTS * stage + (2 if SCALAR else 3)).slice(0, 64, 1)
        A_qk = parts.index(PARTS * stage + PARTS - 1).slice(WIDTH - 64, 64, 1)
        line = lines.index(stage)._reinterpret(gl.float32, [FACTORS], LINE)
        left = end - token - n * 64
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        if SCALAR and PACKED:
            clear_beyond(k_rows, left, WARPS)
        v = values.index(stage).permute((1, 0)).load(TOKENS).to(gl.float32)
        KS = warpgroup_mma(S16, k_rows.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            o16 = o.to(gl.bfloat16)
            if not LATE:
                o = warpgroup_mma(S16, q_rows.permute((1, 0)), zero, use_acc=False, is_async=True)
            tma.store_wait(0)
        barrier()
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % STAGES), count=1)
        if OUTPUT:
            out.permute((1, 0)).store(o16)
        if SCALAR:
            k_factor = line.slice(0, 64).load(PLACES)[None, :]
            if APART:
                beta = line.slice(3 * 64, 64).load(PLACES)[None, :]
                k_factor = k_factor * beta
                v = v * beta
            left_factor = line.slice(2 * 64, 64).load(PLACES)[None, :]
        else:
            k_factor = 1.0
            left_factor = 1.0
        KS = warpgroup_mma_wait(1 if OUTPUT and not LATE else 0, [KS])
        R = v - KS * k_factor
        if PACKED:
            R = gl.where(places < left, R, 0.0)
        R = gl.convert_layout(R.to(gl.bfloat16), LEFT_TOKENS)
        V_new = warpgroup_mma(R, M.permute((1, 0)), zero, use_acc=False, is_async=True)
        if APART:  # nothing decays after the last token: its factors differ by the decay of the chunk
            f_last, left_last = line.slice(63, 1), line.slice(3 * 64 - 1, 1)
            down = (f_last.load(gl.SliceLayout(0, KEYS)) / left_last.load(gl.SliceLayout(0, KEYS)))[None, :]
        elif SCALAR:
            down = line.slice(3 * 64, 1).load(gl.SliceLayout(0, KEYS))[None, :]
        else:
            down = line.load(gl.SliceLayout(0, KEYS))[None, :]
        if OUTPUT and LATE:
            o = warpgroup_mma(S16, q_rows.permute((1, 0)), zero, use_acc=False, is_async=True)
        S = S * down
        V_new = warpgroup_mma_wait(1 if OUTPUT and LATE else 0, [V_new])
        V16 = V_new.to(gl.bfloat16)
        V_left = gl.convert_layout((V_new * left_factor).to(gl.bfloat16), LEFT_KEYS)
        S = warpgroup_mma(V_left, k_left, S, is_async=True)
        if OUTPUT:
            V_right = gl.convert_layout(V16, LEFT_TOKENS)
            if SCALAR:
                own = warpgroup_mma(V_right, A_qk.permute((1, 0)), zero, use_acc=False, is_async=True)
            else:
                o = warpgroup_mma(V_right, A_qk.permute((1, 0)), o, is_async=True)
            # Beside the longest products the outputs of the chunk before leave.
            fence_async_shared()
            barrier()
            if n > 0:
                tma.async_copy_shared_to_global(d_o, [i_b, token + (n - 1) * 64, i_h, i_v * BV], out4)
            if SCALAR:
                S, o, own = warpgroup_mma_wait(0, [S, o, own])
                o = o * line.slice(64, 64).load(PLACES)[None, :] + own
            else:
                S, o = warpgroup_mma_wait(0, [S, o])
        else:
            S = warpgroup_mma_wait(0, [S])
        S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    if OUTPUT:
        last = token + (count - 1) * 64
        o16 = o.to(gl.bfloat16)
        keep_outputs(out, o16)
        leave_last(d_o, o_rows, out, out4, TOKENS, i_b, i_h, i_v, last, end, V, HV, count > 0, BV, PACKED)
    if leaves:
        if not OUTPUT:  # A meets the tensor cores again
            S = gl.where(columns < VP, S, tf32(S))
        i_nh = i_n * HV + i_h
        final += i_nh.to(gl.int64) * f_sl + segment.to(gl.int64) * f_ss
        gl.store(final + keys * f_sk + columns, S, mask=(keys < f_rows) & (columns < f_columns))
    if READY:
        previous_is_over()


@gluon.jit(do_not_specialize=["T", "first", "chunks", "length"])  # they change from run to run
def scan(
    d_buffer, d_M, d_v, d_q, d_k, d_factors, announced, d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final,
    f_ss, f_sl, f_sk, f_rows, f_columns, cu_seqlens, chunk_offsets, T, K, V, VP, HV, GROUP, first, chunks, length,
    BV: gl.constexpr, STAGES: gl.constexpr, SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr,
    OUTPUT: gl.constexpr, AHEAD: gl.constexpr, PACKED: gl.constexpr, APART: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Chunks ``first .. first + chunks`` in segments of ``length``; grid (blocks of V, sequences * HV, segments).

    d_buffer, d_factors: what the prepare kernel wrote; d_M describes its rows' first 64 columns. d_q, d_k:
    ``[B, T, heads, K]``, GROUP value heads to each of these, read if SCALAR. d_v, d_o: ``[B, T, HV, V]``, blocks of BV
    columns; o_rows: what d_o describes. initial: ``[segments, N, HV, K, V]`` with its strides. final: fp32, rows of
    f_sk elements, ``f_rows`` by ``f_columns`` of them; it may be ``initial``.

    OUTPUT: the last segment leaves the state. Without, the first VP columns of ``final`` are the segments' B, the
    others A, rounded to tf32, of ``S -> A S + B``; of the first segment they are the state after it, its A is not made.
    PACKED: chunk_offsets ``[N + 1]`` says where the chunks of each sequence begin among all; one segment. READY:
    ``announced`` says of every tile that it is in memory, and the kernel before this one may still be at work. AHEAD:
    that one has waited for those before it, and only ``initial`` is of its making.
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
    PARTS: gl.constexpr = (2 if SCALAR else 3) + squares_rows(WIDTH) // 64
    parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, 64, WIDTH], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BV], TILE)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * 64 if SCALAR else WIDTH], d_factors.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, BV], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()
    if not READY:
        if not AHEAD:
            previous_is_over()
        next_may_start()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_state_warps, (
                d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl, f_sk, f_rows, f_columns,
                K, V, VP, HV, i_n, i_b, i_h, i_v, segment, leaves, token, count, end,
                parts, values, lines, out, full, empty, BV, STAGES, SCALAR, READY, HAS_INITIAL, OUTPUT, AHEAD,
                PACKED, APART,
            )),
            (_load_warp, (
                d_buffer, d_M, d_v, d_q, d_k, d_factors, announced, i_b, i_h, i_v, step, GROUP, tile, token, count,
                parts, values, lines, full, empty, BV, STAGES, SCALAR, READY, OUTPUT,
            )),
        ],
        [1], [40],
    )  # fmt: skip
