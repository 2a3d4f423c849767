"""Gluon: everything of a chunk that does not read the state, for all chunks and heads at once (KDA, K <= 128).

With ``G_r`` the sum of a chunk's first r log2 gates, ``M = (I + A_kk)^-1 diag(beta)`` and the decayed Gram matrices of
``kdacompile.lowering.decay``, a chunk of 64 tokens leaves rows of WIDTH bf16 behind for the scan, K padded::

    rows   0.. 64   K_gated   = k * 2^G
    rows  64..128   Q_gated   = q * 2^G * scale
    rows 128..192   K_decayed = k * 2^(G_63 - G)
    rows 192..      M and A_qk: side by side where WIDTH is 128, one after the other where it is 64

and ``decay = 2^(G_63)`` in fp32; FOLDED, what :mod:`.fold` makes of them. A block is persistent and has four roles. One
warp loads and one announces (:mod:`.prepare_load`), eight *row* warps make everything that is one value a row and
channel, four *gram* warps make the [64, 64] matrices and invert.

Exponents. The Gram matrices need 2^(G_i - G_j), i >= j, as a product of a row's factor and a column's. Inside a half
of 32 tokens, with ``D`` the sum of gates from its start, that is 2^(D_i + s) times 2^(-D_j - s): where every gate is at
least -s / 16 both exponents lie in [-s, s], and s <= 122 keeps fp32 and bf16 finite. The shift is a constant: a
reference point among the tokens would let later gates change the rounding of earlier outputs. Between the halves the
column factor is 2^(D_31 - D_j) <= 1, and the 2^s that the row's factor brings is divided out of the product, exactly.
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
    HALF,
    LOG2E,
    SQUARE,
    TILE,
    add,
    barrier,
    exp2,
    next_may_start,
    nth_tile,
    over,
    own_tiles,
    pinned,
    put,
    reciprocal,
    rows_layout,
    rows_of,
    rows_within,
    sigmoid2,
    squares_rows,
    stores_done,
)
from .fold import leave_folded, put_end
from .inverse import factors_of, keep_steep, leave_inverse, scaled_back, unknown_zero
from .norms import keep_line, leave_squares, row_factor, squares_buffer, squares_of
from .prepare_load import ANNOUNCE_REGISTERS, LOAD_REGISTERS, announce_warp, header, header_buffers, load_warp


@gluon.jit
def _sum_before(sums, group, LINE: gl.constexpr):
    """Of each warp's tokens the gates before them in their half, and the sums of the two halves."""
    s0 = gl.expand_dims(sums.slice(0, 1, 0).load(LINE), 1)
    s1 = s0 + gl.expand_dims(sums.slice(1, 1, 0).load(LINE), 1)
    s2 = s1 + gl.expand_dims(sums.slice(2, 1, 0).load(LINE), 1)
    s3 = s2 + gl.expand_dims(sums.slice(3, 1, 0).load(LINE), 1)
    s4 = gl.expand_dims(sums.slice(4, 1, 0).load(LINE), 1)
    s5 = s4 + gl.expand_dims(sums.slice(5, 1, 0).load(LINE), 1)
    s6 = s5 + gl.expand_dims(sums.slice(6, 1, 0).load(LINE), 1)
    s7 = s6 + gl.expand_dims(sums.slice(7, 1, 0).load(LINE), 1)
    low = group < 4
    place = group & 3
    early = gl.where(place < 1, 0.0, gl.where(low, s0, s4))
    late = gl.where(place < 3, gl.where(low, s1, s5), gl.where(low, s2, s6))
    return gl.where(place < 2, early, late), s3, s7


