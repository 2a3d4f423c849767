"""Gluon: the states forward and their gradients in reverse, in one launch (bf16, K = 128, chunks of 64).

As ``lowering/triton/backward_scan.py``: neither direction reads the other, so they are the two halves of the grid, and
a block has BLOCK columns of V of one head of one sequence. What the next chunks need is under way while one is worked
on. The state is in the accumulators, its 16-bit copy in shared memory, where the products and its way to memory begin.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .backward_blocks import begun, fetch, leave, ready
from .backward_early import rounds_of, say_done
from .common import TILE, exp2, next_may_start, previous_is_over


@gluon.constexpr_function
def products_of(columns):
    """The layout of [64 or 128, columns]; eight warps for 64 columns of V, four for fewer."""
    return gl.NVMMADistributedLayout([3, 0], [4, max(columns // 32, 1)], [16, min(columns, 32), 16])


@gluon.constexpr_function
def tile_of(columns):
    return gl.NVMMASharedLayout(2 * columns, 16, 2)


@gluon.constexpr_function
def rows_of(width, columns):
    """How [rows, width] meets memory."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [max(columns // 8, 4), 1], [1, 0])


@gluon.constexpr_function
def line_of(columns):
    return gl.BlockedLayout([1], [32], [max(columns // 8, 4)], [0])


@gluon.jit
def _state(base, st_k, st_v, column, HAS: gl.constexpr, BLOCK: gl.constexpr):
    FLAT: gl.constexpr = products_of(BLOCK)
    d = gl.arange(0, 128, layout=gl.SliceLayout(1, FLAT))[:, None]
    c = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, FLAT))[None, :]
    s = gl.zeros([128, BLOCK], gl.float32, layout=FLAT)
    if HAS:
        s += gl.load(base + d * st_k + c * st_v).to(gl.float32)
    return s


@gluon.jit
def _leave_state(base, step, s):
    FLAT: gl.constexpr = products_of(s.shape[1])
    d = gl.arange(0, 128, layout=gl.SliceLayout(1, FLAT))[:, None]
    c = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, FLAT))[None, :]
    gl.store(base + d * step + c, s)


@gluon.jit
def _line_tiles(STAGES: gl.constexpr):
    """Of a chunk's tokens beta; sums of gates, or the chunk's decay by channels; rates of q and k."""
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    beta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], one)
    gates_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], one)
    rates_s = gl.allocate_shared_memory(gl.float32, [STAGES, 128], one)
    return beta_s, gates_s, rates_s


@gluon.jit
def _fetch_line(to, base, some, BLOCK: gl.constexpr):
    COUNT: gl.constexpr = to.shape[0]
    i = gl.arange(0, COUNT, layout=line_of(BLOCK))
    async_copy.async_copy_global_to_shared(to, base + i, mask=(i >= 0) & some)


@gluon.jit
def _fetch_lines(lines, stage, some, tile, beta_buffer, total_buffer, sums_buffer, rate_buffer,
                 GATED: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr, L2NORM: gl.constexpr,
                 BLOCK: gl.constexpr):  # fmt: skip
    beta_s, gates_s, rates_s = lines
    if BETA:
        _fetch_line(beta_s.index(stage), beta_buffer + tile * 64, some, BLOCK)
    if GATED:
        if SCALAR:
            _fetch_line(gates_s.index(stage).slice(0, 64), sums_buffer + tile * 64, some, BLOCK)
        else:
            _fetch_line(gates_s.index(stage), total_buffer + tile * 128, some, BLOCK)
    if L2NORM and SCALAR:
        _fetch_line(rates_s.index(stage), rate_buffer + tile * 128, some, BLOCK)


