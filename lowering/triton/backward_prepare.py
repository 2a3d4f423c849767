"""The first phase of the backward pass: what a chunk computes without any state, one program per chunk and head.

Left behind: q and k decayed to the chunk's ends, its Gram matrices P and L (see ``lowering/adjoint.py``), beta behind
its sigmoid, the rates of the norms; a second kernel makes X from L and beta.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .backward_blocks import LIMIT, leave_factors, leave_sums
from .backward_load import chunk_place, gate_floor, load_rows
from .decays import channel_grams, exp, masked_sum, prefix_decay, suffix_decay, token_decays, total_decay
from .inverse import solved
from .macros import log_gate, sigmoid


@triton.jit(do_not_specialize=["beta_sb", "beta_st", "T", "N", "first_head"])
def prepare(
    q_ptr, q_sb, q_st, q_sh, q_sd, k_ptr, k_sb, k_st, k_sh, k_sd, g_ptr, g_sb, g_st, g_sh, g_sd,
    beta_ptr, beta_sb, beta_st, beta_sh, A_log_ptr, dt_bias_ptr, cu_seqlens, chunk_offsets, N, T,
    gate_scale, l2norm_eps, first_head,
    qg_buffer, kg_buffer, kd_buffer, total_buffer, factors_buffer, p_buffer, l_buffer, a_buffer, beta_buffer,
    rate_buffer,
    HP: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, FN: tl.constexpr, DELTA: tl.constexpr, BETA: tl.constexpr, SIGMOID: tl.constexpr,
    L2NORM: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
    PAIRS: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    chunk, head = pid // HP, first_head + pid % HP
    if PACKED:
        if chunk >= tl.load(chunk_offsets + N):
            return
    batch, first, end = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, C, PACKED)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    live, row = i < end - first, tl.arange(0, C)
    q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
    k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
    q_rate, k_rate = 1.0, 1.0
    if L2NORM:
        q_squares, k_squares = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for first_key in tl.static_range(0, KP, BK):
            d = first_key + tl.arange(0, BK)[None, :]
            q = load_rows(q_base, i, live, q_st, d, q_sd, K).to(tl.float32)
            k = load_rows(k_base, i, live, k_st, d, k_sd, K).to(tl.float32)
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
        q_rates, k_rates = tl.rsqrt(q_squares + l2norm_eps), tl.rsqrt(k_squares + l2norm_eps)
        tl.store(rate_buffer + pid * (2 * C) + row, q_rates)
        tl.store(rate_buffer + pid * (2 * C) + C + row, k_rates)
        q_rate, k_rate = q_rates[:, None], k_rates[:, None]
    b = tl.full([C, 1], 1.0, tl.float32)
    if BETA:
        b = tl.load(beta_ptr + batch * beta_sb + (first + i) * beta_st + head * beta_sh, mask=live, other=0.0)
        b = b.to(tl.float32)
        if SIGMOID:
            b = sigmoid(b)
        b = tl.where(live, b, 0.0)
        tl.store(beta_buffer + pid * C + i, b)
    rate = 1.0
    if RATE:
        rate = tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    p, l = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if GATE == "scalar":
        x = tl.load(g_ptr + batch * g_sb + (first + i) * g_st + head * g_sh, mask=live, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(dt_bias_ptr + head).to(tl.float32)
        g = tl.where(live, log_gate(gate_floor(x, FN), rate, FN, gate_scale), 0.0)
        before, after, total = prefix_decay(g, C), suffix_decay(g, C), total_decay(g, C, 1)
    g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
    if GATE == "channel":
        x_ahead = load_rows(g_base, i, live, g_st, tl.arange(0, BK)[None, :], g_sd, K)
    for first_key in range(0, KP, BK):
        d = first_key + tl.arange(0, BK)[None, :]
        q = load_rows(q_base, i, live, q_st, d, q_sd, K).to(tl.float32) * q_rate
        k = load_rows(k_base, i, live, k_st, d, k_sd, K).to(tl.float32) * k_rate
        at = pid * (C * KP) + i * KP + d
        if GATE == "channel":
            x = x_ahead.to(tl.float32)
            x_ahead = load_rows(g_base, i, live, g_st, d + BK, g_sd, K)
            if BIAS:
                x += tl.load(dt_bias_ptr + head * K + d, mask=d < K, other=0.0).to(tl.float32)
            g = tl.where(live & (d < K), log_gate(gate_floor(x, FN), rate, FN, gate_scale), 0.0)
            from_start, to_end = exp(masked_sum(j <= i, g, DT)), exp(masked_sum(j > i, g, DT))
            p, l = channel_grams(p, l, q, k, g, C, PAIRS, DT, PRECISION, LIMIT, True)
            if EXACT:
                tl.store(total_buffer + pid * KP + d, total_decay(g, C, 1))
            else:
                leave_sums(factors_buffer + pid * (C // 4 * KP), g, d, C, KP)
            tl.store(qg_buffer + at, (q * from_start).to(DT))
            tl.store(kd_buffer + at, (k * to_end).to(DT))
            if DELTA:
                tl.store(kg_buffer + at, (k * from_start).to(DT))
        else:
            p = tl.dot(q.to(DT), tl.trans(k.to(DT)), p, input_precision=PRECISION)
            if DELTA:
                l = tl.dot(k.to(DT), tl.trans(k.to(DT)), l, input_precision=PRECISION)
            if GATE == "scalar":
                tl.store(qg_buffer + at, (q * before).to(DT))
                tl.store(kd_buffer + at, (k * after).to(DT))
                if DELTA:
                    tl.store(kg_buffer + at, (k * before).to(DT))
                tl.store(total_buffer + pid * KP + d, total + tl.zeros([1, BK], tl.float32))
            else:
                tl.store(qg_buffer + at, q.to(DT))
                tl.store(kd_buffer + at, k.to(DT))
    if GATE == "channel" and not EXACT:
        leave_factors(factors_buffer + pid * (C // 4 * KP), total_buffer + pid * KP, C, KP)
    if GATE == "scalar":
        decay = token_decays(g, C, DT)
        p, l = p * decay, l * decay
    square = pid * (C * C) + i * C + j
    tl.store(p_buffer + square, tl.where(i >= j, p, 0.0).to(DT))
    if DELTA:
        l = tl.where(i > j, l, 0.0)
        tl.store(l_buffer + square, l.to(DT))
        tl.store(a_buffer + square, l.to(a_buffer.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def inverse(
    chunk_offsets, N, a_buffer, beta_buffer, x_buffer,
    HP: tl.constexpr, C: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """X = (I + L diag(beta))^-1 L; a_buffer: L, as finely as the products' operands."""
    pid = tl.program_id(0).to(tl.int64)
    if PACKED:
        if pid // HP >= tl.load(chunk_offsets + N):
            return
    square = pid * (C * C)
    solved(a_buffer + square, beta_buffer + pid * C, x_buffer + square, C, BETA, INVERSE_PRECISION)