@gluon.jit
def _row_warps(
    buffer, decay, HV, first, places, begin, total, rounds, early, scale, eps, bound, shift, unshift,
    inputs, gates, biases, numbers, rows, columns, end, norms, sums, k_squares, q_squares, full, full_gates,
    inputs_free, ready, free, end_free, end_ready, PACKED: gl.constexpr, RAW: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = inputs.shape[2]
    ROWS: gl.constexpr = rows_layout(WIDTH)
    LINE: gl.constexpr = gl.SliceLayout(1, ROWS)
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINE))
    to = (group.to(gl.int64) * 8 + row.to(gl.int64)) * WIDTH + column[None, None, :].to(gl.int64)
    low = group < 4
    block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
    for it in range(count):
        c = nth_tile(it, begin, total, block, step, rounds, early)
        stage = it & 1
        mbarrier.wait(full_gates.index(stage), (it >> 1) & 1)
        bias, rate, left = header(biases, numbers, stage, LINE)
        live = group * 8 + row < left
        x = rows_of(gates.index(stage)) * rate + bias
        g = sigmoid2(x) * gl.where(live, bound, 0.0)
        if PACKED:
            g = gl.where(live, g, 0.0)
        within = gl.associative_scan(g, 1, add)
        sums.store(gl.sum(g, 1))
        k_tile = inputs.index(2 * stage)
        q_tile = inputs.index(2 * stage + 1)
        mbarrier.wait(full.index(stage), (it >> 1) & 1)
        leave_squares(k_tile, k_squares)
        leave_squares(q_tile, q_squares)
        barrier()
        k_square = squares_of(k_squares, live, ROWS, PACKED)
        q_square = squares_of(q_squares, live, ROWS, PACKED)
        k_norm = row_factor(k_square, eps, RAW)
        q_norm = row_factor(q_square, eps, RAW)
        if RAW:
            keep_line(norms.index(2 * (it & 3)), k_square)
            keep_line(norms.index(2 * (it & 3) + 1), q_square)
        else:
            q_norm *= scale
        out = buffer + c.to(gl.int64) * ((192 + squares_rows(WIDTH)) * WIDTH)
        out_decay = decay + c.to(gl.int64) * WIDTH
        before, half0, half1 = _sum_before(sums, group, LINE)
        D = within + (before + shift)
        decay0 = exp2(half0)
        decay1 = exp2(half1)
        start = gl.where(low, 1.0, decay0)
        gl.store(out_decay + column[None, None, :], decay0 * decay1)
        up = exp2(D)
        # q and k are read again: registers hold neither of them beside the gates.
        q = rows_within(q_tile, live, PACKED) * q_norm * up
        mbarrier.wait(free, (it & 1) ^ 1)
        put(rows.index(1), q)
        q *= unshift * start
        if RAW:
            q *= over(q_norm) * scale
        gl.store(out + 64 * WIDTH + to, q.to(gl.bfloat16))
        k = rows_within(k_tile, live, PACKED) * k_norm
        k_up = k * up
        put(rows.index(0), k_up)
        k_gated = k_up * (unshift * start)
        if RAW:
            k_gated *= over(k_norm)
        if FOLDED:
            k_gated = -k_gated
        gl.store(out + to, k_gated.to(gl.bfloat16))
        k_down = k * reciprocal(up)
        put(columns.index(0), k_down)
        k_end = k_down * exp2(gl.where(low, half0, half1) + shift)
        put(columns.index(1), k_end)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready, count=1)
        mbarrier.arrive(inputs_free.index(stage), count=1)
        k_end *= gl.where(low, decay1, 1.0)
        if FOLDED:
            put_end(end, end_free, end_ready, it, k_end)
        else:
            if RAW:
                k_end *= over(k_norm)
            gl.store(out + 128 * WIDTH + to, k_end.to(gl.bfloat16))
    # Once more: the gram warps say of every tile when all of it is in memory, after the next one was ready.
    barrier()
    mbarrier.wait(free, (count & 1) ^ 1)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _gram(x, columns, zero):
    """x [64, WIDTH] times every column's factor: inside the halves [64, 64], across them [64, 32]."""
    same = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    cross = gl.zeros([64, 32], gl.float32, layout=HALF)
    same = warpgroup_mma(x, columns.index(zero).permute((1, 0)), same, use_acc=False, is_async=True)
    first = columns.index(zero + 1).slice(0, 32, 0)
    cross = warpgroup_mma(x, first.permute((1, 0)), cross, use_acc=False, is_async=True)
    return same, cross


@gluon.jit
def _select(same, cross, i, j, unshift):
    """The Gram matrix where i >= j; by selection, since above the diagonal ``same`` may be infinite."""
    cross = cross * unshift
    cross = gl.reshape(gl.permute(gl.join(cross, cross), (0, 2, 1)), [64, 64])
    return gl.where(((i >> 5) == 0) | (j >= 32), same, gl.convert_layout(cross, SQUARE))


