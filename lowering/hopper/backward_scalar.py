"""Gluon: the chunks' own phases of the backward pass with a gate per token or head, or none (bf16, K = 128).

Then gates and norms are numbers of a token: the scan and the gradients take q and k as they are and scale rows of what
meets them, and decays between two tokens are one [64, 64] matrix, ``2^(G_i - G_j)``, G the sums of log2 gates. What a
chunk leaves for the others are P and L (see ``lowering/adjoint.py``), G, beta behind its sigmoid and the norms' rates.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from .backward_blocks import (
    SLIM,
    WIDE,
    begun,
    chunk_place,
    fetch,
    leave,
    narrow,
    own_chunk,
    ready,
    row_parts,
    store_rows,
    through_norms,
    widened,
)
from .backward_early import await_states, early_tile, nothing_done, outlast_the_scan
from .backward_halves import fetch_keys, fetch_states, held_halves, written_halves
from .backward_pairs import ROW, row_rates
from .common import ACROSS, DOWN, SQUARE, TILE, barrier, exp2, gate_slopes, given_beta, given_rate, log2_gate
from .inverse import solved


@gluon.jit
def _gates(g_ptr, g_st, A_log_ptr, dt_bias_ptr, head, token, left, RATE: gl.constexpr, BIAS: gl.constexpr):
    """What the gate function takes: g with dt_bias added, and exp(A_log)."""
    x = gl.load(g_ptr + token * g_st, mask=token < left, other=0.0).to(gl.float32)
    rate = 1.0
    if RATE:
        rate = given_rate(gl.load(A_log_ptr + head), True)
    if BIAS:
        x += gl.load(dt_bias_ptr + head).to(gl.float32)
    return x, rate


@gluon.jit(do_not_specialize=["beta_sb", "beta_st", "T", "N", "first_head"])
def prepare_scalar(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, g_ptr, g_sb, g_st, g_sh,
    beta_ptr, beta_sb, beta_st, beta_sh, A_log_ptr, dt_bias_ptr, cu_seqlens, chunk_offsets, N, T,
    gate_scale, l2norm_eps, first_head, p_buffer, l_buffer, a_buffer, x_buffer, sums_buffer, beta_buffer,
    rate_buffer, done_buffer,
    HP: gl.constexpr, GROUP: gl.constexpr, FN: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr,
    BETA: gl.constexpr, SIGMOID: gl.constexpr, L2NORM: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr,
    PACKED: gl.constexpr, SOLVED: gl.constexpr, EARLY: gl.constexpr, BESIDE: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """A block has one chunk of one head. q and k have contiguous rows that begin at multiples of 16 bytes.

    SOLVED: as in ``backward_prepare.py``. Without PAIRS q is not read, and P is left to the scan.
    """
    pid, chunk, head = own_chunk(first_head, HP)
    if EARLY != "":
        nothing_done(done_buffer, pid, T)
    runs = True
    if PACKED:
        runs = chunk < gl.load(chunk_offsets + N)
    if runs:
        batch, first, left = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED)
        both = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
        tiles = both._reinterpret(gl.float16, [4, 64, 64], TILE)
        p_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        q_t = both.index(0)
        k_t = both.index(1)
        if PAIRS:
            fetch(q_t, q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh, q_st, left, WIDE)
        fetch(k_t, k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh, k_st, left, WIDE)
        async_copy.commit_group()
        row = gl.arange(0, 64, layout=DOWN)
        column = gl.arange(0, 64, layout=ACROSS)
        i = row[:, None]
        j = column[None, :]
        if BETA:
            at = beta_ptr + batch * beta_sb + (first + row) * beta_st + head * beta_sh
            b = given_beta(gl.load(at, mask=row < left, other=0.0), row, left, SIGMOID)
            gl.store(beta_buffer + pid * 64 + row, b)
        if GATED:
            g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
            x, rate = _gates(g_base, g_st, A_log_ptr, dt_bias_ptr, head, column, left, RATE, BIAS)
            g = gl.where(column < left, log2_gate(x, rate, gate_scale, FN), 0.0)
            sums = gl.sum(gl.where(j <= i, g[None, :], 0.0), 1)
            gl.store(sums_buffer + pid * 64 + row, sums)
            decay = exp2(sums[:, None] - gl.convert_layout(sums, ACROSS)[None, :])
        async_copy.wait_group(0)
        ready()
        right = k_t.permute((1, 0))
        if PAIRS:
            p = begun(q_t, right, SQUARE)
        if DELTA:
            l = begun(k_t, right, SQUARE)
        if L2NORM:
            token = gl.arange(0, 64, layout=ROW)
            if PAIRS:
                q_rate = row_rates(q_t, l2norm_eps)
                gl.store(rate_buffer + pid * 128 + token, q_rate)
            k_rate = row_rates(k_t, l2norm_eps)
            gl.store(rate_buffer + pid * 128 + 64 + token, k_rate)
            columns = gl.convert_layout(k_rate, ACROSS)[None, :]
        if PAIRS and DELTA:
            p, l = warpgroup_mma_wait(0, [p, l])
        elif DELTA:
            l = warpgroup_mma_wait(0, [l])
        else:
            p = warpgroup_mma_wait(0, [p])
        square = pid * (64 * 64)
        if PAIRS:
            if L2NORM:
                p = p * gl.convert_layout(q_rate, DOWN)[:, None] * columns
            if GATED:
                p = p * decay
            p_t.store(narrow(gl.where(i >= j, p, 0.0)))
        if DELTA:
            if L2NORM:
                l = l * gl.convert_layout(k_rate, DOWN)[:, None] * columns
            if GATED:
                l = l * decay
        barrier()  # P is there, and nobody reads q and k any more
        if PAIRS:
            leave(p_buffer + square, 64, p_t, 64, SLIM)
        if DELTA:
            l = gl.where(i > j, l, 0.0)
            if SOLVED:
                tiles.index(0).store(l.to(gl.float16))
                if GATED:
                    tiles.index(3)._reinterpret(gl.bfloat16, [64, 64], TILE).store(narrow(l))
                barrier()
                if GATED:
                    leave(l_buffer + square, 64, tiles.index(3)._reinterpret(gl.bfloat16, [64, 64], TILE), 64, SLIM)
                spare = p_t._reinterpret(gl.float16, [64, 64], TILE)
                x = solved(tiles, spare, beta_buffer + pid * 64, BETA, BETA and not SIGMOID)
                p_t.store(narrow(x))
                barrier()
                leave(x_buffer + square, 64, p_t, 64, SLIM)
            else:
                if GATED:
                    store_rows(l_buffer + square, l, 64, 64)
                store_rows(a_buffer + square, l, 64, 64)
    if BESIDE:
        outlast_the_scan(pid)


@gluon.jit
def _pairs(do_t, z_t, y_t, p_t, l_t, b, sums, scale, DELTA: gl.constexpr, GATED: gl.constexpr):
    """The gradients of P and L, behind their decays, over P and L; of dg what pairs give to their rows, in parts, and
    to their columns."""
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    j = gl.arange(0, 64, layout=ACROSS)[None, :]
    across_b = gl.convert_layout(b, ACROSS)[None, :]
    right = y_t.permute((1, 0))
    dp = begun(do_t, right, SQUARE)
    if DELTA:
        h = begun(z_t, right, SQUARE)
    met = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    decay = met + 1.0
    if GATED:
        decay = gl.where(i > j, exp2(sums[:, None] - gl.convert_layout(sums, ACROSS)[None, :]), 1.0)
    if DELTA:
        dp, h = warpgroup_mma_wait(0, [dp, h])
    else:
        dp = warpgroup_mma_wait(0, [dp])
    dp = gl.where(i >= j, dp * (across_b * scale), 0.0)
    if GATED:
        met = gl.where(i > j, dp * widened(p_t.load(SQUARE)), 0.0)
    p_t.store(narrow(dp * decay))
    if DELTA:
        dl = gl.where(i > j, h * (b[:, None] * -across_b), 0.0)
        if GATED:
            met += dl * widened(l_t.load(SQUARE))  # zeros from the diagonal on
        l_t.store(narrow(dl * decay))
    return row_parts(met), gl.sum(met, 0)


@gluon.jit(do_not_specialize=["T", "pitch", "N", "first_head"])
def gradients_scalar(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, v_ptr, v_sb, v_st, v_sh, g_ptr, g_sb, g_st, g_sh,
    do_ptr, do_sb, do_st, do_sh, A_log_ptr, dt_bias_ptr, cu_seqlens, chunk_offsets, N, T, pitch, scale, gate_scale,
    first_head, p_buffer, l_buffer, sums_buffer, beta_buffer, rate_buffer, s_buffer, d_buffer, y_buffer, z_buffer,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dbias_ptr, drate_ptr, done_buffer,
    HV: gl.constexpr, HP: gl.constexpr, GROUP: gl.constexpr, V: gl.constexpr, FN: gl.constexpr, GATED: gl.constexpr,
    DELTA: gl.constexpr, BETA: gl.constexpr, SIGMOID: gl.constexpr, L2NORM: gl.constexpr, RATE: gl.constexpr,
    BIAS: gl.constexpr, DBIAS: gl.constexpr, PACKED: gl.constexpr, NORM_INSIDE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """All gradients of a chunk's tokens. NORM_INSIDE: dq and dk are those before the norm. V is 64 or 128.

    Without the delta rule y_buffer is not read: Y is v.
    """
    HELD: gl.constexpr = NORM_INSIDE and not GATED
    VALUES: gl.constexpr = WIDE if V == 128 else SLIM
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    pid, chunk, head = own_chunk(first_head, HP)
    if EARLY != "":
        await_states(done_buffer, T, HP * (V // 64), HP, EARLY)
        pid, chunk, head = early_tile(T, first_head, HP, EARLY)
    runs = True
    if PACKED:
        runs = chunk < gl.load(chunk_offsets + N)
    if runs:
        batch, first, left = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED)
        do_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, V], TILE)
        y_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, V], TILE)
        z_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, V], TILE)
        s_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, V], TILE)
        d_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, V], TILE)
        q_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
        k_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
        p_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
        l_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
        tile = pid * (64 * V)
        square = pid * (64 * 64)
        v_base = v_ptr + batch * v_sb + first * v_st + head * v_sh
        fetch(do_t.index(0), do_ptr + batch * do_sb + first * do_st + head * do_sh, do_st, left, VALUES)
        fetch(z_t.index(0), z_buffer + tile, V, 64, VALUES)
        if DELTA:
            fetch(y_t.index(0), y_buffer + tile, V, 64, VALUES)
        else:
            fetch(y_t.index(0), v_base, v_st, left, VALUES)
        if GATED:
            if DELTA:
                fetch(l_t.index(0), l_buffer + square, 64, 64, SLIM)
            fetch(p_t.index(0), p_buffer + square, 64, 64, SLIM)
        async_copy.commit_group()
        q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
        k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
        s_state = s_buffer + pid * (128 * V)
        d_state = d_buffer + pid * (128 * V)
        fetch_states(0, s_t.index(0), d_t.index(0), s_state, d_state, VALUES)
        fetch_keys(0, q_t.index(0), k_t.index(0), q_base, q_st, k_base, k_st, left)
        row = gl.arange(0, 64, layout=DOWN)
        token = (batch * pitch + first) * HV + head
        b = gl.full([64], 1.0, gl.float32, layout=DOWN)
        q_rate = b
        k_rate = b
        sums = b * 0.0
        whole = sums
        place = gl.arange(0, 64, layout=ROW)
        wide_b = gl.full([64], 1.0, gl.float32, layout=ROW)
        if BETA:
            b = gl.load(beta_buffer + pid * 64 + row)
            wide_b = gl.load(beta_buffer + pid * 64 + place)
        if L2NORM:
            q_rate = gl.load(rate_buffer + pid * 128 + row)
            k_rate = gl.load(rate_buffer + pid * 128 + 64 + row)
        if GATED:
            sums = gl.load(sums_buffer + pid * 64 + row)
            whole = gl.load(sums_buffer + pid * 64 + 63 + 0 * row)
        c = gl.arange(0, V, layout=gl.SliceLayout(0, VALUES))[None, :]
        async_copy.wait_group(2)
        ready()
        z = z_t.index(0).load(VALUES).to(gl.float32)
        dv = (z * wide_b[:, None]).to(dv_ptr.dtype.element_ty)
        gl.store(dv_ptr + token * V + place[:, None] * (HV * V) + c, dv, mask=place[:, None] < left)
        if BETA:
            db = gl.sum(z * y_t.index(0).load(VALUES).to(gl.float32), 1)
            if SIGMOID:
                db *= wide_b * (1.0 - wide_b)
            gl.store(dbeta_ptr + token + place * HV, db.to(dbeta_ptr.dtype.element_ty), mask=place < left)
        behind, spanned = _pairs(
            do_t.index(0), z_t.index(0), y_t.index(0), p_t.index(0), l_t.index(0), b, sums, scale, DELTA, GATED
        )  # fmt: skip
        up = exp2(sums)
        down = exp2(whole - sums)
        before = behind * 0.0
        met = gl.sum(gl.reshape(gl.zeros([64, V], gl.float32, layout=VALUES), [64, V // 8, 8]), 2)
        if HELD:
            held_halves(
                do_t, z_t, y_t, s_t, d_t, q_t, k_t, p_t, l_t, s_state, d_state, q_base, q_st, k_base, k_st, left,
                dq_ptr + token * 128, dk_ptr + token * 128, HV * 128, b, up, down, q_rate, k_rate, scale, before,
                DELTA, VALUES,
            )  # fmt: skip
        else:
            behind, before, met = written_halves(
                do_t, z_t, y_t, s_t, d_t, q_t, k_t, p_t, l_t, s_state, d_state, q_base, q_st, k_base, k_st, left,
                dq_ptr + token * 128, dk_ptr + token * 128, HV * 128, b, up, down, q_rate, k_rate, scale, behind,
                before, met, DELTA, GATED, L2NORM, VALUES,
            )  # fmt: skip
        if EARLY != "":  # registers do not hold them over the loop
            pid, chunk, head = early_tile(T, first_head, HP, EARLY)
        if NORM_INSIDE and not HELD:  # these rows are in memory, and met there again
            to, rates = token * 128, rate_buffer + pid * 128
            through_norms(dq_ptr + to, dk_ptr + to, HV * 128, q_base, q_st, k_base, k_st, rates, left)
        if GATED:
            i = row[:, None]
            j = gl.arange(0, 64, layout=ACROSS)[None, :]
            behind = gl.convert_layout(gl.sum(behind, 1), ACROSS) - spanned
            before = gl.convert_layout(gl.sum(before, 1), ACROSS)
            dg = gl.sum(gl.where(j >= i, behind[None, :], before[None, :]), 1) + gl.sum(gl.sum(met, 1), 0) * exp2(whole)
            g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
            x, rate = _gates(g_base, g_st, A_log_ptr, dt_bias_ptr, head, row, left, RATE, BIAS)
            by_x, by_rate = gate_slopes(x, rate, gate_scale, FN)
            counts = (row < left) & (dg != 0.0)
            dx = gl.where(counts, dg * by_x, 0.0)
            gl.store(dg_ptr + token + row * HV, dx.to(dg_ptr.dtype.element_ty), mask=row < left)
            if DBIAS:
                gl.store(dbias_ptr + chunk * HV + head, gl.sum(dx, 0))
            if RATE:
                gl.store(drate_ptr + chunk * HV + head, gl.sum(gl.where(counts, dg * by_rate, 0.0), 0))
