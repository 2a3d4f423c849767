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
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

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
    ROWS,
    SHIFT,
    TILE,
    TOKEN,
    WIDE,
    as_fp32,
    begun,
    chunk_place,
    diagonal_blocks,
    fetch,
    fetch_part,
    flat,
    halves,
    inside_mask,
    inside_sums,
    narrow,
    near_start,
    over_block,
    over_chunk,
    over_gates,
    own_chunk,
    put_split,
    put_square,
    ready,
    right_by_block,
    row_parts,
    scaled,
    store_rows,
    through_norms,
    tiles_apart,
    tiles_at,
    widened,
)
from .backward_bounded import pairs_and_states
from .backward_early import await_states, early_tile
from .common import HALF, SQUARE, barrier, exp2, gate_slopes, given_rate, log2_gate, next_may_start, pinned
from .common import TILE as WHOLE

MET = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # [PART, 128]
LINE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
WEAKEST = gl.constexpr(-116.0)  # 2^-116: below, a gate lets nothing through, and its gradient is none


@gluon.jit
def _fetch_part(part, s_t, d_t, q_t, k_t, g_t, s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st, left):
    """Begin to copy the states' rows of some channels and their q, k and g; nothing behind the last part."""
    some = gl.where(part < PARTS, PART, 0)
    fetch(s_t.index(0), s_base + part * (PART * 128), 128, some, WIDE)
    fetch(d_t.index(0), d_base + part * (PART * 128), 128, some, WIDE)
    fetch_part(part, q_t, k_t, g_t, q_base, q_st, k_base, k_st, g_base, g_st, left)
    async_copy.commit_group()


@gluon.jit
def _between(high, low, q, k, to_q, to_start, to_end, met, dp_t, dl_t, lines, work, DELTA: gl.constexpr):
    """The pairs of different blocks and what the states give: dq, dk, and the gradients of the log gates by them."""
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
    dg = over_gates(spread, narrow(columns * ended), met * over_chunk(lines), work)
    return to_q * up, to_start * up + (ended + pairs) * down, dg


@gluon.jit
def _inside(high, low, dq, dk, dg, q, k, g, dp_own, dl_own, work, DELTA: gl.constexpr):
    """Add the pairs inside of blocks, a token with itself among them."""
    near, back = near_start(high, low, SHIFT)
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
    b, q_rate, k_rate, do_t, z_t, y_t, s_t, d_t, dp_t, dl_t, dp_own, dl_own, work, dq_to, dk_to, dg_to, dbias_to,
    s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st,
    HV, lines, FN: gl.constexpr, DELTA: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr,
    DBIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """dq and dk of some channels, before the norm, and dg; A_log's gradient, in parts. Fetches the next channels."""
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    d = part * PART + gl.arange(0, PART, layout=ACROSS)[None, :]
    live = i < left
    bias = 0.0
    if BIAS:
        bias = gl.load(dt_bias_ptr + head * 128 + d).to(gl.float32)
    rate = 1.0
    if RATE:
        rate = given_rate(gl.load(A_log_ptr + head), True)
    zero = part >> 30  # unknown to the compiler, see ``unknown_zero``
    work = tiles_at(work, zero, 3)
    high, low = halves(work)
    # dO S^T, Z S^T and Y dS'^T, while the gates are made.
    right = s_t.index(zero).permute((1, 0))
    to_q = begun(do_t.index(zero), right, HALF)
    to_start = to_q
    if DELTA:
        to_start = begun(z_t.index(zero), right, HALF)
    to_end = begun(y_t.index(zero), d_t.index(zero).permute((1, 0)), HALF)
    x = g_t.load(FLAT)
    g = gl.where(live, log2_gate(as_fp32(x) + bias, rate, gate_scale, FN), 0.0)
    put_split(high, low, g)
    met = gl.sum(widened(s_t.index(zero).load(MET)) * widened(d_t.index(zero).load(MET)), 1)
    met = gl.convert_layout(met, gl.SliceLayout(0, gl.SliceLayout(1, BATCH)))[None, None, :]
    q = as_fp32(q_t.load(FLAT)) * q_rate
    k = as_fp32(k_t.load(FLAT)) * k_rate
    if DELTA:
        to_q, to_start, to_end = warpgroup_mma_wait(0, [to_q, to_start, to_end])
    else:
        to_q, to_end = warpgroup_mma_wait(0, [to_q, to_end])
        to_start = gl.zeros([64, PART], gl.float32, layout=HALF)
    to_q, to_start = gl.convert_layout(to_q, FLAT), gl.convert_layout(to_start, FLAT)
    to_end = gl.convert_layout(to_end, FLAT) * b
    barrier()
    if BOUNDED:
        _fetch_part(
            part + 1, s_t, d_t, q_t, k_t, g_t, s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st, left
        )  # fmt: skip
        dq, dk, dg = pairs_and_states(
            high, low, q, k, to_q, to_start, to_end, met, b, scale, dp_t, dl_t, lines, work, DELTA
        )  # fmt: skip
    else:
        dq, dk, dg = _between(
            high, low, q, k, to_q * scale, to_start * -b, to_end, met, dp_t, dl_t, lines, work, DELTA
        )  # fmt: skip
        # Registers hold neither q and k beside the gradients: they are read again.
        barrier()
        put_split(high, low, gl.maximum(g, LIMIT))
        q = as_fp32(q_t.load(FLAT)) * q_rate
        k = as_fp32(k_t.load(FLAT)) * k_rate
        barrier()
        _fetch_part(
            part + 1, s_t, d_t, q_t, k_t, g_t, s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st, left
        )  # fmt: skip
        dq, dk, dg = _inside(high, low, dq, dk, dg, q, k, g, dp_own, dl_own, work, DELTA)
    by_x, by_rate = gate_slopes(as_fp32(x) + bias, rate, gate_scale, FN)
    counts = live & (dg != 0.0)
    dx = gl.where(counts, dg * by_x, 0.0)
    if DBIAS:
        gl.store(dbias_to + d, gl.sum(dx, 0)[None, :])
    if RATE:
        by_rates += row_parts(gl.where(counts, dg * by_rate, 0.0))
    barrier()
    work[0].store(narrow(dq))
    work[1].store(narrow(dk))
    if dg_to.dtype.element_ty == gl.bfloat16:
        work[2].store(narrow(dx))
    else:
        gl.store(dg_to + i * (HV * 128) + d, dx.to(dg_to.dtype.element_ty), mask=live)
    barrier()
    store_rows(dq_to + part * PART, work[0].load(ROWS), HV * 128, left)
    store_rows(dk_to + part * PART, work[1].load(ROWS), HV * 128, left)
    if dg_to.dtype.element_ty == gl.bfloat16:
        store_rows(dg_to + part * PART, work[2].load(ROWS), HV * 128, left)
    return by_rates


