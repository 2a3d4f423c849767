"""Gluon: the states forward and their gradients in reverse, in one launch (bf16, K = V = 128, chunks of 64).

As ``lowering/triton/backward_scan.py``: neither direction reads the other, so they are the two halves of the grid, and
a block has 64 columns of V of one head of one sequence. What the next chunks need is under way while one is worked on.
The state is in the accumulators, its 16-bit copy in shared memory, where the products and its way to memory begin.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .backward_blocks import ACROSS, DOWN, FLAT, LEFT, RIGHT, TILE, WIDE
from .common import barrier

BLOCK = gl.constexpr(64)  # columns of V
SLIM = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # how tiles [rows, 64] meet memory


@gluon.jit
def _fetch(to, base, step, width_left, LAYOUT: gl.constexpr):
    """Rows of a tile from memory, ``step`` elements apart; zeros from row ``width_left`` on."""
    ROWS: gl.constexpr = to.shape[0]
    COLUMNS: gl.constexpr = to.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, base + i * step + j, mask=(i < width_left) & (j >= 0))


@gluon.jit
def _leave(base, step, tile):
    ROWS: gl.constexpr = tile.shape[0]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SLIM))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, SLIM))[None, :]
    gl.store(base + i * step + j, tile.load(SLIM))


@gluon.jit
def _product(left, right, acc, DEPTH: gl.constexpr):
    """acc + left right, tiles in shared memory, a few columns of the left one at a time."""
    for at in gl.static_range(0, DEPTH, 32):
        acc = mma_v2(left.slice(at, 32, 1).load(LEFT), right.slice(at, 32, 0).load(RIGHT), acc)
    return acc


@gluon.jit
def _state(base, st_k, st_v, column, HAS: gl.constexpr):
    d = gl.arange(0, 128, layout=DOWN)[:, None]
    c = column + gl.arange(0, BLOCK, layout=ACROSS)[None, :]
    s = gl.zeros([128, BLOCK], gl.float32, layout=FLAT)
    if HAS:
        s += gl.load(base + d * st_k + c * st_v).to(gl.float32)
    return s


@gluon.jit
def _fetch_forward(n, count, stage, first, step, start, end, v_base, v_st, kg, kd, t, kg_s, kd_s, t_s, v_s,
                   DELTA: gl.constexpr):  # fmt: skip
    rows = gl.where(n < count, 64, 0)
    chunk = gl.minimum(n, count - 1)
    tile = first + chunk * step
    token = start + chunk * 64
    _fetch(v_s.index(stage), v_base + token * v_st, v_st, gl.minimum(rows, end - token), SLIM)
    _fetch(kd_s.index(stage), kd + tile * (64 * 128), 128, rows, WIDE)
    if DELTA:
        _fetch(kg_s.index(stage), kg + tile * (64 * 128), 128, rows, WIDE)
        _fetch(t_s.index(stage), t + tile * (64 * 64), 64, rows, SLIM)
    async_copy.commit_group()


@gluon.jit
def _forward(
    s, column, count, first, step, start, end, v_base, v_st, kg_buffer, kd_buffer, total_buffer, t_buffer, beta_buffer,
    s_buffer, r_buffer, vn_buffer, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr,
):  # fmt: skip
    """The states before every chunk, and with the delta rule R and V'."""
    STAGES: gl.constexpr = 3
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BLOCK], TILE)
    kd_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], TILE)
    kg_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES if DELTA else 1, 64, 128], TILE)
    t_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES if DELTA else 1, 64, 64], TILE)
    state = gl.allocate_shared_memory(gl.bfloat16, [128, BLOCK], TILE)
    rest = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    scaled = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    written = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    i = gl.arange(0, 64, layout=DOWN)
    d = gl.arange(0, 128, layout=DOWN)
    for n in gl.static_range(STAGES - 1):
        _fetch_forward(n, count, n, first, step, start, end, v_base, v_st, kg_buffer, kd_buffer, t_buffer,
                       kg_s, kd_s, t_s, v_s, DELTA)  # fmt: skip
    for n in range(count):
        stage = n % STAGES
        tile = first + n * step
        b = gl.full([64], 1.0, gl.float32, layout=DOWN)
        if BETA:
            b = gl.load(beta_buffer + tile * 64 + i)
        if GATED:
            total = gl.load(total_buffer + tile * 128 + d)
        async_copy.wait_group(STAGES - 2)
        state.store(s.to(gl.bfloat16))
        barrier()
        ahead = n + STAGES - 1
        _fetch_forward(ahead, count, ahead % STAGES, first, step, start, end, v_base, v_st, kg_buffer, kd_buffer,
                       t_buffer, kg_s, kd_s, t_s, v_s, DELTA)  # fmt: skip
        v = v_s.index(stage).load(FLAT).to(gl.float32)
        if DELTA:
            r = v - _product(kg_s.index(stage), state, gl.zeros([64, BLOCK], gl.float32, layout=FLAT), 128)
            scaled.store((r * b[:, None]).to(gl.bfloat16))
            rest.store(r.to(gl.bfloat16))
            _leave(s_buffer + tile * (128 * 128) + column, 128, state)
            barrier()
            new = _product(t_s.index(stage), scaled, gl.zeros([64, BLOCK], gl.float32, layout=FLAT), 64)
        else:
            _leave(s_buffer + tile * (128 * 128) + column, 128, state)
            new = v * b[:, None]
        written.store(new.to(gl.bfloat16))
        if DELTA:
            _leave(r_buffer + tile * (64 * 128) + column, 128, rest)
        barrier()
        if GATED:
            s *= total[:, None]
        s = _product(kd_s.index(stage).permute((1, 0)), written, s, 64)
        if DELTA:
            _leave(vn_buffer + tile * (64 * 128) + column, 128, written)
    async_copy.wait_group(0)
    return s


