"""Gluon: the gradients of a chunk's tokens with a gate per channel, K = V = 128, bf16 (see ``lowering/adjoint.py``).

A block has one chunk of one head, and takes a few channels at a time, so that registers hold them. Within the chunk it
goes by blocks of 16 tokens (``backward_blocks.py``). What the states give, ``dO S^T``, ``Z S^T`` and ``V' dS'^T``, is
where the sums over earlier and later blocks begin, so that decays over the whole chunk are never made.

The gradient of a log gate sums what its token's gate lies in between. Pairs are counted at their row, and taken off at
their column: both from the operands as they were rounded, so that what cancels in exact arithmetic cancels here as far
as fp32 goes. What comes from the state behind the chunk is summed over the tokens before, and nothing cancels.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .backward_blocks import (
    ACROSS,
    BATCH,
    DIAGONAL,
    DOWN,
    FLAT,
    LEFT,
    LIMIT,
    LINES,
    NARROW,
    PART,
    PARTS,
    RIGHT,
    SHIFT,
    TILE,
    TOKEN,
    WIDE,
    chunk_place,
    diagonal_blocks,
    flat,
    inside_mask,
    inside_sums,
    load_tile,
    narrow,
    over_block,
    over_chunk,
    over_gates,
    own_chunk,
    part_of,
    parts_of,
    product,
    put_parts,
    put_split,
    put_square,
    right_by_block,
    scaled,
    store_rows,
    tiles_apart,
    widened,
)
from .backward_bounded import pairs_and_states
from .common import barrier, exp2, gate_slopes, given_rate, log2_gate

MET = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))  # [PART, 128]
LINE = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))
WEAKEST = gl.constexpr(-116.0)  # 2^-116: below, a gate lets nothing through, and its gradient is none


@gluon.jit
def _fetch_states(s_t, d_t, s_buffer, d_buffer, state, part):
    """Begin to copy the states' rows of some channels; nothing behind the last part."""
    row = gl.arange(0, PART, layout=TOKEN)[:, None]
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    at = state + gl.minimum(part, PARTS - 1) * (PART * 128) + row * 128 + column
    wanted = (row >= 0) & (column >= 0) & (part < PARTS)
    async_copy.async_copy_global_to_shared(s_t.index(part & 1), s_buffer + at, mask=wanted)
    async_copy.async_copy_global_to_shared(d_t.index(part & 1), d_buffer + at, mask=wanted)
    async_copy.commit_group()


@gluon.jit
def _fetch_lines(lines, base):
    """Begin to copy the decays over blocks."""
    flat = lines._reinterpret(gl.float32, [4 * PARTS, PART], LINES)
    row = gl.arange(0, 4 * PARTS, layout=gl.SliceLayout(1, LINE))[:, None]
    column = gl.arange(0, PART, layout=gl.SliceLayout(0, LINE))[None, :]
    async_copy.async_copy_global_to_shared(flat, base + row * PART + column)


@gluon.jit
def _states(do_t, z_t, vn_t, s_t, d_t, DELTA: gl.constexpr):
    """scale dO S^T, -b Z S^T, V' dS'^T for some channels, and the rows of S * dS' as a line."""
    to_q = gl.zeros([64, PART], gl.float32, layout=FLAT)
    to_start = to_q
    to_end = to_q
    for at in gl.static_range(0, 128, 32):
        right = s_t.slice(at, 32, 1).permute((1, 0)).load(RIGHT)
        to_q = mma_v2(do_t.slice(at, 32, 1).load(LEFT), right, to_q)
        if DELTA:
            to_start = mma_v2(z_t.slice(at, 32, 1).load(LEFT), right, to_start)
        right = d_t.slice(at, 32, 1).permute((1, 0)).load(RIGHT)
        to_end = mma_v2(vn_t.slice(at, 32, 1).load(LEFT), right, to_end)
    met = gl.sum(widened(s_t.load(MET)) * widened(d_t.load(MET)), 1)
    return to_q, to_start, to_end, met