@gluon.jit(do_not_specialize=["T", "pitch", "N", "first_head"])
def gradients(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, v_ptr, v_sb, v_st, v_sh, g_ptr, g_sb, g_st, g_sh,
    do_ptr, do_sb, do_st, do_sh, A_log_ptr, dt_bias_ptr, cu_seqlens, chunk_offsets, N, T, pitch, scale, gate_scale,
    first_head, beta_buffer, rate_buffer, lines_buffer, s_buffer, d_buffer, y_buffer, z_buffer,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, dbias_ptr, drate_ptr, done_buffer,
    HV: gl.constexpr, HP: gl.constexpr, GROUP: gl.constexpr, FN: gl.constexpr, DELTA: gl.constexpr,
    BETA: gl.constexpr, SIGMOID: gl.constexpr, L2NORM: gl.constexpr, NORM_INSIDE: gl.constexpr, RATE: gl.constexpr,
    BIAS: gl.constexpr, DBIAS: gl.constexpr, PACKED: gl.constexpr, BOUNDED: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """All gradients of a chunk's tokens. NORM_INSIDE: dq and dk are those before the norm, of q and k as given.

    Rows of tensors are contiguous and begin at multiples of 16 bytes. Two blocks share a multiprocessor: what one waits
    for, the other's work hides. Without the delta rule y_buffer is not read: Y is v.
    """
    pid, chunk, head = own_chunk(first_head, HP)
    if EARLY != "":
        await_states(done_buffer, T, HP * 2, HP, EARLY)
        next_may_start()  # the first phase of other heads, or sums over chunks, once the scan is over
        pid, chunk, head = early_tile(T, first_head, HP, EARLY)
    runs = True
    if PACKED:
        runs = chunk < gl.load(chunk_offsets + N)
    if runs:
        batch, first, left = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED)
        do_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], WHOLE)
        y_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], WHOLE)
        q_t = gl.allocate_shared_memory(gl.bfloat16, [64, PART], NARROW)
        k_t = gl.allocate_shared_memory(gl.bfloat16, [64, PART], NARROW)
        g_t = gl.allocate_shared_memory(g_ptr.dtype.element_ty, [64, PART], NARROW)
        s_t = gl.allocate_shared_memory(gl.bfloat16, [1, PART, 128], WHOLE)
        d_t = gl.allocate_shared_memory(gl.bfloat16, [1, PART, 128], WHOLE)
        dp_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        z_t, dl_t = y_t, dp_t
        if DELTA:
            z_t = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 128], WHOLE)
            dl_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        work = tiles_apart(3, NARROW)
        lines = gl.allocate_shared_memory(gl.float32, [PARTS, 4, PART], LINES)
        dp_own, dl_own = dp_t, dl_t
        if not BOUNDED:
            dp_own = gl.allocate_shared_memory(gl.bfloat16, [64, 16], DIAGONAL)
            dl_own = dp_own
            if DELTA:
                dl_own = gl.allocate_shared_memory(gl.bfloat16, [64, 16], DIAGONAL)
        tile = pid * (64 * 128)
        fetch(do_t.index(0), do_ptr + batch * do_sb + first * do_st + head * do_sh, do_st, left, WIDE)
        if DELTA:
            fetch(z_t.index(0), z_buffer + tile, 128, 64, WIDE)
            fetch(y_t.index(0), y_buffer + tile, 128, 64, WIDE)
        else:
            fetch(y_t.index(0), v_ptr + batch * v_sb + first * v_st + head * v_sh, v_st, left, WIDE)
        async_copy.commit_group()
        s_base = s_buffer + pid * (128 * 128)
        d_base = d_buffer + pid * (128 * 128)
        q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
        k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
        g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
        flat_lines = lines._reinterpret(gl.float32, [4 * PARTS, PART], LINES)
        fetch(flat_lines, lines_buffer + pid * (4 * 128), PART, 4 * PARTS, LINE)
        _fetch_part(0, s_t, d_t, q_t, k_t, g_t, s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st, left)
        row = gl.arange(0, 64, layout=TOKEN)[:, None]
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
        i = gl.arange(0, 64, layout=DOWN)[:, None]
        j = gl.arange(0, 64, layout=ACROSS)[None, :]
        wide_b = gl.full([64], 1.0, gl.float32, layout=TOKEN)[:, None]
        b = gl.full([64], 1.0, gl.float32, layout=DOWN)[:, None]
        across_b = gl.full([64], 1.0, gl.float32, layout=ACROSS)[None, :]
        if BETA:
            wide_b = gl.load(beta_buffer + pid * 64 + row)
            b = gl.load(beta_buffer + pid * 64 + i)
            across_b = gl.load(beta_buffer + pid * 64 + j)
        q_rate = 1.0
        k_rate = 1.0
        if L2NORM:
            q_rate = gl.load(rate_buffer + pid * 128 + i)
            k_rate = gl.load(rate_buffer + pid * 128 + 64 + i)
        if not DELTA:
            z = gl.load(z_buffer + tile + row * 128 + column)
        async_copy.wait_group(1)
        ready()
        right = y_t.index(0).permute((1, 0))
        dp = begun(do_t.index(0), right, SQUARE)
        if DELTA:
            h = begun(z_t.index(0), right, SQUARE)
            z = z_t.index(0).load(WIDE)
        z = widened(z)
        token = (batch * pitch + first) * HV + head
        dv = (z * wide_b).to(dv_ptr.dtype.element_ty)
        gl.store(dv_ptr + token * 128 + row * (HV * 128) + column, dv, mask=row < left)
        if BETA:
            db = gl.sum(z * widened(y_t.index(0).load(WIDE)), 1)[:, None]
            if SIGMOID:
                db *= wide_b * (1.0 - wide_b)
            gl.store(dbeta_ptr + token + row * HV, db.to(dbeta_ptr.dtype.element_ty), mask=row < left)
        if DELTA:
            dp, h = warpgroup_mma_wait(0, [dp, h])
        else:
            dp = warpgroup_mma_wait(0, [dp])
        dp = gl.where(i >= j, gl.convert_layout(dp, FLAT) * (across_b * scale), 0.0)
        if BOUNDED:
            dp_t.store(dp.to(gl.bfloat16))
        else:
            put_square(dp_t, dp_own, dp, i, j)
        if DELTA:
            dl = gl.where(i > j, gl.convert_layout(h, FLAT) * (b * -across_b), 0.0)
            if BOUNDED:
                dl_t.store(dl.to(gl.bfloat16))
            else:
                put_square(dl_t, dl_own, dl, i, j)
        dq_base = dq_ptr + token * 128
        dk_base = dk_ptr + token * 128
        dbias_base = dbias_ptr + (chunk * HV + head) * 128
        by_rates = row_parts(gl.zeros([64, PART], gl.float32, layout=FLAT))
        for part in range(PARTS):
            async_copy.wait_group(0)
            ready()
            by_rates = _part(
                by_rates, pinned(part), q_t, k_t, g_t, A_log_ptr, dt_bias_ptr, head, left, scale, gate_scale, b, q_rate,
                k_rate, do_t, z_t, y_t, s_t, d_t, dp_t, dl_t, dp_own, dl_own, work, dq_base, dk_base,
                dg_ptr + token * 128, dbias_base, s_base, d_base, q_base, q_st, k_base, k_st, g_base, g_st,
                HV, lines.index(part), FN, DELTA, RATE, BIAS, DBIAS, BOUNDED,
            )  # fmt: skip
        async_copy.wait_group(0)
        if EARLY != "":  # registers do not hold them over the loop
            pid, chunk, head = early_tile(T, first_head, HP, EARLY)
        if NORM_INSIDE:
            barrier()  # these rows are in memory, and met there again
            rates = rate_buffer + pid * 128
            through_norms(dq_base, dk_base, HV * 128, q_base, q_st, k_base, k_st, rates, left)
        if RATE:
            gl.store(drate_ptr + chunk * HV + head, gl.sum(gl.sum(by_rates, 1), 0))