@gluon.jit
def _fetch_reverse(n, count, stage, first, step, start, end, do_base, do_st, qg, kg, kd, p, t, qg_s, kg_s, kd_s, p_s,
                   t_s, do_s, DELTA: gl.constexpr):  # fmt: skip
    rows = gl.where(n < count, 64, 0)
    chunk = gl.maximum(count - 1 - n, 0)
    tile = first + chunk * step
    token = start + chunk * 64
    _fetch(do_s.index(stage), do_base + token * do_st, do_st, gl.minimum(rows, end - token), SLIM)
    _fetch(kd_s.index(stage), kd + tile * (64 * 128), 128, rows, WIDE)
    _fetch(qg_s.index(stage), qg + tile * (64 * 128), 128, rows, WIDE)
    _fetch(p_s.index(stage), p + tile * (64 * 64), 64, rows, SLIM)
    if DELTA:
        _fetch(kg_s.index(stage), kg + tile * (64 * 128), 128, rows, WIDE)
        _fetch(t_s.index(stage), t + tile * (64 * 64), 64, rows, SLIM)
    async_copy.commit_group()


@gluon.jit
def _reverse(
    s, column, count, first, step, start, end, scale, do_base, do_st, qg_buffer, kg_buffer, kd_buffer, total_buffer,
    p_buffer, t_buffer, beta_buffer, d_buffer, z_buffer, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr,
):  # fmt: skip
    """The gradients of the states behind every chunk, and Z."""
    do_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BLOCK], TILE)
    qg_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    kd_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    kg_s = gl.allocate_shared_memory(gl.bfloat16, [2 if DELTA else 1, 64, 128], TILE)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    t_s = gl.allocate_shared_memory(gl.bfloat16, [2 if DELTA else 1, 64, 64], TILE)
    state = gl.allocate_shared_memory(gl.bfloat16, [128, BLOCK], TILE)
    given = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    solved = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    scaled = gl.allocate_shared_memory(gl.bfloat16, [64, BLOCK], TILE)
    i = gl.arange(0, 64, layout=DOWN)
    d = gl.arange(0, 128, layout=DOWN)
    _fetch_reverse(0, count, 0, first, step, start, end, do_base, do_st, qg_buffer, kg_buffer, kd_buffer, p_buffer,
                   t_buffer, qg_s, kg_s, kd_s, p_s, t_s, do_s, DELTA)  # fmt: skip
    for n in range(count):
        stage = n % 2
        tile = first + (count - 1 - n) * step
        b = gl.full([64], 1.0, gl.float32, layout=DOWN)
        if BETA:
            b = gl.load(beta_buffer + tile * 64 + i)
        if GATED:
            total = gl.load(total_buffer + tile * 128 + d)
        async_copy.wait_group(0)
        state.store(s.to(gl.bfloat16))
        barrier()
        _fetch_reverse(n + 1, count, stage ^ 1, first, step, start, end, do_base, do_st, qg_buffer, kg_buffer,
                       kd_buffer, p_buffer, t_buffer, qg_s, kg_s, kd_s, p_s, t_s, do_s, DELTA)  # fmt: skip
        do = do_s.index(stage)
        z = _product(p_s.index(stage).permute((1, 0)), do, gl.zeros([64, BLOCK], gl.float32, layout=FLAT), 64)
        z = _product(kd_s.index(stage), state, z * scale, 128)
        given.store(z.to(gl.bfloat16))
        _leave(d_buffer + tile * (128 * 128) + column, 128, state)
        more = gl.zeros([128, BLOCK], gl.float32, layout=FLAT)
        more = _product(qg_s.index(stage).permute((1, 0)), do, more, 64)
        if GATED:
            s *= total[:, None]
        s += more * scale
        barrier()
        if DELTA:
            z = gl.zeros([64, BLOCK], gl.float32, layout=FLAT)
            z = _product(t_s.index(stage).permute((1, 0)), given, z, 64)
            scaled.store((z * -b[:, None]).to(gl.bfloat16))
            solved.store(z.to(gl.bfloat16))
            barrier()
            s = _product(kg_s.index(stage).permute((1, 0)), scaled, s, 64)
            _leave(z_buffer + tile * (64 * 128) + column, 128, solved)
        else:
            _leave(z_buffer + tile * (64 * 128) + column, 128, given)
    async_copy.wait_group(0)
    return s