@gluon.jit
def _between(q, k, g, to_q, to_start, to_end, met, dp_t, dl_t, later_t, lines, work, DELTA: gl.constexpr):
    """The pairs of different blocks and what the states give: dq, dk, and the gradients of the log gates by them."""
    high = work[0]._reinterpret(gl.float16, [64, PART], NARROW)
    low = work[1]._reinterpret(gl.float16, [64, PART], NARROW)
    put_split(high, low, g)
    up = exp2(inside_sums(inside_mask("until", gl.float16), high, low))
    down = exp2(inside_sums(inside_mask("after", gl.float16), high, low))
    barrier()
    work[0].store(narrow(q * up))
    work[1].store(narrow(k * up))
    work[2].store(narrow(k * down))
    for at in gl.static_range(3):
        decay = over_block(lines, at, "after")
        columns = work[2].slice(16 * at, 16, 0).load(RIGHT)
        to_q = mma_v2(dp_t.slice(16 * at, 16, 1).load(LEFT), columns, scaled(to_q, decay))
        if DELTA:
            to_start = mma_v2(dl_t.slice(16 * at, 16, 1).load(LEFT), columns, scaled(to_start, decay))
    ended = to_end
    pairs = gl.zeros([64, PART], gl.float32, layout=FLAT)
    for at in gl.static_range(3, 0, -1):
        decay = over_block(lines, at, "before")
        ended = scaled(ended, decay)
        rows = work[0].slice(16 * at, 16, 0).load(RIGHT)
        pairs = mma_v2(dp_t.slice(16 * at, 16, 0).permute((1, 0)).load(LEFT), rows, scaled(pairs, decay))
        if DELTA:
            rows = work[1].slice(16 * at, 16, 0).load(RIGHT)
            pairs = mma_v2(dl_t.slice(16 * at, 16, 0).permute((1, 0)).load(LEFT), rows, pairs)
    columns = widened(work[2].load(FLAT))
    spread = widened(work[0].load(FLAT)) * to_q - columns * pairs
    if DELTA:
        spread += widened(work[1].load(FLAT)) * to_start
    dg = over_gates(spread, narrow(columns * ended), met * over_chunk(lines), later_t, work)
    return to_q * up, to_start * up + (ended + pairs) * down, dg


@gluon.jit
def _inside(dq, dk, dg, q, k, g, dp_own, dl_own, work, DELTA: gl.constexpr):
    """Add the pairs inside of blocks, a token with itself among them."""
    high = work[0]._reinterpret(gl.float16, [64, PART], NARROW)
    low = work[1]._reinterpret(gl.float16, [64, PART], NARROW)
    barrier()
    put_split(high, low, gl.maximum(g, LIMIT))
    within = inside_sums(inside_mask("until", gl.float16), high, low) + SHIFT
    near = exp2(within)
    back = exp2(-within)
    barrier()
    work[0].store(narrow(q * near))
    work[1].store(narrow(k * near))
    work[2].store(narrow(k * back))
    zero = gl.zeros([4, 16, PART], gl.float32, layout=BATCH)
    columns = right_by_block(work[2])
    to_q = flat(mma_v2(diagonal_blocks(dp_own, False), columns, zero))
    to_columns = mma_v2(diagonal_blocks(dp_own, True), right_by_block(work[0]), zero)
    spread = widened(work[0].load(FLAT)) * to_q
    dq += to_q * near
    if DELTA:
        to_rows = flat(mma_v2(diagonal_blocks(dl_own, False), columns, zero))
        to_columns = mma_v2(diagonal_blocks(dl_own, True), right_by_block(work[1]), to_columns)
        spread += widened(work[1].load(FLAT)) * to_rows
        dk += to_rows * near
    to_columns = flat(to_columns)
    dk += to_columns * back
    spread -= widened(work[2].load(FLAT)) * to_columns
    barrier()
    put_split(work[0], work[1], spread)
    inside = inside_sums(inside_mask("from", gl.bfloat16), work[0], work[1])
    return dq, dk, gl.where(g > WEAKEST, dg, 0.0) + gl.where(g > LIMIT, inside, 0.0)