@gluon.jit
def _gram_warps(
    d_out, HV, first, places, begin, total, rounds, early, scale, unshift,
    rows, columns, end, betas, norms, tiles, ready, free, written, end_free, end_ready,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr, CHECKED: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = rows.shape[2]
    SQUARES: gl.constexpr = squares_rows(WIDTH)
    qk_out = tiles.index(4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=gl.SliceLayout(1, SQUARE))
    j0 = gl.arange(0, 64, layout=gl.SliceLayout(0, SQUARE))
    block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
    for it in range(count):
        c = nth_tile(it, begin, total, block, step, rounds, early)
        row = c * (192 + SQUARES) + 192
        i = pinned(i0)[:, None]
        j = j0[None, :]
        zero = unknown_zero(it)
        mbarrier.wait(ready, it & 1)
        k_same, k_cross = _gram(rows.index(zero), columns, zero)
        q_same, q_cross = _gram(rows.index(zero + 1), columns, zero)
        beta, k_squares, q_squares = betas.index(it & 3), norms.index(2 * (it & 3)), norms.index(2 * (it & 3) + 1)
        beta_i, steep = factors_of(beta, k_squares, RAW, CHECKED)
        stores_done(READY)
        barrier()
        if READY:
            mbarrier.arrive(written.index((it + 3) & 3), count=1, pred=it > 0)
        if FOLDED:
            mbarrier.arrive(end_free, count=1, pred=it > 0)
        if CHECKED:
            k_same, k_cross, q_same, q_cross = warpgroup_mma_wait(0, [k_same, k_cross, q_same, q_cross])
        else:
            k_same, k_cross = warpgroup_mma_wait(2, [k_same, k_cross])
        A = gl.where(i > j, _select(k_same, k_cross, i, j, unshift) * beta_i[:, None], 0.0)
        tiles.index(0).store(A.to(gl.float16))
        if not CHECKED:
            q_same, q_cross = warpgroup_mma_wait(0, [q_same, q_cross])
        qk = scaled_back(_select(q_same, q_cross, i, j, unshift), k_squares, q_squares, scale, RAW, FOLDED)
        qk_out.store(gl.where(i >= j, qk, 0.0).to(gl.bfloat16))
        if CHECKED:
            keep_steep(A, i, steep, tiles)
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        if not FOLDED:
            tma.async_copy_shared_to_global(d_out, [row + SQUARES - 64, WIDTH - 64], qk_out)
        leave_inverse(
            z, i, j, beta, k_squares, steep, tiles, zero, d_out, row, CHECKED, RAW, FOLDED=FOLDED
        )  # fmt: skip
        if FOLDED:
            leave_folded(tiles, zero, end, end_ready, it, d_out, row)
    stores_done(READY)
    if READY:
        mbarrier.wait(ready, count & 1)
        barrier()
        mbarrier.arrive(written.index((count + 3) & 3), count=1, pred=count > 0)


@gluon.jit(
    do_not_specialize=["T", "batch", "first", "begin", "total", "rounds", "early"]
)  # they change from run to run
def prepare(
    d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, buffer, d_out, decay, announced,
    T, K, HV, GROUP, batch, first, begin, total, rounds, early, scale, eps, bound, shift, unshift,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr, GRAM_REGISTERS: gl.constexpr, WIDTH: gl.constexpr,
    FOLDED: gl.constexpr,
):  # fmt: skip
    """Chunks ``first .. first + chunks`` of every batch entry and value head: ``total`` tiles; those from ``begin`` on.

    d_q, d_k, d_g: ``[B, T, heads, K]``, blocks ``[1, 64, 1, WIDTH]``: what is beyond K is zero. bound: lower bound on a
    gate, in powers of two. shift: at least 16 * -bound, an integer; unshift = 2^-shift. PACKED: ``places`` has the
    chunks of all sequences, see ``packing.py``.
    """
    inputs = gl.allocate_shared_memory(gl.bfloat16, [4, 64, WIDTH], TILE)
    gates = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], TILE)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], TILE)
    columns = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [5, 64, 64], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [8, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k_squares = squares_buffer(WIDTH)
    q_squares = squares_buffer(WIDTH)
    biases, numbers, betas = header_buffers(WIDTH)
    norms = gl.allocate_shared_memory(gl.float32, [8, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # squared, if RAW
    CHECKED: gl.constexpr = RAW or (HAS_BETA and not SIGMOID_BETA)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_gates = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    inputs_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    end = gl.allocate_shared_memory(gl.bfloat16, [64 if FOLDED else 8, WIDTH], TILE)
    end_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    end_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(full_gates.index(s), count=2)
        mbarrier.init(inputs_free.index(s), count=1)
    for s in gl.static_range(4):
        mbarrier.init(written.index(s), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    mbarrier.init(end_free, count=1)
    mbarrier.init(end_ready, count=1)
    fence_async_shared()
    barrier()
    next_may_start()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_row_warps, (
                buffer, decay, HV, first, places, begin, total, rounds, early, scale, eps, bound, shift, unshift,
                inputs, gates, biases, numbers, rows, columns, end, norms, sums, k_squares, q_squares, full, full_gates,
                inputs_free, ready, free, end_free, end_ready, PACKED, RAW, FOLDED,
            )),
            (_gram_warps, (
                d_out, HV, first, places, begin, total, rounds, early, scale, unshift,
                rows, columns, end, betas, norms, tiles, ready, free, written, end_free, end_ready,
                PACKED, READY, RAW, CHECKED, FOLDED,
            )),
            (load_warp, (
                d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places,
                T, K, HV, GROUP, batch, first, begin, total, rounds, early,
                inputs, gates, biases, numbers, betas, full, full_gates, inputs_free, inputs_free,
                HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA, PACKED, LOG2E,
            )),
            (announce_warp, (announced, written, HV, first, places, begin, total, rounds, early, PACKED, READY)),
        ],
        [4, 1, 1], [GRAM_REGISTERS, LOAD_REGISTERS, ANNOUNCE_REGISTERS],
    )  # fmt: skip
