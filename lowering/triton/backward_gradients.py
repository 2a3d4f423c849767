"""The third phase of the backward pass: the gradients of a chunk's tokens, in two kernels.

Then, where keys are shared by heads or normalised, the sums over the heads of a group in their order, and the norms.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .backward_blocks import LIMIT, blocks_adjoint, leave_masks, load_factors, load_inside
from .backward_load import chunk_place, gate_floor, gate_gradient, load_rows
from .backward_pairs import levels_adjoint, turned_sum
from .decays import prefix_decay, suffix_decay, token_decays, total_decay
from .macros import log_gate


@triton.jit(do_not_specialize=["T", "pitch", "N", "first_head"])
def pair_gradients(
    v_ptr, v_sb, v_st, v_sh, v_sd, g_ptr, g_sb, g_st, g_sh, do_ptr, do_sb, do_st, do_sh, do_sd, A_log_ptr, dt_bias_ptr,
    cu_seqlens, chunk_offsets, N, T, pitch, scale, gate_scale, first_head,
    p_buffer, l_buffer, beta_buffer, y_buffer, z_buffer, dp_buffer, dl_buffer, own_buffer, dlog_buffer, masks_buffer,
    dv_ptr, dbeta_ptr,
    HV: tl.constexpr, HP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, FN: tl.constexpr, DELTA: tl.constexpr, BETA: tl.constexpr, SIGMOID: tl.constexpr,
    RATE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What is summed over V alone: dv, dbeta and the gradients of P and L, behind their decays if those are a token's.

    Both are strictly lower triangular, and above the diagonal their transposes are left. The diagonal of P's gradient
    is kept apart, in fp32: nothing decays it.
    """
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HP, first_head + pid % HP
    if PACKED:
        if chunk >= tl.load(chunk_offsets + N):
            return
    if GATE == "channel" and not EXACT:
        if pid == 0:
            leave_masks(masks_buffer, C, DT)
    batch, first, end = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, C, PACKED)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    live = i < end - first
    token = (batch * pitch + first) * HV + head
    square = pid * (C * C) + i * C + j
    b, b_row = 1.0, 1.0
    if BETA:
        b, b_row = tl.load(beta_buffer + pid * C + i), tl.load(beta_buffer + pid * C + j)
    dp, h, db = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32), tl.zeros([C, 1], tl.float32)
    for first_value in range(0, VP, BV):
        c = first_value + tl.arange(0, BV)[None, :]
        at = pid * (C * VP) + i * VP + c
        do = load_rows(do_ptr + batch * do_sb + first * do_st + head * do_sh, i, live, do_st, c, do_sd, V).to(DT)
        z = tl.load(z_buffer + at)
        if DELTA:
            y = tl.load(y_buffer + at)
        else:
            y = load_rows(v_ptr + batch * v_sb + first * v_st + head * v_sh, i, live, v_st, c, v_sd, V).to(DT)
        dp = tl.dot(do, tl.trans(y), dp, input_precision=PRECISION)
        if DELTA:
            h = tl.dot(z, tl.trans(y), h, input_precision=PRECISION)
        z = z.to(tl.float32)
        if BETA:
            db += tl.sum(z * y.to(tl.float32), 1)[:, None]
        at = token * V + i * (HV * V) + c
        tl.store(dv_ptr + at, (z * b).to(dv_ptr.dtype.element_ty), mask=live & (c < V))
    if BETA:
        if SIGMOID:
            db *= b * (1.0 - b)
        tl.store(dbeta_ptr + token + i * HV, db.to(dbeta_ptr.dtype.element_ty), mask=live)
    dp *= scale * b_row  # V' = b Y
    tl.store(own_buffer + pid * C + tl.arange(0, C), tl.sum(tl.where(i == j, dp, 0.0), 1))
    dp, dl = tl.where(i > j, dp, 0.0), tl.where(i > j, -h * (b * b_row), 0.0)
    if GATE == "scalar":
        g = token_gates(
            g_ptr + batch * g_sb + first * g_st + head * g_sh, g_st, i, live, A_log_ptr, dt_bias_ptr, head, gate_scale,
            FN, RATE, BIAS,
        )  # fmt: skip
        pairs = dp * tl.load(p_buffer + square).to(tl.float32)
        if DELTA:
            pairs += dl * tl.load(l_buffer + square).to(tl.float32)
        spanned = turned_sum(j >= i, pairs, DT)
        tl.store(dlog_buffer + pid * C + tl.arange(0, C), tl.sum(tl.where(j < i, spanned, 0.0), 1))
        decay = token_decays(g, C, DT)
        dp, dl = dp * decay, dl * decay
    tl.debug_barrier()  # P and L, which are overwritten, have been read
    tl.store(dp_buffer + square, (dp + tl.trans(dp)).to(DT))
    if DELTA:
        tl.store(dl_buffer + square, (dl + tl.trans(dl)).to(DT))


