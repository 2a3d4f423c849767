"""Gluon: what :mod:`.prepare` makes, for a gate per channel that nothing bounds (KDA, K <= 128).

The rows left for the scan are the same, and so are the roles of a block. Blocks of 16 tokens take the place of the
halves, in two levels. A row's factor in the Gram matrices is 2^(D_i + SHIFT), ``D`` the sum of gates from the start of
its block. A column of the same block has 2^(-D_j - SHIFT); there, and there only, a gate counts as at least -LEAST, so
that 16 of them stay in range: what such a gate leaves of a term, 2^-14, is far below what bf16 keeps of the others. A
column of an earlier block has 2^(the gates from j to the end of that block), times those of the blocks in between; no
exponent is positive and every gate counts in full. These columns are made once a distance: next block, next but one,
next but two. What multiplies the state has the exact exponents, so a gate of -1000 clears it.
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
    QUARTER,
    SQUARE,
    TILE,
    add,
    barrier,
    exp2,
    log2_gate,
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
    squares_rows,
    stores_done,
)
from .fold import leave_folded, put_end
from .inverse import factors_of, keep_steep, leave_inverse, scaled_back, unknown_zero
from .norms import keep_line, kept_line, leave_squares, row_factor, squares_buffer, squares_of
from .prepare_load import ANNOUNCE_REGISTERS, LOAD_REGISTERS, announce_warp, header, header_buffers, load_warp

LEAST = gl.constexpr(14.0)  # 16 of these and SHIFT leave factors between 2^-108 and 2^116: elements of q and k as
SHIFT = gl.constexpr(116.0)  # small as 2^-10, times these, are normal numbers in bf16
UNSHIFT = gl.constexpr(2.0**-116)


@gluon.jit
def _line(sums, m, LINE: gl.constexpr):
    return gl.expand_dims(sums.slice(m, 1, 0).load(LINE), 1)


@gluon.jit
def _of_block(block, b0, b1, b2, b3):
    return gl.where(block < 2, gl.where(block < 1, b0, b1), gl.where(block < 3, b2, b3))


@gluon.jit
def _sum_inside(sums, group, LINE: gl.constexpr):
    """Of each warp's 8 tokens the gates before them in their block."""
    early = _of_block(
        group >> 1, _line(sums, 0, LINE), _line(sums, 2, LINE), _line(sums, 4, LINE), _line(sums, 6, LINE)
    )  # fmt: skip
    return gl.where((group & 1) == 0, 0.0, early)


@gluon.jit
def _sums_around(sums, group, LINE: gl.constexpr):
    """Of each warp's 8 tokens: the gates before its block, of its block, of the next one and the next but one, of all
    blocks after it, and of the chunk."""
    b0 = _line(sums, 0, LINE) + _line(sums, 1, LINE)
    b1 = _line(sums, 2, LINE) + _line(sums, 3, LINE)
    b2 = _line(sums, 4, LINE) + _line(sums, 5, LINE)
    b3 = _line(sums, 6, LINE) + _line(sums, 7, LINE)
    b01, b23 = b0 + b1, b2 + b3
    block = group >> 1
    before = gl.where(block == 0, 0.0, _of_block(block, b0, b0, b01, b01 + b2))
    after = gl.where(block == 3, 0.0, _of_block(block, b1 + b23, b23, b3, b3))
    own = _of_block(block, b0, b1, b2, b3)
    near = _of_block(block, b1, b2, b3, b3)
    far = gl.where(block == 0, b2, b3)
    return before, own, near, far, after, b01 + b23


