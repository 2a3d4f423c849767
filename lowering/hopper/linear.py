"""Gluon: rows without the delta rule, their states and outputs (K <= 128, C = 64).

With the names of :mod:`.prepare`, every chunk is::

    O = Q_gated S + A_qk V      S = diag(decay) S + K_decayed^T V

Where a gate is one number a token (SCALAR; or a head, or there is none), this is the whole call: four warps make A_qk
and the factors of a chunk's tokens from q, k and the gates, four others hold 64 columns of the state and make the
outputs::

    O = f_q (Q S) + A_qk V      S = decay S + K^T (f_left V)

Where it is one a channel, the rows come from :mod:`.prepare_unbounded`. Products have S^T or V^T as the operand in
registers, loads and stores are those of :mod:`.scan`.

A sequence is cut into segments where there are too few heads for the machine. A segment takes S to diag(decay) S + B: a
first pass (without OUTPUT) leaves both, and a block of the second sums what all segments before its own have left.
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

from .chunks import LINE, await_known, clear_beyond, keep_outputs, leave_last, locate_chunks
from .common import (
    ACROSS,
    DOWN,
    SEQUENCE,
    SQUARE,
    TILE,
    TILE4,
    add,
    barrier,
    exp2,
    given_beta,
    given_rate,
    log2_gate,
    next_may_start,
    pinned,
    previous_is_over,
)
from .prepare_scalar import squares_of


@gluon.jit
def _load_warp(
    d_rows, d_squares, d_factors, announced, d_q, d_k, d_v, i_b, i_h, i_v, step, GROUP, tile, token, count,
    queries, keys, values, squares, lines, full, empty,
    SCALAR: gl.constexpr, READY: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = keys.shape[0]
    WIDTH: gl.constexpr = keys.shape[2]
    BV: gl.constexpr = values.shape[2]
    TILE_ROWS: gl.constexpr = 128 + 64 * 64 // WIDTH
    ROWS: gl.constexpr = (2 if OUTPUT else 1) * 64 * WIDTH + 64 * BV
    MADE: gl.constexpr = 0 if SCALAR else (64 * 64 * 2 if OUTPUT else 0) + WIDTH * 4
    known = 0
    for n in range(count):
        stage = n % STAGES
        c = tile + n * step
        if READY:
            known = await_known(announced + tile, n, known, count, step)
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, ROWS * 2 + MADE)
        if SCALAR:
            at = [i_b, token + n * 64, i_h // GROUP, 0]
            k_to = keys.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
            tma.async_copy_global_to_shared(d_k, at, bar, k_to)
            if OUTPUT:
                q_to = queries.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
                tma.async_copy_global_to_shared(d_q, at, bar, q_to)
        else:
            tma.async_copy_global_to_shared(d_rows, [c * TILE_ROWS + 64, 0], bar, keys.index(stage))
            if OUTPUT:
                tma.async_copy_global_to_shared(d_rows, [c * TILE_ROWS, 0], bar, queries.index(stage))
                at = [c * (2 * WIDTH + 64) + 2 * WIDTH, 0]
                tma.async_copy_global_to_shared(d_squares, at, bar, squares.index(stage))
            tma.async_copy_global_to_shared(d_factors, [c * WIDTH], bar, lines.index(stage))
        to = values.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
        tma.async_copy_global_to_shared(d_v, [i_b, token + n * 64, i_h, i_v * BV], bar, to)


@gluon.jit
def _fetch(
    g, g_sb, g_st, g_sh, beta, beta_sb, beta_st, beta_sh, i_b, i_h, token, end,
    FN: gl.constexpr, HAS_BETA: gl.constexpr,
):  # fmt: skip
    """The gates and betas of 64 tokens, as given."""
    live = token < end
    x = token * 0
    b = gl.full([64], 1.0, gl.float32, layout=token.type.layout)
    if FN != "none":
        at = g + i_b.to(gl.int64) * g_sb + i_h.to(gl.int64) * g_sh + token.to(gl.int64) * g_st
        x = gl.load(at, mask=live, other=0.0)
    if HAS_BETA:
        at = beta + i_b.to(gl.int64) * beta_sb + i_h.to(gl.int64) * beta_sh + token.to(gl.int64) * beta_st
        b = gl.load(at, mask=live, other=0.0)
    return x, b


@gluon.jit
def _factor_warps(
    g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, i_b, i_h, token, count, end,
    scale, eps, gate_scale, queries, keys, squares, lines, sums, full, empty, made, used,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    OUTPUT: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    """Of every chunk ``A_qk diag(beta)`` and the lines f_q, beta f_left and decay, two chunks ahead at most."""
    STAGES: gl.constexpr = keys.shape[0]
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=DOWN)
    j0 = gl.arange(0, 64, layout=ACROSS)
    place = gl.arange(0, 64, layout=SEQUENCE)
    A = i_h
    if HAS_A:
        A = gl.load(A_log + i_h)
    rate = given_rate(A, HAS_A)
    bias = 0.0
    if HAS_DT:
        bias = gl.load(dt_bias + i_h).to(gl.float32)
    # Three chunks ahead: a gate a token lies a line apart, and memory answers later than a chunk takes.
    here = token + place
    x, b = _fetch(g, g_sb, g_st, g_sh, beta, beta_sb, beta_st, beta_sh, i_b, i_h, here, end, FN, HAS_BETA)
    x1, b1 = _fetch(g, g_sb, g_st, g_sh, beta, beta_sb, beta_st, beta_sh, i_b, i_h, here + 64, end, FN, HAS_BETA)
    x2, b2 = _fetch(g, g_sb, g_st, g_sh, beta, beta_sb, beta_st, beta_sh, i_b, i_h, here + 128, end, FN, HAS_BETA)
    for n in range(count):
        stage = n % STAGES
        slot = n & 1
        here = token + n * 64 + place
        x3, b3 = _fetch(g, g_sb, g_st, g_sh, beta, beta_sb, beta_st, beta_sh, i_b, i_h, here + 192, end, FN, HAS_BETA)
        log2 = gl.where(here < end, log2_gate(x.to(gl.float32) + bias, rate, gate_scale, FN), 0.0)
        beta_here = given_beta(b, here, end, SIGMOID_BETA)
        x, x1, x2 = x1, x2, x3
        b, b1, b2 = b1, b2, b3
        mbarrier.wait(used.index(slot), ((n >> 1) & 1) ^ 1)
        sums.index(2 * slot).store(gl.associative_scan(log2, 0, add))
        sums.index(2 * slot + 1).store(beta_here)
        k_tile = keys.index(stage)
        q_tile = queries.index(stage)
        line = lines.index(slot)
        i = pinned(i0)[:, None]
        j = j0[None, :]
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        q_norm = gl.full([64], 1.0, gl.float32, layout=DOWN) * scale
        k_norm = gl.full([64], 1.0, gl.float32, layout=DOWN)
        if not RAW:
            kk = warpgroup_mma(k_tile, k_tile.permute((1, 0)), z, use_acc=False)
            k_norm = gl.rsqrt(squares_of(kk, i == j) + eps)
            if OUTPUT:
                qq = warpgroup_mma(q_tile, q_tile.permute((1, 0)), z, use_acc=False)
                q_norm = gl.rsqrt(squares_of(qq, i == j) + eps) * scale
        if OUTPUT:
            qk = warpgroup_mma(q_tile, k_tile.permute((1, 0)), z, use_acc=False, is_async=True)
        barrier()
        G_i = sums.index(2 * slot).load(DOWN)
        beta_i = sums.index(2 * slot + 1).load(DOWN) * k_norm
        whole = sums.index(2 * slot).slice(63, 1).load(DOWN)
        line.slice(0, 64).store(q_norm * exp2(G_i))
        line.slice(64, 64).store(beta_i * exp2(whole - G_i))
        line.slice(128, 64).store(gl.zeros([64], gl.float32, layout=DOWN) + exp2(whole))
        if OUTPUT:
            if not RAW:
                line.slice(192, 64).store(beta_i)
                barrier()
                beta_j = line.slice(192, 64).load(ACROSS)
            else:
                beta_j = sums.index(2 * slot + 1).load(ACROSS)
            G_j = sums.index(2 * slot).load(ACROSS)
            # Beyond the end beta is 0, but the next sequence may be anything.
            seen = (i >= j) & (i < end - token - n * 64)
            decays = exp2(G_i[:, None] - G_j[None, :]) * q_norm[:, None] * beta_j[None, :]
            qk = warpgroup_mma_wait(0, [qk])
            squares.index(slot).store(gl.where(seen, qk * decays, 0.0).to(gl.bfloat16))
            fence_async_shared()
        barrier()
        mbarrier.arrive(made.index(slot), count=1)
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def _first_state(
    initial, s_sn, s_sh, s_sk, s_sv, ends, decays, K, V, VP, HV, i_n, i_h, segment, key, column,
    HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """The initial state, and what the segments before this one make of it; 0 in the first pass."""
    WIDTH: gl.constexpr = key.shape[0]
    S = gl.zeros([column.shape[0], WIDTH], gl.float32, layout=KEYS)
    if OUTPUT:
        if HAS_INITIAL:
            initial += i_n.to(gl.int64) * s_sn + i_h.to(gl.int64) * s_sh
            given = (key[None, :] < K) & (column[:, None] < V)
            S = gl.load(initial + key[None, :] * s_sk + column[:, None] * s_sv, mask=given, other=0.0).to(gl.float32)
        NH = gl.num_programs(1)
        i_nh = gl.program_id(1).to(gl.int64)
        for r in range(segment):
            decay = gl.load(decays + (i_nh + r * NH) * WIDTH + key)
            B = gl.load(ends + (i_nh + r * NH) * (VP * WIDTH) + column[:, None] * WIDTH + key[None, :])
            S = S * decay[None, :] + B
    return S


@gluon.jit
def _state_warps(
    d_o, o_rows, initial, s_sn, s_sh, s_sk, s_sv, ends, decays, final,
    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, token, count, end,
    queries, keys, values, squares, lines, out, full, empty, made, used,
    SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = keys.shape[0]
    WIDTH: gl.constexpr = keys.shape[2]
    BV: gl.constexpr = values.shape[2]
    WARPS: gl.constexpr = BV // 16
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    LEFT_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_KEYS: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    PLACES: gl.constexpr = gl.SliceLayout(0, TOKENS)
    key = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, KEYS))
    column = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, KEYS))
    places = gl.arange(0, 64, layout=PLACES)[None, :]
    S = _first_state(
        initial, s_sn, s_sh, s_sk, s_sv, ends, decays, K, V, VP, HV, i_n, i_h, segment, key, column,
        HAS_INITIAL, OUTPUT, KEYS,
    )  # fmt: skip
    lost = gl.full([WIDTH], 1.0, gl.float32, layout=gl.SliceLayout(0, KEYS))  # what the segment leaves of a state
    zero = gl.zeros([BV, 64], gl.float32, layout=TOKENS)
    S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    o = zero
    out4 = out._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
    for n in range(count):
        stage = n % STAGES
        k_rows = keys.index(stage)
        left = end - token - n * 64
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        if SCALAR and PACKED:
            clear_beyond(k_rows, left, WARPS)
        v = values.index(stage).permute((1, 0)).load(TOKENS)
        if PACKED:
            v = gl.where(places < left, v, 0.0)
        if OUTPUT:
            o16 = o.to(gl.bfloat16)
            o = warpgroup_mma(S16, queries.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            tma.store_wait(0)
        barrier()
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % STAGES), count=1)
            if SCALAR:
                mbarrier.arrive(used.index((n - 1) & 1), count=1)
        if OUTPUT:
            out.permute((1, 0)).store(o16)
        if SCALAR:
            slot = n & 1
            mbarrier.wait(made.index(slot), (n >> 1) & 1)
            line = lines.index(slot)
            v_left = v.to(gl.float32) * line.slice(64, 64).load(PLACES)[None, :]
            down = line.slice(128, 1).load(gl.SliceLayout(0, KEYS))
            square = squares.index(slot)
        else:
            v_left = v
            line = lines.index(stage)._reinterpret(gl.float32, [WIDTH], LINE)
            down = line.load(gl.SliceLayout(0, KEYS))
            square = squares.index(stage)
        v_left = gl.convert_layout(v_left.to(gl.bfloat16), LEFT_KEYS)
        S = S * down[None, :]
        S = warpgroup_mma(v_left, k_rows, S, is_async=True)
        if OUTPUT:
            v_right = gl.convert_layout(v, LEFT_TOKENS)
            if SCALAR:
                own = warpgroup_mma(v_right, square.permute((1, 0)), zero, use_acc=False, is_async=True)
            else:
                o = warpgroup_mma(v_right, square.permute((1, 0)), o, is_async=True)
            # Beside the longest products the outputs of the chunk before leave.
            fence_async_shared()
            barrier()
            if n > 0:
                tma.async_copy_shared_to_global(d_o, [i_b, token + (n - 1) * 64, i_h, i_v * BV], out4)
            if SCALAR:
                S, o, own = warpgroup_mma_wait(0, [S, o, own])
                o = o * line.slice(0, 64).load(PLACES)[None, :] + own
            else:
                S, o = warpgroup_mma_wait(0, [S, o])
            S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
        else:
            lost = lost * down
            S = warpgroup_mma_wait(0, [S])
    if OUTPUT:
        last = token + (count - 1) * 64
        o16 = o.to(gl.bfloat16)
        keep_outputs(out, o16)
        leave_last(d_o, o_rows, out, out4, TOKENS, i_b, i_h, i_v, last, end, V, HV, count > 0, BV, PACKED)
        if segment == gl.num_programs(2) - 1:
            final += (i_n * HV + i_h).to(gl.int64) * (K * V)
            gl.store(
                final + key[None, :] * V + column[:, None], S, mask=(key[None, :] < K) & (column[:, None] < V)
            )  # fmt: skip
    else:
        i_nh = gl.program_id(1).to(gl.int64) + segment * gl.num_programs(1)
        gl.store(ends + i_nh * (VP * WIDTH) + column[:, None] * WIDTH + key[None, :], S)
        gl.store(decays + i_nh * WIDTH + key, lost)
    if READY:
        previous_is_over()


@gluon.jit(do_not_specialize=["T", "first", "chunks", "length"])  # they change from run to run
def linear(
    d_rows, d_squares, d_factors, announced, d_q, d_k, d_v, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st,
    beta_sh, d_o, o_rows, initial, s_sn, s_sh, s_sk, s_sv, ends, decays, final, cu_seqlens, chunk_offsets,
    T, K, V, VP, HV, GROUP, first, chunks, length, scale, eps, gate_scale,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    SCALAR: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr, PACKED: gl.constexpr,
    RAW: gl.constexpr, STAGES: gl.constexpr, BV: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Chunks ``first .. first + chunks`` in segments of ``length``; grid (blocks of V, sequences * HV, segments).

    SCALAR: d_q, d_k ``[B, T, heads, K]``, GROUP value heads to each of these; g, beta ``[B, T, HV]`` and A_log, dt_bias
    ``[HV]`` as the call has them; RAW: q and k are taken as they are. Otherwise d_rows, d_squares and d_factors are
    what the prepare kernel left, and READY says that it may still be at work.

    d_v, d_o: ``[B, T, HV, V]``; o_rows: what d_o describes. initial: ``[N, HV, K, V]`` with its strides. final: the
    same in fp32, contiguous; it may be ``initial`` if there is one segment. ends ``[segments - 1, N * HV, VP, WIDTH]``
    and decays ``[segments - 1, N * HV, WIDTH]``: what a pass without OUTPUT leaves of every segment but the last.
    """
    i_v = gl.program_id(0)
    segment = gl.program_id(2)
    i_n, i_h, i_b, tile, step, count, token, end = locate_chunks(
        cu_seqlens, chunk_offsets, T, HV, first, chunks, length, segment, PACKED
    )  # fmt: skip
    SLOTS: gl.constexpr = 2 if SCALAR else STAGES  # chunks whose A_qk is held
    ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, WIDTH], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, WIDTH], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BV], TILE)
    squares = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 64, 64], TILE)
    lines = gl.allocate_shared_memory(
        gl.float32, [SLOTS, 256 if SCALAR else WIDTH], ONE if SCALAR else d_factors.layout
    )
    sums = gl.allocate_shared_memory(gl.float32, [4, 64], ONE)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, BV], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2 if SCALAR else 1)
    for s in gl.static_range(2):
        mbarrier.init(made.index(s), count=1)
        mbarrier.init(used.index(s), count=1)
    fence_async_shared()
    barrier()
    if not READY:
        previous_is_over()
        next_may_start()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    if SCALAR:
        gl.warp_specialize(
            [
                (_state_warps, (
                    d_o, o_rows, initial, s_sn, s_sh, s_sk, s_sv, ends, decays, final,
                    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, token, count, end,
                    queries, keys, values, squares, lines, out, full, empty, made, used,
                    SCALAR, READY, HAS_INITIAL, OUTPUT, PACKED,
                )),
                (_factor_warps, (
                    g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, i_b, i_h, token, count, end,
                    scale, eps, gate_scale, queries, keys, squares, lines, sums, full, empty, made, used,
                    FN, HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA, OUTPUT, RAW,
                )),
                (_load_warp, (
                    d_rows, d_squares, d_factors, announced, d_q, d_k, d_v, i_b, i_h, i_v, step, GROUP, tile, token,
                    count, queries, keys, values, squares, lines, full, empty, SCALAR, READY, OUTPUT,
                )),
            ],
            [4, 1], [168, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_state_warps, (
                    d_o, o_rows, initial, s_sn, s_sh, s_sk, s_sv, ends, decays, final,
                    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, token, count, end,
                    queries, keys, values, squares, lines, out, full, empty, made, used,
                    SCALAR, READY, HAS_INITIAL, OUTPUT, PACKED,
                )),
                (_load_warp, (
                    d_rows, d_squares, d_factors, announced, d_q, d_k, d_v, i_b, i_h, i_v, step, GROUP, tile, token,
                    count, queries, keys, values, squares, lines, full, empty, SCALAR, READY, OUTPUT,
                )),
            ],
            [1], [40],
        )  # fmt: skip