@triton.jit
def token_gates(
    base, g_st, i, live, A_log_ptr, dt_bias_ptr, head, gate_scale,
    FN: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The log gates [C, 1] of a head with one a token."""
    x = tl.load(base + i * g_st, mask=live, other=0.0).to(tl.float32)
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    if BIAS:
        x += tl.load(dt_bias_ptr + head).to(tl.float32)
    return tl.where(live, log_gate(gate_floor(x, FN), rate, FN, gate_scale), 0.0)


@triton.jit
def state_products(
    do_base, do_st, do_sd, i, live, v_base, v_st, v_sd, d, s_tile, d_tile, y_tile, z_tile,
    V: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
    DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO S^T, Z S^T, Y dS^T of a block of channels, and the rows of S * dS as a row. All is loaded before any product:
    behind the barriers of one, loads would be waited for one after the other."""
    dq, zs = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dk, dtotal = tl.zeros([C, BK], tl.float32), tl.zeros([1, BK], tl.float32)
    for first_value in range(0, VP, BV):
        c = first_value + tl.arange(0, BV)[None, :]
        s, ds = tl.load(s_tile + d * VP + c), tl.load(d_tile + d * VP + c)
        do = load_rows(do_base, i, live, do_st, c, do_sd, V).to(DT)
        if DELTA:
            y, z = tl.load(y_tile + i * VP + c), tl.load(z_tile + i * VP + c)
            zs = tl.dot(z, tl.trans(s), zs, input_precision=PRECISION)
        else:
            y = load_rows(v_base, i, live, v_st, c, v_sd, V).to(DT)
        dq = tl.dot(do, tl.trans(s), dq, input_precision=PRECISION)
        dk = tl.dot(y, tl.trans(ds), dk, input_precision=PRECISION)
        dtotal += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)[None, :]
    return dq, zs, dk, dtotal


@triton.jit(do_not_specialize=["T", "N", "first_head"])
def through_states(
    v_ptr, v_sb, v_st, v_sh, v_sd, do_ptr, do_sb, do_st, do_sh, do_sd, cu_seqlens, chunk_offsets, N, T, scale,
    first_head, total_buffer, beta_buffer, s_buffer, d_buffer, y_buffer, z_buffer, qg_buffer, kg_buffer, kd_buffer,
    HP: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With decays by blocks: what reaches q and k through the states, in the place of what those decayed to the chunk's
    ends, which nothing reads any more, and the gradient of the log of the states' decay in its place."""
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HP, first_head + pid % HP
    if PACKED:
        if chunk >= tl.load(chunk_offsets + N):
            return
    batch, first, end = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, C, PACKED)
    i, d = tl.arange(0, C)[:, None], tl.arange(0, KP)[None, :]
    live = i < end - first
    b = tl.full([C, 1], 1.0, tl.float32)
    if BETA:
        b = tl.load(beta_buffer + pid * C + i)
    to_q, to_start, to_end, dtotal = state_products(
        do_ptr + batch * do_sb + first * do_st + head * do_sh, do_st, do_sd, i, live,
        v_ptr + batch * v_sb + first * v_st + head * v_sh, v_st, v_sd, tl.arange(0, KP)[:, None],
        s_buffer + pid * (KP * VP), d_buffer + pid * (KP * VP), y_buffer + pid * (C * VP), z_buffer + pid * (C * VP),
        V, VP, C, KP, BV, DELTA, DT, PRECISION,
    )  # fmt: skip
    at, at_total = pid * (C * KP) + i * KP + d, total_buffer + pid * KP + d
    tl.store(qg_buffer + at, (to_q * scale).to(DT))
    tl.store(kd_buffer + at, (to_end * b).to(DT))
    if DELTA:
        tl.store(kg_buffer + at, (-to_start * b).to(DT))
    tl.store(at_total, dtotal * tl.load(at_total))