@gluon.jit
def _lines(
    lines, stage, GATED: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr, L2NORM: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Beta; decays from the chunk's start to its tokens and from these to its end, with SCALAR; over it; rates."""
    DOWN: gl.constexpr = gl.SliceLayout(1, products_of(BLOCK))
    beta_s, gates_s, rates_s = lines
    b = gl.full([64], 1.0, gl.float32, layout=DOWN)
    up, down, q_rate, k_rate = b, b, b, b
    total = gl.full([128], 1.0, gl.float32, layout=DOWN)
    if BETA:
        b = beta_s.index(stage).load(DOWN)
    if GATED:
        if SCALAR:
            until = gates_s.index(stage).slice(0, 64).load(DOWN)
            last = gates_s.index(stage).slice(63, 1).load(DOWN)
            up = exp2(until)
            down = exp2(last - until)
            total = total * exp2(last)
        else:
            total = gates_s.index(stage).load(DOWN)
    if L2NORM and SCALAR:
        q_rate = rates_s.index(stage).slice(0, 64).load(DOWN)
        k_rate = rates_s.index(stage).slice(64, 64).load(DOWN)
    return b, up, down, total, q_rate, k_rate


@gluon.jit
def _fetch_forward(n, count, stage, first, step, start, end, v_base, v_st, k_base, k_st, kg, kd, x, kg_s, kd_s, x_s,
                   v_s, lines, total_buffer, sums_buffer, rate_buffer, beta_buffer, GATED: gl.constexpr,
                   DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr, L2NORM: gl.constexpr):  # fmt: skip
    BLOCK: gl.constexpr = v_s.shape[2]
    SLIM: gl.constexpr = rows_of(64, BLOCK)
    WIDE: gl.constexpr = rows_of(128, BLOCK)
    rows = gl.where(n < count, 64, 0)
    chunk = gl.minimum(n, count - 1)
    tile = first + chunk * step
    token = start + chunk * 64
    left = gl.minimum(rows, end - token)
    fetch(v_s.index(stage), v_base + token * v_st, v_st, left, rows_of(BLOCK, BLOCK))
    if SCALAR:
        fetch(kd_s.index(stage), k_base + token * k_st, k_st, left, WIDE)
    else:
        fetch(kd_s.index(stage), kd + tile * (64 * 128), 128, rows, WIDE)
    if DELTA:
        if not SCALAR:
            fetch(kg_s.index(stage), kg + tile * (64 * 128), 128, rows, WIDE)
        fetch(x_s.index(stage), x + tile * (64 * 64), 64, rows, SLIM)
    _fetch_lines(
        lines, stage, n < count, tile, beta_buffer, total_buffer, sums_buffer, rate_buffer, GATED, BETA, SCALAR, L2NORM,
        BLOCK,
    )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _forward(
    s, column, count, first, step, start, end, v_base, v_st, k_base, k_st, kg_buffer, kd_buffer, total_buffer, x_buffer,
    sums_buffer, rate_buffer, beta_buffer, s_buffer, y_buffer, done,
    V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, KEEP: gl.constexpr, EARLY: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The states before every chunk, and with the delta rule Y; KEEP: as of the reverse half."""
    FLAT: gl.constexpr = products_of(BLOCK)
    OWN: gl.constexpr = tile_of(BLOCK)
    THIN: gl.constexpr = rows_of(BLOCK, BLOCK)
    STAGES: gl.constexpr = 3
    APART: gl.constexpr = STAGES if DELTA and not SCALAR else 1
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BLOCK], OWN)
    kd_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    kg_s = gl.allocate_shared_memory(gl.bfloat16, [APART, 64, 128], TILE)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES if DELTA else 1, 64, 64], TILE)
    state = gl.allocate_shared_memory(gl.bfloat16, [128, BLOCK], OWN)
    scaled = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    solved = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    added = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    lines = _line_tiles(STAGES)
    for n in gl.static_range(STAGES - 1):
        _fetch_forward(n, count, n, first, step, start, end, v_base, v_st, k_base, k_st, kg_buffer, kd_buffer, x_buffer,
                       kg_s, kd_s, x_s, v_s, lines, total_buffer, sums_buffer, rate_buffer, beta_buffer,
                       GATED, DELTA, BETA, SCALAR, L2NORM)  # fmt: skip
    for n in range(count):
        stage = n % STAGES
        tile = first + n * step
        async_copy.wait_group(STAGES - 2)
        state.store(s.to(gl.bfloat16))
        ready()
        say_done(done, n, count, EARLY)
        keys = kd_s.index(stage)
        if DELTA:
            r = begun(keys if SCALAR else kg_s.index(stage), state, FLAT)
        # Read before the next copies begin: a barrier would part them.
        b, up, down, total, _, k_rate = _lines(lines, stage, GATED, BETA, SCALAR, L2NORM, BLOCK)
        v = v_s.index(stage).load(FLAT)
        ahead = n + STAGES - 1
        _fetch_forward(ahead, count, ahead % STAGES, first, step, start, end, v_base, v_st, k_base, k_st, kg_buffer,
                       kd_buffer, x_buffer, kg_s, kd_s, x_s, v_s, lines, total_buffer, sums_buffer, rate_buffer,
                       beta_buffer, GATED, DELTA, BETA, SCALAR, L2NORM)  # fmt: skip
        if KEEP:
            leave(s_buffer + tile * (128 * V) + column, V, state, 128, THIN)
        if DELTA:
            r = warpgroup_mma_wait(0, [r])
            if SCALAR:
                r = r * (up * k_rate)[:, None]
            y = v.to(gl.float32) - r
            scaled.store((y * -b[:, None]).to(gl.bfloat16))
            ready()
            y = warpgroup_mma(x_s.index(stage), scaled, y)
            if KEEP:
                solved.store(y.to(gl.bfloat16))
        else:
            y = v.to(gl.float32)
        if SCALAR:
            b = b * (down * k_rate)
        added.store((y * b[:, None]).to(gl.bfloat16))
        ready()
        if GATED:
            s *= total[:, None]
        s = warpgroup_mma(keys.permute((1, 0)), added, s, is_async=True)
        if DELTA and KEEP:
            leave(y_buffer + tile * (64 * V) + column, V, solved, 64, THIN)
        s = warpgroup_mma_wait(0, [s])
    async_copy.wait_group(0)
    ready()
    say_done(done, count, count, EARLY)
    return s


@gluon.jit
def _fetch_reverse(n, count, stage, first, step, start, end, do_base, do_st, q_base, q_st, k_base, k_st, qg, kg, kd, p,
                   x, qg_s, kg_s, kd_s, p_s, x_s, do_s, lines, total_buffer, sums_buffer, rate_buffer, beta_buffer,
                   GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr,
                   L2NORM: gl.constexpr):  # fmt: skip
    BLOCK: gl.constexpr = do_s.shape[2]
    SLIM: gl.constexpr = rows_of(64, BLOCK)
    WIDE: gl.constexpr = rows_of(128, BLOCK)
    rows = gl.where(n < count, 64, 0)
    chunk = gl.maximum(count - 1 - n, 0)
    tile = first + chunk * step
    token = start + chunk * 64
    left = gl.minimum(rows, end - token)
    fetch(do_s.index(stage), do_base + token * do_st, do_st, left, rows_of(BLOCK, BLOCK))
    if SCALAR:
        fetch(kd_s.index(stage), k_base + token * k_st, k_st, left, WIDE)
        fetch(qg_s.index(stage), q_base + token * q_st, q_st, left, WIDE)
    else:
        fetch(kd_s.index(stage), kd + tile * (64 * 128), 128, rows, WIDE)
        fetch(qg_s.index(stage), qg + tile * (64 * 128), 128, rows, WIDE)
    fetch(p_s.index(stage), p + tile * (64 * 64), 64, rows, SLIM)
    if DELTA:
        if not SCALAR:
            fetch(kg_s.index(stage), kg + tile * (64 * 128), 128, rows, WIDE)
        fetch(x_s.index(stage), x + tile * (64 * 64), 64, rows, SLIM)
    _fetch_lines(
        lines, stage, n < count, tile, beta_buffer, total_buffer, sums_buffer, rate_buffer, GATED, BETA, SCALAR, L2NORM,
        BLOCK,
    )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def _reverse(
    s, column, count, first, step, start, end, scale, do_base, do_st, q_base, q_st, k_base, k_st, qg_buffer, kg_buffer,
    kd_buffer, total_buffer, p_buffer, x_buffer, sums_buffer, rate_buffer, beta_buffer, d_buffer, z_buffer, done,
    V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, KEEP: gl.constexpr, EARLY: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The gradients of the states behind every chunk, and Z; KEEP: whether they are kept, or the last state alone."""
    FLAT: gl.constexpr = products_of(BLOCK)
    OWN: gl.constexpr = tile_of(BLOCK)
    THIN: gl.constexpr = rows_of(BLOCK, BLOCK)
    APART: gl.constexpr = 2 if DELTA and not SCALAR else 1
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK], OWN)
    qg_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    kd_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    kg_s = gl.allocate_shared_memory(gl.bfloat16, [APART, 64, 128], TILE)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2 if DELTA else 1, 64, 64], TILE)
    state = gl.allocate_shared_memory(gl.bfloat16, [128, BLOCK], OWN)
    given = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    solved = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    scaled = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    lifted = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], OWN)
    lines = _line_tiles(2)
    _fetch_reverse(0, count, 0, first, step, start, end, do_base, do_st, q_base, q_st, k_base, k_st, qg_buffer,
                   kg_buffer, kd_buffer, p_buffer, x_buffer, qg_s, kg_s, kd_s, p_s, x_s, do_s, lines, total_buffer,
                   sums_buffer, rate_buffer, beta_buffer, GATED, DELTA, BETA, SCALAR, L2NORM)  # fmt: skip
    for n in range(count):
        stage = n % 2
        tile = first + (count - 1 - n) * step
        async_copy.wait_group(0)
        state.store(s.to(gl.bfloat16))
        ready()
        say_done(done, n, count, EARLY)
        do = do_s.index(stage)
        keys = kd_s.index(stage)
        queries = qg_s.index(stage).permute((1, 0))
        z = begun(p_s.index(stage).permute((1, 0)), do, FLAT)
        more = begun(keys, state, FLAT)
        if not SCALAR:
            asked = begun(queries, do, FLAT)
        # Read before the next copies begin: a barrier would part them.
        b, up, down, total, q_rate, k_rate = _lines(lines, stage, GATED, BETA, SCALAR, L2NORM, BLOCK)
        if SCALAR:
            lifted.store((do.load(FLAT).to(gl.float32) * (up * q_rate * scale)[:, None]).to(gl.bfloat16))
        _fetch_reverse(n + 1, count, stage ^ 1, first, step, start, end, do_base, do_st, q_base, q_st, k_base, k_st,
                       qg_buffer, kg_buffer, kd_buffer, p_buffer, x_buffer, qg_s, kg_s, kd_s, p_s, x_s, do_s, lines,
                       total_buffer, sums_buffer, rate_buffer, beta_buffer, GATED, DELTA, BETA, SCALAR,
                       L2NORM)  # fmt: skip
        if KEEP:
            leave(d_buffer + tile * (128 * V) + column, V, state, 128, THIN)
        if GATED:
            s *= total[:, None]
        if SCALAR:
            z, more = warpgroup_mma_wait(0, [z, more])
            more = more * (down * k_rate)[:, None]
        else:
            z, more, asked = warpgroup_mma_wait(0, [z, more, asked])
            s += asked * scale
        z = z * scale + more
        lost = z
        if DELTA:
            lost = z * -b[:, None]
        given.store(lost.to(gl.bfloat16))
        ready()
        if SCALAR:
            s = warpgroup_mma(queries, lifted, s, is_async=True)
        if DELTA:
            z = warpgroup_mma(x_s.index(stage).permute((1, 0)), given, z, is_async=True)
            if SCALAR:
                z, s = warpgroup_mma_wait(0, [z, s])
            else:
                z = warpgroup_mma_wait(0, [z])
            lost = z * -b[:, None]
            if SCALAR:
                lost = lost * (up * k_rate)[:, None]
            scaled.store(lost.to(gl.bfloat16))
            solved.store(z.to(gl.bfloat16))
            ready()
            s = warpgroup_mma((keys if SCALAR else kg_s.index(stage)).permute((1, 0)), scaled, s, is_async=True)
            if KEEP:
                leave(z_buffer + tile * (64 * V) + column, V, solved, 64, THIN)
        elif KEEP:
            leave(z_buffer + tile * (64 * V) + column, V, given, 64, THIN)
        s = warpgroup_mma_wait(0, [s])
    async_copy.wait_group(0)
    ready()
    say_done(done, count, count, EARLY)
    return s


