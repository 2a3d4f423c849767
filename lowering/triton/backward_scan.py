"""The second phase of the backward pass: the states forward and their gradients in reverse, in one launch.

Neither reads the other, so they are the two halves of the grid. A program has one head of one sequence, and a block of
the columns of V. What it leaves behind is what the third phase needs of every chunk. States and values are held
transposed: a chunk's tiles then are right operands of all products, which are copied to shared memory ahead and read
from there either way round; as left operands they were turned in registers.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl


@triton.jit
def first_total(total_buffer, tile, d, chunks, KP: tl.constexpr, GATED: tl.constexpr):
    """The decay of the first chunk that is worked on, if there is one. What is no operand of a product is not copied
    ahead by the compiler: it is loaded a chunk ahead by hand."""
    total = tl.zeros([1, KP], tl.float32)
    if GATED:
        total = tl.load(total_buffer + tile * KP + d, mask=(d >= 0) & (chunks > 0), other=0.0)
    return total


@triton.jit(do_not_specialize=["T", "N", "first_head", "state_sn", "final_sn"])
def scan(
    v_ptr, v_sb, v_st, v_sh, v_sd, do_ptr, do_sb, do_st, do_sh, do_sd,
    state_ptr, state_sn, state_sh, state_sk, state_sv, final_ptr, final_sn, final_sh, final_sk, final_sv, dstate_ptr,
    last_ptr, cu_seqlens, chunk_offsets, N, T, scale, first_head,
    qg_buffer, kg_buffer, kd_buffer, total_buffer, p_buffer, x_buffer, beta_buffer,
    s_buffer, d_buffer, y_buffer, z_buffer,
    HV: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, GATED: tl.constexpr, DELTA: tl.constexpr, BETA: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr, DT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """AHEAD, with a grid of 1 in the second dimension: only the last states are left."""
    pid = tl.program_id(0).to(tl.int64)
    lane, column = pid // (VP // BV), pid % (VP // BV)
    sequence, own = lane // HP, lane % HP
    head = first_head + own
    if PACKED:
        start = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), T)
        chunk = tl.load(chunk_offsets + sequence).to(tl.int64)
        chunks = tl.load(chunk_offsets + sequence + 1) - tl.load(chunk_offsets + sequence)
        batch = sequence * 0
    else:
        chunks = (T + C - 1) // C
        chunk, batch = sequence * chunks, sequence
        start, end = sequence * 0, sequence * 0 + T
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    d = tl.arange(0, KP)[None, :]
    c = column * BV + tl.arange(0, BV)[:, None]
    if tl.program_id(1) == 0:
        s = tl.zeros([BV, KP], tl.float32)
        if STATE:
            initial = state_ptr + sequence * state_sn + head * state_sh + d * state_sk + c * state_sv
            s += tl.load(initial, mask=(d < K) & (c < V), other=0.0).to(tl.float32)
        v_base = v_ptr + batch * v_sb + head * v_sh
        t = start + j
        v_next = tl.load(v_base + t * v_st + c * v_sd, mask=(t < end) & (c < V), other=0.0)
        total_next = first_total(total_buffer, chunk * HP + own, d, chunks, KP, GATED)
        for step in range(chunks):
            tile, ahead = (chunk + step) * HP + own, tl.minimum(step + 1, chunks - 1)
            t = start + ahead * C + j
            v, v_next = v_next, tl.load(v_base + t * v_st + c * v_sd, mask=(t < end) & (c < V), other=0.0)
            kd = tl.load(kd_buffer + tile * (C * KP) + i * KP + d)
            b = 1.0
            if BETA:
                b = tl.load(beta_buffer + tile * C + j)
            s_rounded = s.to(DT)
            if GATED:
                s *= total_next
                total_next = tl.load(total_buffer + ((chunk + ahead) * HP + own) * KP + d)
            if not AHEAD:
                tl.store(s_buffer + tile * (KP * VP) + d * VP + c, s_rounded)
            written = v.to(tl.float32)
            if DELTA:
                kg = tl.load(kg_buffer + tile * (C * KP) + i * KP + d)
                written -= tl.dot(s_rounded, tl.trans(kg), input_precision=PRECISION)
                x = tl.load(x_buffer + tile * (C * C) + i * C + j)
                written = tl.dot((-b * written).to(DT), tl.trans(x), written, input_precision=PRECISION)
                if not AHEAD:
                    tl.store(y_buffer + tile * (C * VP) + j * VP + c, written.to(DT))
            s = tl.dot((b * written).to(DT), kd, s, input_precision=PRECISION)
        if AHEAD:
            tl.store(last_ptr + ((sequence * HV + head) * K + d) * V + c, s, mask=(d < K) & (c < V))
    else:
        ds = tl.zeros([BV, KP], tl.float32)
        if FINAL:
            final = final_ptr + sequence * final_sn + head * final_sh + d * final_sk + c * final_sv
            ds += tl.load(final, mask=(d < K) & (c < V), other=0.0).to(tl.float32)
        do_base = do_ptr + batch * do_sb + head * do_sh
        total_next = first_total(total_buffer, (chunk + chunks - 1) * HP + own, d, chunks, KP, GATED)
        for step in range(chunks):
            tile = (chunk + chunks - 1 - step) * HP + own
            t = start + (chunks - 1 - step) * C + j
            do = tl.load(do_base + t * do_st + c * do_sd, mask=(t < end) & (c < V), other=0.0)
            do = (do.to(tl.float32) * scale).to(DT)
            kd = tl.load(kd_buffer + tile * (C * KP) + i * KP + d)
            qg = tl.load(qg_buffer + tile * (C * KP) + i * KP + d)
            p = tl.load(p_buffer + tile * (C * C) + i * C + j)
            ds_rounded = ds.to(DT)
            if GATED:
                ds *= total_next
                ahead = (chunk + tl.maximum(chunks - 2 - step, 0)) * HP + own
                total_next = tl.load(total_buffer + ahead * KP + d)
            tl.store(d_buffer + tile * (KP * VP) + d * VP + c, ds_rounded)
            z = tl.dot(do, p, input_precision=PRECISION)
            z = tl.dot(ds_rounded, tl.trans(kd), z, input_precision=PRECISION)
            b = 1.0
            if DELTA:
                if BETA:
                    b = tl.load(beta_buffer + tile * C + j)
                x = tl.load(x_buffer + tile * (C * C) + i * C + j)
                z = tl.dot((-b * z).to(DT), x, z, input_precision=PRECISION)
            tl.store(z_buffer + tile * (C * VP) + j * VP + c, z.to(DT))
            ds = tl.dot(do, qg, ds, input_precision=PRECISION)
            if DELTA:
                kg = tl.load(kg_buffer + tile * (C * KP) + i * KP + d)
                ds = tl.dot((-b * z).to(DT), kg, ds, input_precision=PRECISION)
        if STATE:
            tl.store(dstate_ptr + ((sequence * HV + head) * K + d) * V + c, ds, mask=(d < K) & (c < V))