@triton.jit(do_not_specialize=["T", "pitch", "N", "first_head"])
def gradients(
    q_ptr, q_sb, q_st, q_sh, q_sd, k_ptr, k_sb, k_st, k_sh, k_sd, v_ptr, v_sb, v_st, v_sh, v_sd,
    g_ptr, g_sb, g_st, g_sh, g_sd, do_ptr, do_sb, do_st, do_sh, do_sd, A_log_ptr, dt_bias_ptr,
    cu_seqlens, chunk_offsets, N, T, pitch, scale, gate_scale, first_head,
    total_buffer, factors_buffer, masks_buffer, beta_buffer, rate_buffer, s_buffer, d_buffer, y_buffer, z_buffer,
    qg_buffer, kg_buffer, kd_buffer, dp_buffer, dl_buffer, own_buffer, dlog_buffer,
    dq_ptr, dk_ptr, dg_ptr, dbias_ptr, drate_ptr,
    HV: tl.constexpr, HP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, FN: tl.constexpr,
    DELTA: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    DBIAS: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr, BOUNDED: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg. A program has a block of channels; with a gate per token, whose gradient sums them, all blocks."""
    PARTS: tl.constexpr = 1 if GATE == "scalar" else KP // BK
    pid, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0) % PARTS
    chunk, head = pid // HP, first_head + pid % HP
    if PACKED:
        if chunk >= tl.load(chunk_offsets + N):
            return
    batch, first, end = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, C, PACKED)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    live = i < end - first
    q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
    k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
    v_base = v_ptr + batch * v_sb + first * v_st + head * v_sh
    do_base = do_ptr + batch * do_sb + first * do_st + head * do_sh
    g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
    token = (batch * pitch + first) * HV + head
    b, rate, q_rate, k_rate = tl.full([C, 1], 1.0, tl.float32), 1.0, 1.0, 1.0
    if BETA:
        b = tl.load(beta_buffer + pid * C + i)
    if RATE:
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    if L2NORM:
        q_rate, k_rate = tl.load(rate_buffer + pid * (2 * C) + i), tl.load(rate_buffer + pid * (2 * C) + C + i)
    own = tl.load(own_buffer + pid * C + i)
    if GATE == "scalar":
        g = token_gates(g_base, g_st, i, live, A_log_ptr, dt_bias_ptr, head, gate_scale, FN, RATE, BIAS)
        before, after, total = prefix_decay(g, C), suffix_decay(g, C), total_decay(g, C, 1)
        starts, ends, totals = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([1], tl.float32)
    dp_tile, dl_tile = dp_buffer + pid * (C * C), dl_buffer + pid * (C * C)
    if GATE == "channel" and not EXACT:
        dp_inside = load_inside(dp_tile, C)
        dl_inside = load_inside(dl_tile, C) if DELTA else dp_inside
    for block in range(KP // BK // PARTS):
        first_key = (part + block) * BK
        d, d_column = first_key + tl.arange(0, BK)[None, :], first_key + tl.arange(0, BK)[:, None]
        q, k = load_rows(q_base, i, live, q_st, d, q_sd, K), load_rows(k_base, i, live, k_st, d, k_sd, K)
        if GATE == "channel":
            x = load_rows(g_base, i, live, g_st, d, g_sd, K)
            if not EXACT:
                lead, tail, middle, whole = load_factors(factors_buffer + pid * (C // 4 * KP), d, C, KP)
                total = tl.load(total_buffer + pid * KP + d)
        if GATE == "channel" and not EXACT:
            at = pid * (C * KP) + i * KP + d
            to_q, to_end = tl.load(qg_buffer + at).to(tl.float32), tl.load(kd_buffer + at).to(tl.float32)
            to_start = tl.load(kg_buffer + at).to(tl.float32) if DELTA else to_q
        else:
            to_q, zs, to_end, dtotal = state_products(
                do_base, do_st, do_sd, i, live, v_base, v_st, v_sd, d_column, s_buffer + pid * (KP * VP),
                d_buffer + pid * (KP * VP), y_buffer + pid * (C * VP), z_buffer + pid * (C * VP),
                V, VP, C, BK, BV, DELTA, DT, PRECISION,
            )  # fmt: skip
            to_q, to_start, to_end = to_q * scale, -zs * b, to_end * b
        q, k = q.to(tl.float32) * q_rate, k.to(tl.float32) * k_rate
        if GATE == "channel":
            x = x.to(tl.float32)
            if BIAS:
                x += tl.load(dt_bias_ptr + head * K + d, mask=d < K, other=0.0).to(tl.float32)
            g = tl.where(live & (d < K), log_gate(gate_floor(x, FN), rate, FN, gate_scale), 0.0)
            if EXACT:
                dq, dk, dg = levels_adjoint(
                    to_q, to_start, to_end, dtotal, own, dp_tile, dl_tile, q, k, g, C, DELTA, DT, PRECISION
                )  # fmt: skip
                inside = dg
            else:
                dq, dk, dg, inside = blocks_adjoint(
                    to_q, to_start, to_end, total, own, lead, tail, middle, whole, dp_inside, dl_inside,
                    dp_tile, dl_tile, masks_buffer, q, k, g, C, DELTA, BOUNDED, DT,
                )  # fmt: skip
            tl.debug_barrier()  # so that x is loaded again, not kept in registers
            x = load_rows(g_base, i, live, g_st, d, g_sd, K).to(tl.float32)
            if BIAS:
                x += tl.load(dt_bias_ptr + head * K + d, mask=d < K, other=0.0).to(tl.float32)
            if not BOUNDED and not EXACT:
                dg += tl.where(log_gate(gate_floor(x, FN), rate, FN, gate_scale) > LIMIT, inside, 0.0)
            dx, drate = gate_gradient(x, rate, dg, FN, gate_scale)
            dx = tl.where(live & (d < K), dx, 0.0)
            tl.store(dg_ptr + token * K + i * (HV * K) + d, dx.to(dg_ptr.dtype.element_ty), mask=live & (d < K))
            if DBIAS:
                tl.store(dbias_ptr + (chunk * HV + head) * K + d, tl.sum(dx, 0)[None, :], mask=d < K)
            if RATE:
                drate = tl.sum(tl.sum(tl.where(live & (d < K), drate, 0.0), 0), 0)
                tl.store(drate_ptr + (chunk * PARTS + part) * HV + head, drate)
        else:
            if GATE == "scalar":
                to_q, to_start, to_end = to_q * before, to_start * before, to_end * after
                from_start = q * to_q
                if DELTA:
                    from_start += k * to_start
                starts += tl.sum(from_start, 1)
                ends += tl.sum(k * to_end, 1)
                totals += tl.sum(dtotal * total, 1)
            dq, dk = to_q + own * k, to_end + own * q
            if DELTA:
                dk += to_start
            rounded, dp = k.to(DT), tl.load(dp_tile + i * C + j)
            dq = tl.dot(tl.where(i > j, dp, 0.0).to(DT), rounded, dq, input_precision=PRECISION)
            dk = tl.dot(tl.where(i < j, dp, 0.0).to(DT), q.to(DT), dk, input_precision=PRECISION)
            if DELTA:
                dk = tl.dot(tl.load(dl_tile + i * C + j), rounded, dk, input_precision=PRECISION)
        at = token * K + i * (HV * K) + d
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=live & (d < K))
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=live & (d < K))
    if GATE == "scalar":
        dg = tl.load(dlog_buffer + pid * C + i) + totals[:, None]
        dg += tl.sum(tl.where(j >= i, starts[None, :], ends[None, :]), 1)[:, None]
        x = tl.load(g_base + i * g_st, mask=live, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias_ptr + head).to(tl.float32)
        dx, drate = gate_gradient(x, rate, dg, FN, gate_scale)
        dx = tl.where(live, dx, 0.0)
        tl.store(dg_ptr + token + i * HV, dx.to(dg_ptr.dtype.element_ty), mask=live)
        if DBIAS:
            tl.store(dbias_ptr + chunk * HV + head, tl.sum(tl.sum(dx, 1), 0))
        if RATE:
            tl.store(drate_ptr + chunk * HV + head, tl.sum(tl.sum(tl.where(live, drate, 0.0), 1), 0))


@triton.jit(do_not_specialize=["T", "x_sb"])
def gather(
    x_ptr, x_sb, x_st, x_sh, x_sd, partial, dx_ptr, T, rows, l2norm_eps,
    H: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """The gradient of q or k ``[B, T, H, K]`` from those of each group's heads ``[B, T, HV, K]``, through the norm.

    Of ``y = r x`` with ``r = 1 / sqrt(sum(x * x) + eps)`` it is ``r (dy - y (y . dy))``.
    """
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)[:, None]
    d = tl.arange(0, KP)[None, :]
    live = (row < rows) & (d < K)
    dy = tl.zeros([BT, KP], tl.float32)
    for member in range(GROUP):
        dy += tl.load(partial + (row * GROUP + member) * K + d, mask=live, other=0.0).to(tl.float32)
    if L2NORM:
        token, head = row // H, row % H
        at = x_ptr + (token // T) * x_sb + (token % T) * x_st + head * x_sh + d * x_sd
        x = tl.load(at, mask=live, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 1)[:, None] + l2norm_eps)
        y = x * rate
        dy = rate * (dy - y * tl.sum(y * dy, 1)[:, None])
    tl.store(dx_ptr + row * K + d, dy.to(dx_ptr.dtype.element_ty), mask=live)


@triton.jit
def add_chunks(
    parts_ptr, total_ptr, rows, width, others_ptr, other_total_ptr, other_rows, other_width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Two sums ``[width]`` of what every chunk has, ``[rows, width]``: gradients of A_log, dt_bias, a head's gate.

    CHAINED: it is launched before the kernel ahead of it is over, and waits for that.
    """
    if CHAINED:
        gdc_wait()
    block = tl.program_id(0)
    blocks = (width + BLOCK - 1) // BLOCK
    if block < blocks:
        _add_rows(parts_ptr, total_ptr, rows, width, block, ROWS, BLOCK)
    else:
        _add_rows(others_ptr, other_total_ptr, other_rows, other_width, block - blocks, ROWS, BLOCK)


@triton.jit
def _add_rows(parts_ptr, total_ptr, rows, width, block, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, rows, ROWS):
        at = (start + row).to(tl.int64) * width + column
        total += tl.load(parts_ptr + at, mask=(start + row < rows) & (column < width), other=0.0)
    summed = tl.sum(total, 0)[None, :]
    tl.store(total_ptr + column, summed.to(total_ptr.dtype.element_ty), mask=column < width)