@gluon.jit
def _row_warps(
    buffer, decay, HV, first, places, begin, total, rounds, early, scale, eps, gate_scale,
    inputs, gates, biases, numbers, betas, rows, columns, end, norms, sums, k_squares, q_squares, full, full_gates,
    gates_free, ready, free, end_free, end_ready,
    FN: gl.constexpr, PACKED: gl.constexpr, RAW: gl.constexpr, DELTA: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = inputs.shape[2]
    GATES: gl.constexpr = gates.shape[0]
    ROWS: gl.constexpr = rows_layout(WIDTH)
    LINE: gl.constexpr = gl.SliceLayout(1, ROWS)
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LINE))
    to = (group.to(gl.int64) * 8 + row.to(gl.int64)) * WIDTH + column[None, None, :].to(gl.int64)
    block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
    for it in range(count):
        c = nth_tile(it, begin, total, block, step, rounds, early)
        stage = it & 1
        slot = it % GATES
        mbarrier.wait(full_gates.index(slot), (it // GATES) & 1)
        bias, rate, left = header(biases, numbers, stage, LINE)
        live = group * 8 + row < left
        x = rows_of(gates.index(slot)) + bias
        g = gl.where(live, log2_gate(x, rate, gate_scale, FN), 0.0)
        within = gl.associative_scan(g, 1, add)
        sums.index(0).store(gl.sum(g, 1))
        g = gl.maximum(g, -LEAST)
        D = gl.associative_scan(g, 1, add)
        sums.index(1).store(gl.sum(g, 1))
        k_tile = inputs.index(2 * stage)
        q_tile = inputs.index(2 * stage + 1)
        mbarrier.wait(full.index(stage), (it >> 1) & 1)
        if RAW:
            leave_squares(k_tile, k_squares)
            leave_squares(q_tile, q_squares)
        else:
            k = rows_within(k_tile, live, PACKED)
            k_norm = row_factor(gl.sum(k * k, 2), eps, RAW)[:, :, None]
            q = rows_within(q_tile, live, PACKED)
            q_norm = row_factor(gl.sum(q * q, 2), eps, RAW)[:, :, None] * scale
        barrier()
        mbarrier.arrive(gates_free.index(slot), count=1)
        if DELTA:
            out = buffer + c.to(gl.int64) * ((192 + squares_rows(WIDTH)) * WIDTH)
            out_q = out + 64 * WIDTH
            out_end = out + 128 * WIDTH
        else:
            out_q = buffer + c.to(gl.int64) * (128 * WIDTH + 64 * 64)
            out_end = out_q + 64 * WIDTH
        before, own, near, far, after, whole = _sums_around(sums.index(0), group, LINE)
        inside = _sum_inside(sums.index(0), group, LINE)
        gl.store(decay + c.to(gl.int64) * WIDTH + column[None, None, :], exp2(whole))
        up = exp2(D + (_sum_inside(sums.index(1), group, LINE) + SHIFT))
        # q and k are read again: registers hold neither of them beside the gates.
        if RAW:
            q_square = squares_of(q_squares, live, ROWS, PACKED)
            keep_line(norms.index(2 * (it & 3) + 1), q_square)
            q_norm = row_factor(q_square, eps, RAW)
        q = rows_within(q_tile, live, PACKED) * q_norm
        mbarrier.wait(free, (it & 1) ^ 1)
        put(rows.index(1 if DELTA else 0), q * up)
        q *= exp2(within + (inside + before))
        if RAW:
            q *= over(q_norm) * scale
        gl.store(out_q + to, q.to(gl.bfloat16))
        if RAW:
            k_square = squares_of(k_squares, live, ROWS, PACKED)
            keep_line(norms.index(2 * (it & 3)), k_square)
            k_norm = row_factor(k_square, eps, RAW)
        k = rows_within(k_tile, live, PACKED) * k_norm
        put(columns.index(0), k * reciprocal(up))
        if DELTA:
            put(rows.index(0), k * up)
            k_gated = k * exp2(within + (inside + before))
            if RAW:
                k_gated *= over(k_norm)
            if FOLDED:
                k_gated = -k_gated
            gl.store(out + to, k_gated.to(gl.bfloat16))
        k = k * exp2((own - inside) - within)
        put(columns.index(1), k)
        near = exp2(near)
        put(k_tile, k * near)
        put(q_tile, k * (near * exp2(far)))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready, count=1)
        k *= exp2(after)
        if FOLDED:
            put_end(end, end_free, end_ready, it, k)
        else:
            if RAW:
                k *= over(k_norm)
            if not DELTA:  # what is written is beta v
                k *= kept_line(betas.index(it & 3), ROWS)
            gl.store(out_end + to, k.to(gl.bfloat16))
    # Once more: the gram warps say of every tile when all of it is in memory, after the next one was ready.
    barrier()
    mbarrier.wait(free, (count & 1) ^ 1)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _gram(x, columns, zero, far, farther):
    """x [64, WIDTH] times the columns of the same block and of the blocks at distance 1, 2 and 3."""
    same = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    same = warpgroup_mma(x, columns.index(zero).permute((1, 0)), same, use_acc=False, is_async=True)
    one = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    one = warpgroup_mma(x, columns.index(zero + 1).permute((1, 0)), one, use_acc=False, is_async=True)
    two = gl.zeros([64, 32], gl.float32, layout=HALF)
    two = warpgroup_mma(x, far.slice(0, 32, 0).permute((1, 0)), two, use_acc=False, is_async=True)
    three = gl.zeros([64, 16], gl.float32, layout=QUARTER)
    three = warpgroup_mma(x, farther.slice(0, 16, 0).permute((1, 0)), three, use_acc=False, is_async=True)
    return same, one, two, three


@gluon.jit
def _twice(x, N: gl.constexpr):
    """x [64, N / 2] beside itself."""
    return gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), [64, N])