@gluon.jit
def _part(
    by_rates, part, q_t, k_t, g_t, A_log_ptr, dt_bias_ptr, head, left, scale, gate_scale,
    b, q_rate, k_rate, do_t, z_t, vn_t, s_t, d_t, dp_t, dl_t, dp_own, dl_own, work, dg_to, dbias_to,
    HV, lines, later_t, FN: gl.constexpr, DELTA: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr,
    DBIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """dq and dk of some channels, before the norm; dg is stored. Also A_log's gradient, in parts."""
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    d = part * PART + gl.arange(0, PART, layout=ACROSS)[None, :]
    live = i < left
    bias = 0.0
    if BIAS:
        bias = gl.load(dt_bias_ptr + head * 128 + d).to(gl.float32)
    rate = 1.0
    if RATE:
        rate = given_rate(gl.load(A_log_ptr + head), True)
    to_q, to_start, to_end, met = _states(do_t, z_t, vn_t, s_t, d_t, DELTA)
    g = gl.where(live, log2_gate(part_of(g_t, part) + bias, rate, gate_scale, FN), 0.0)
    q = part_of(q_t, part) * q_rate
    k = part_of(k_t, part) * k_rate
    met = gl.convert_layout(met, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
    if BOUNDED:
        dq, dk, dg = pairs_and_states(
            q, k, g, to_q, to_start, to_end, met, b, scale, dp_t, dl_t, later_t, lines, work, DELTA
        )  # fmt: skip
    else:
        dq, dk, dg = _between(
            q, k, g, to_q * scale, to_start * -b, to_end, met, dp_t, dl_t, later_t, lines, work, DELTA
        )  # fmt: skip
        # Registers hold neither q and k nor the gates beside the gradients: they are read again.
        barrier()
        q = part_of(q_t, part) * q_rate
        k = part_of(k_t, part) * k_rate
        dq, dk, dg = _inside(dq, dk, dg, q, k, g, dp_own, dl_own, work, DELTA)
    barrier()
    by_x, by_rate = gate_slopes(part_of(g_t, part) + bias, rate, gate_scale, FN)
    counts = live & (dg != 0.0)
    dx = gl.where(counts, dg * by_x, 0.0)
    store_rows(dg_to, dx, HV * 128, left)
    if DBIAS:
        gl.store(dbias_to + d, gl.sum(dx, 0)[None, :])
    if RATE:
        by_rates += gl.where(counts, dg * by_rate, 0.0)
    return dq, dk, by_rates


@gluon.jit
def _through_norm(to, step, dy_t, x_t, rate, left):
    """Of ``y = r x``: ``r (dy - y (y . dy))``."""
    i = gl.arange(0, 64, layout=TOKEN)[:, None]
    rate = gl.load(rate + i)
    x = widened(parts_of(x_t))
    dy = widened(parts_of(dy_t))
    dx = rate * dy - rate * rate * rate * gl.sum(x * dy, 1)[:, None] * x
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    gl.store(to + i * step + column, dx.to(to.dtype.element_ty), mask=i < left)


@gluon.jit(do_not_specialize=["beta_sb", "beta_st", "T", "N", "first_head"])
def gradients(
    q_ptr, q_sb, q_st, q_sh, q_sd, k_ptr, k_sb, k_st, k_sh, k_sd, v_ptr, v_sb, v_st, v_sh, v_sd,
    g_ptr, g_sb, g_st, g_sh, g_sd, do_ptr, do_sb, do_st, do_sh, do_sd, A_log_ptr, dt_bias_ptr,
    cu_seqlens, chunk_offsets, N, T, scale, gate_scale, first_head,
    l_buffer, beta_buffer, rate_buffer, lines_buffer, s_buffer, d_buffer, r_buffer, vn_buffer, z_buffer,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dbias_ptr, drate_ptr,
    HV: gl.constexpr, HP: gl.constexpr, GROUP: gl.constexpr, FN: gl.constexpr, DELTA: gl.constexpr,
    BETA: gl.constexpr, SIGMOID: gl.constexpr, L2NORM: gl.constexpr, NORM_INSIDE: gl.constexpr, RATE: gl.constexpr,
    BIAS: gl.constexpr, DBIAS: gl.constexpr, PACKED: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """All gradients of a chunk's tokens. NORM_INSIDE: dq and dk are those before the norm, of q and k as given.

    Without the delta rule r_buffer and vn_buffer are not read: both are v, the latter times beta.
    """
    pid, chunk, head = own_chunk(first_head, HP)
    runs = True
    if PACKED:
        runs = chunk < gl.load(chunk_offsets + N)
    if runs:
        batch, first, left = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED)
        do_t = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
        z_t = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
        vn_t = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
        q_t = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, PART], NARROW)
        k_t = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, PART], NARROW)
        g_t = gl.allocate_shared_memory(g_ptr.dtype.element_ty, [PARTS, 64, PART], NARROW)
        s_t = gl.allocate_shared_memory(gl.bfloat16, [2, PART, 128], TILE)
        d_t = gl.allocate_shared_memory(gl.bfloat16, [2, PART, 128], TILE)
        dp_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        dl_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        work = tiles_apart(3)
        lines = gl.allocate_shared_memory(gl.float32, [PARTS, 4, PART], LINES)
        later_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        dp_own, dl_own = dp_t, dl_t
        if not BOUNDED:
            dp_own = gl.allocate_shared_memory(gl.bfloat16, [64, 16], DIAGONAL)
            dl_own = gl.allocate_shared_memory(gl.bfloat16, [64, 16], DIAGONAL)
        _fetch_lines(lines, lines_buffer + pid * (4 * 128))
        state = pid * (128 * 128)
        _fetch_states(s_t, d_t, s_buffer, d_buffer, state, 0)
        q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
        k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
        q = load_tile(q_base, q_st, q_sd, left)
        k = load_tile(k_base, k_st, k_sd, left)
        g = load_tile(g_ptr + batch * g_sb + first * g_st + head * g_sh, g_st, g_sd, left)
        row = gl.arange(0, 64, layout=TOKEN)[:, None]
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
        tile = pid * (64 * 128) + row * 128 + column
        do_base = do_ptr + batch * do_sb + first * do_st + head * do_sh
        do = gl.load(do_base + row * do_st + column * do_sd, mask=row < left, other=0.0)
        z = gl.load(z_buffer + tile)
        wide_b = gl.full([64], 1.0, gl.float32, layout=TOKEN)[:, None]
        b = gl.full([64], 1.0, gl.float32, layout=DOWN)[:, None]
        i = gl.arange(0, 64, layout=DOWN)[:, None]
        j = gl.arange(0, 64, layout=ACROSS)[None, :]
        if BETA:
            wide_b = gl.load(beta_buffer + pid * 64 + row)
            b = gl.load(beta_buffer + pid * 64 + i)
        if DELTA:
            r = widened(gl.load(r_buffer + tile))
            vn = gl.load(vn_buffer + tile)
        else:
            v_base = v_ptr + batch * v_sb + first * v_st + head * v_sh
            r = gl.load(v_base + row * v_st + column * v_sd, mask=row < left, other=0.0).to(gl.float32)
            vn = (r * wide_b).to(gl.bfloat16)
        q_rate = 1.0
        k_rate = 1.0
        if L2NORM:
            q_rate = gl.load(rate_buffer + pid * 128 + i)
            k_rate = gl.load(rate_buffer + pid * 128 + 64 + i)
        if BETA and DELTA:
            recall = gl.load(l_buffer + pid * (64 * 64) + i * 64 + j)
        put_parts(q_t, q)
        put_parts(k_t, k)
        put_parts(g_t, g)
        do_t.store(do.to(gl.bfloat16))
        vn_t.store(vn)
        if DELTA:
            z_t.store(z)
        z = widened(z)
        token = (batch * T + first) * HV + head
        dv = (z * wide_b).to(dv_ptr.dtype.element_ty)
        gl.store(dv_ptr + token * 128 + row * (HV * 128) + column, dv, mask=row < left)
        zero = gl.zeros([64, 64], gl.float32, layout=FLAT)
        dp = product(do_t, vn_t, zero, 128) * scale
        later_t.store(gl.where(j >= i, 1.0, 0.0).to(gl.bfloat16))
        dp = gl.where(i >= j, dp, 0.0)
        if BOUNDED:
            dp_t.store(dp.to(gl.bfloat16))
        else:
            put_square(dp_t, dp_own, dp, i, j)
        db = gl.sum(z * r, 1)
        if DELTA:
            h = product(z_t, vn_t, zero, 128)
            dl = gl.where(i > j, h * -b, 0.0)
            if BOUNDED:
                dl_t.store(dl.to(gl.bfloat16))
            else:
                put_square(dl_t, dl_own, dl, i, j)
            if BETA:
                recalled = gl.sum(recall.to(gl.float32) * h, 1)
                db -= gl.convert_layout(recalled, TOKEN)
        if BETA:
            db = db[:, None]
            if SIGMOID:
                db *= wide_b * (1.0 - wide_b)
            gl.store(dbeta_ptr + token + row * HV, db.to(dbeta_ptr.dtype.element_ty), mask=row < left)
        dg_base = dg_ptr + token * 128
        dbias_base = dbias_ptr + (chunk * HV + head) * 128
        dq_base = dq_ptr + token * 128
        dk_base = dk_ptr + token * 128
        if NORM_INSIDE:
            dq_t = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, PART], NARROW)
            dk_t = gl.allocate_shared_memory(gl.bfloat16, [PARTS, 64, PART], NARROW)
        by_rates = gl.zeros([64, PART], gl.float32, layout=FLAT)
        for part in range(PARTS):
            _fetch_states(s_t, d_t, s_buffer, d_buffer, state, part + 1)
            async_copy.wait_group(1)
            barrier()
            dq, dk, by_rates = _part(
                by_rates, part, q_t, k_t, g_t, A_log_ptr, dt_bias_ptr, head, left, scale, gate_scale, b, q_rate,
                k_rate, do_t, z_t, vn_t, s_t.index(part & 1), d_t.index(part & 1), dp_t, dl_t, dp_own, dl_own, work,
                dg_base + part * PART, dbias_base, HV, lines.index(part), later_t,
                FN, DELTA, RATE, BIAS, DBIAS, BOUNDED,
            )  # fmt: skip
            if NORM_INSIDE:
                dq_t.index(part).store(narrow(dq))
                dk_t.index(part).store(narrow(dk))
            else:
                store_rows(dq_base + part * PART, dq, HV * 128, left)
                store_rows(dk_base + part * PART, dk, HV * 128, left)
            barrier()
        async_copy.wait_group(0)
        if NORM_INSIDE:
            _through_norm(dq_base, HV * 128, dq_t, q_t, rate_buffer + pid * 128, left)
            _through_norm(dk_base, HV * 128, dk_t, k_t, rate_buffer + pid * 128 + 64, left)
        if RATE:
            gl.store(drate_ptr + chunk * HV + head, gl.sum(gl.sum(by_rates, 1), 0))