@gluon.jit(do_not_specialize=["T", "N", "first_head", "state_sn", "final_sn"])
def scan(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, v_ptr, v_sb, v_st, v_sh, do_ptr, do_sb, do_st, do_sh,
    state_ptr, state_sn, state_sh, state_sk, state_sv, final_ptr, final_sn, final_sh, final_sk, final_sv, dstate_ptr,
    last_ptr, cu_seqlens, chunk_offsets, N, T, scale, first_head,
    qg_buffer, kg_buffer, kd_buffer, total_buffer, p_buffer, x_buffer, sums_buffer, rate_buffer, beta_buffer,
    s_buffer, d_buffer, y_buffer, z_buffer, done_buffer,
    HV: gl.constexpr, HP: gl.constexpr, GROUP: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr,
    BETA: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, FORWARD: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Grid: (sequences * heads * V / BLOCK, 2). Rows of tensors are contiguous and begin at multiples of 16 bytes.

    The blocks FORWARD of the second dimension go forward. With FORWARD = 1 and a grid of 1 there, none does, and only
    the gradients of the first states are left. AHEAD, with FORWARD = 0 and a grid of 1 there: only the last states
    are, and the next kernel may start beside this one.

    SCALAR: a gate per token or head, or none: q and k are read as they are, with what ``backward_scalar.py`` left.
    Otherwise q and k are not read, and what ``backward_prepare.py`` left of them is.

    EARLY: of one sequence, ``done_buffer`` says which chunks are done, and the next kernel may start beside this one.
    """
    if EARLY != "":
        previous_is_over()
    if EARLY != "" or AHEAD:
        next_may_start()
    pid = gl.program_id(0).to(gl.int64)
    i_nh = pid // (V // BLOCK)
    column = (pid % (V // BLOCK)) * BLOCK
    sequence = i_nh // HP
    own = i_nh % HP
    head = first_head + own
    if PACKED:
        start = gl.maximum(gl.load(cu_seqlens + sequence).to(gl.int64), 0)
        end = gl.minimum(gl.load(cu_seqlens + sequence + 1).to(gl.int64), T)
        chunk = gl.load(chunk_offsets + sequence).to(gl.int64)
        count = (gl.load(chunk_offsets + sequence + 1).to(gl.int64) - chunk).to(gl.int32)
        batch = sequence * 0
    else:
        chunk = sequence * ((T + 63) // 64)
        count = (sequence * 0 + (T + 63) // 64).to(gl.int32)
        start = sequence * 0
        end = start + T
        batch = sequence
    first = chunk * HP + own
    k_base = k_ptr + batch * k_sb + (head // GROUP) * k_sh
    if gl.program_id(1) == FORWARD:
        s = _state(state_ptr + sequence * state_sn + head * state_sh, state_sk, state_sv, column, STATE, BLOCK)
        v_base = v_ptr + batch * v_sb + head * v_sh + column
        s = _forward(
            s, column, count, first, HP, start, end, v_base, v_st, k_base, k_st, kg_buffer, kd_buffer, total_buffer,
            x_buffer, sums_buffer, rate_buffer, beta_buffer, s_buffer, y_buffer,
            done_buffer, V, GATED, DELTA, BETA, SCALAR, L2NORM, not AHEAD, EARLY, BLOCK,
        )  # fmt: skip
        if AHEAD:
            _leave_state(last_ptr + (sequence * HV + head) * (128 * V) + column, V, s)
    else:
        s = _state(final_ptr + sequence * final_sn + head * final_sh, final_sk, final_sv, column, FINAL, BLOCK)
        do_base = do_ptr + batch * do_sb + head * do_sh + column
        q_base = q_ptr + batch * q_sb + (head // GROUP) * q_sh
        s = _reverse(
            s, column, count, first, HP, start, end, scale, do_base, do_st, q_base, q_st, k_base, k_st, qg_buffer,
            kg_buffer, kd_buffer, total_buffer, p_buffer, x_buffer, sums_buffer, rate_buffer, beta_buffer, d_buffer,
            z_buffer, done_buffer + rounds_of(T), V, GATED, DELTA, BETA, SCALAR, L2NORM, FORWARD == 0, EARLY, BLOCK,
        )  # fmt: skip
        if STATE:
            _leave_state(dstate_ptr + (sequence * HV + head) * (128 * V) + column, V, s)