@gluon.jit
def _select(same, one, two, three, i, j):
    """The Gram matrix where i >= j; by selection, since above the diagonal ``same`` may be infinite."""
    distance = (i >> 4) - (j >> 4)
    two = gl.convert_layout(_twice(two, 64), SQUARE)
    three = gl.convert_layout(_twice(_twice(three, 32), 64), SQUARE)
    apart = gl.where(distance == 1, one, gl.where(distance == 2, two, three))
    return gl.where(distance == 0, same, apart * UNSHIFT)


@gluon.jit
def _gram_warps(
    d_out, HV, first, places, begin, total, rounds, early, scale,
    inputs, rows, columns, end, betas, norms, tiles, ready, free, inputs_free, written, end_free, end_ready,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr, CHECKED: gl.constexpr, DELTA: gl.constexpr,
    FOLDED: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = rows.shape[2]
    SQUARES: gl.constexpr = squares_rows(WIDTH)
    qk_out = tiles.index(4 if DELTA else 0)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=gl.SliceLayout(1, SQUARE))
    j0 = gl.arange(0, 64, layout=gl.SliceLayout(0, SQUARE))
    block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
    for it in range(count):
        c = nth_tile(it, begin, total, block, step, rounds, early)
        row = c * (192 + SQUARES) + 192 if DELTA else c * (2 * WIDTH + 64) + 2 * WIDTH
        i = pinned(i0)[:, None]
        j = j0[None, :]
        zero = unknown_zero(it)
        far = inputs.index(2 * (it & 1))
        farther = inputs.index(2 * (it & 1) + 1)
        mbarrier.wait(ready, it & 1)
        stores_done(READY)
        barrier()
        if READY:
            mbarrier.arrive(written.index((it + 3) & 3), count=1, pred=it > 0)
        if FOLDED:
            mbarrier.arrive(end_free, count=1, pred=it > 0)
        if DELTA:
            same, one, two, three = _gram(rows.index(zero), columns, zero, far, farther)
        beta, k_squares, q_squares = betas.index(it & 3), norms.index(2 * (it & 3)), norms.index(2 * (it & 3) + 1)
        beta_i, steep = factors_of(beta, k_squares, RAW, CHECKED)
        if DELTA:
            same, one, two, three = warpgroup_mma_wait(0, [same, one, two, three])
            A = gl.where(i > j, _select(same, one, two, three, i, j) * beta_i[:, None], 0.0)
            tiles.index(0).store(A.to(gl.float16))
            if CHECKED:
                keep_steep(A, i, steep, tiles)
                i += steep >> 9  # 0: masks do not outlive the branch, packed into registers bit by bit
        same, one, two, three = _gram(rows.index(zero + (1 if DELTA else 0)), columns, zero, far, farther)
        same, one, two, three = warpgroup_mma_wait(0, [same, one, two, three])
        qk = scaled_back(_select(same, one, two, three, i, j), k_squares, q_squares, scale, RAW, FOLDED)
        if not DELTA:
            qk = qk * beta.load(gl.SliceLayout(0, SQUARE))[None, :]
        qk_out.store(gl.where(i >= j, qk, 0.0).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        mbarrier.arrive(inputs_free.index(it & 1), count=1)
        if DELTA:
            if not FOLDED:
                tma.async_copy_shared_to_global(d_out, [row + SQUARES - 64, WIDTH - 64], qk_out)
            leave_inverse(
                z, i, j, beta, k_squares, steep, tiles, zero, d_out, row, CHECKED, RAW, FOLDED=FOLDED
            )  # fmt: skip
            if FOLDED:
                leave_folded(tiles, zero, end, end_ready, it, d_out, row)
        else:
            tma.async_copy_shared_to_global(d_out, [row, 0], qk_out)
    stores_done(READY)
    if READY:
        mbarrier.wait(ready, count & 1)
        barrier()
        mbarrier.arrive(written.index((count + 3) & 3), count=1, pred=count > 0)


@gluon.jit(
    do_not_specialize=["T", "batch", "first", "begin", "total", "rounds", "early"]
)  # they change from run to run
def prepare_unbounded(
    d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, buffer, d_out, decay, announced,
    T, K, HV, GROUP, batch, first, begin, total, rounds, early, scale, eps, gate_scale,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr, DELTA: gl.constexpr, GRAM_REGISTERS: gl.constexpr,
    WIDTH: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """As :func:`.prepare.prepare`; d_g in bf16 or fp32, before the gate function FN with ``gate_scale``.

    Without the delta rule what is left is Q_gated, beta times K_decayed, and A_qk diag(beta) in 64 rows of 64; d_out
    then describes the buffer as rows of 64.
    """
    CHECKED: gl.constexpr = DELTA and (RAW or (HAS_BETA and not SIGMOID_BETA))
    inputs = gl.allocate_shared_memory(gl.bfloat16, [4, 64, WIDTH], TILE)
    BITS: gl.constexpr = d_g.dtype.primitive_bitwidth
    GATES: gl.constexpr = 32 // BITS  # tiles of them that there is room for
    gates = gl.allocate_shared_memory(d_g.dtype, [GATES, 64, WIDTH], gl.NVMMASharedLayout(128, BITS, 2))
    rows = gl.allocate_shared_memory(gl.bfloat16, [2 if DELTA else 1, 64, WIDTH], TILE)
    columns = gl.allocate_shared_memory(gl.bfloat16, [2, 64, WIDTH], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [5 if DELTA else 1, 64, 64], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [2, 8, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k_squares = squares_buffer(WIDTH)
    q_squares = squares_buffer(WIDTH)
    biases, numbers, betas = header_buffers(WIDTH)
    norms = gl.allocate_shared_memory(gl.float32, [8, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # squared, if RAW
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full_gates = gl.allocate_shared_memory(gl.int64, [GATES, 1], mbarrier.MBarrierLayout())
    gates_free = gl.allocate_shared_memory(gl.int64, [GATES, 1], mbarrier.MBarrierLayout())
    inputs_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    written = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    end = gl.allocate_shared_memory(gl.bfloat16, [64 if FOLDED else 8, WIDTH], TILE)
    end_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    end_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(inputs_free.index(s), count=1)
    for s in gl.static_range(4):
        mbarrier.init(written.index(s), count=1)
    for s in gl.static_range(GATES):
        mbarrier.init(full_gates.index(s), count=2)
        mbarrier.init(gates_free.index(s), count=1)
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
                buffer, decay, HV, first, places, begin, total, rounds, early, scale, eps, gate_scale,
                inputs, gates, biases, numbers, betas, rows, columns, end, norms, sums, k_squares, q_squares, full,
                full_gates, gates_free, ready, free, end_free, end_ready, FN, PACKED, RAW, DELTA, FOLDED,
            )),
            (_gram_warps, (
                d_out, HV, first, places, begin, total, rounds, early, scale,
                inputs, rows, columns, end, betas, norms, tiles, ready, free, inputs_free, written, end_free, end_ready,
                PACKED, READY, RAW, CHECKED, DELTA, FOLDED,
            )),
            (load_warp, (
                d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places,
                T, K, HV, GROUP, batch, first, begin, total, rounds, early,
                inputs, gates, biases, numbers, betas, full, full_gates, inputs_free, gates_free,
                HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA, PACKED, 0,
            )),
            (announce_warp, (announced, written, HV, first, places, begin, total, rounds, early, PACKED, READY)),
        ],
        [4, 1, 1], [GRAM_REGISTERS, LOAD_REGISTERS, ANNOUNCE_REGISTERS],
    )  # fmt: skip