@gluon.jit(do_not_specialize=["T", "N", "first_head", "state_sn", "final_sn"])
def scan(
    v_ptr, v_sb, v_st, v_sh, do_ptr, do_sb, do_st, do_sh,
    state_ptr, state_sn, state_sh, state_sk, state_sv, final_ptr, final_sn, final_sh, final_sk, final_sv, dstate_ptr,
    cu_seqlens, chunk_offsets, N, T, scale, first_head,
    qg_buffer, kg_buffer, kd_buffer, total_buffer, p_buffer, t_buffer, beta_buffer,
    s_buffer, d_buffer, r_buffer, vn_buffer, z_buffer,
    HV: gl.constexpr, HP: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr,
    STATE: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Grid: (sequences * heads * 2, 2). v and do have contiguous rows that begin at multiples of 16 bytes."""
    pid = gl.program_id(0).to(gl.int64)
    lane = pid // 2
    column = (pid % 2) * BLOCK
    sequence = lane // HP
    own = lane % HP
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
    if gl.program_id(1) == 0:
        s = _state(state_ptr + sequence * state_sn + head * state_sh, state_sk, state_sv, column, STATE)
        v_base = v_ptr + batch * v_sb + head * v_sh + column
        _forward(
            s, column, count, first, HP, start, end, v_base, v_st, kg_buffer, kd_buffer, total_buffer, t_buffer,
            beta_buffer, s_buffer, r_buffer, vn_buffer, GATED, DELTA, BETA,
        )  # fmt: skip
    else:
        s = _state(final_ptr + sequence * final_sn + head * final_sh, final_sk, final_sv, column, FINAL)
        do_base = do_ptr + batch * do_sb + head * do_sh + column
        s = _reverse(
            s, column, count, first, HP, start, end, scale, do_base, do_st, qg_buffer, kg_buffer, kd_buffer,
            total_buffer, p_buffer, t_buffer, beta_buffer, d_buffer, z_buffer, GATED, DELTA, BETA,
        )  # fmt: skip
        if STATE:
            d = gl.arange(0, 128, layout=DOWN)[:, None]
            c = column + gl.arange(0, BLOCK, layout=ACROSS)[None, :]
            gl.store(dstate_ptr + ((sequence * HV + head) * 128 + d) * 128 + c, s)
