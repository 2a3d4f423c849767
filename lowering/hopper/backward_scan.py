"""Gluon: the states forward and their gradients in reverse, in one launch (bf16, K = 128, chunks of 64).

As ``lowering/triton/backward_scan.py``: neither direction reads the other, so they are the two halves of the grid, and
a block has 64 columns of V of one head of one sequence. One warp has the copy engine fetch what chunks need, two or
three of them ahead, another has it take what they leave; four do the rest (``backward_states.py``).
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .backward_early import rounds_of
from .backward_pairs import pair_warps
from .backward_states import forward_warps, leave_warp, reverse_warps
from .common import TILE, TILE4, barrier, barriers, next_may_start, previous_is_over

LINE = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))


@gluon.jit
def _fetch_tokens(d, batch, token, head, column, bar, to):
    """A chunk's rows of a tensor; zeros behind the last token there is."""
    WIDTH: gl.constexpr = to.shape[1]
    at = [batch, token, head, column]
    tma.async_copy_global_to_shared(d, at, bar, to._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4))


@gluon.jit
def _fetch_lines(d_beta, d_gates, d_rates, tile, bar, beta_s, gates_s, rates_s, stage, GATED: gl.constexpr,
                 BETA: gl.constexpr, RATES: gl.constexpr):  # fmt: skip
    if BETA:
        tma.async_copy_global_to_shared(d_beta, [tile * 64], bar, beta_s.index(stage))
    if GATED:
        GATES: gl.constexpr = gates_s.shape[1]
        tma.async_copy_global_to_shared(d_gates, [tile * GATES], bar, gates_s.index(stage))
    if RATES:
        tma.async_copy_global_to_shared(d_rates, [tile * 128], bar, rates_s.index(stage))


@gluon.jit
def _fetch_forward(
    d_v, d_x, d_kg, d_keys, d_beta, d_gates, d_rates, batch, start, head, key_head, column, first, step, count,
    v_s, x_s, kg_s, kd_s, beta_s, gates_s, rates_s, full, empty,
    GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr, RATES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = v_s.shape[0]
    for n in range(count):
        stage = n % STAGES
        tile = first + n * step
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        if SCALAR:
            _fetch_tokens(d_keys, batch, start + n * 64, key_head, 0, bar, kd_s.index(stage))
        else:
            if DELTA:
                tma.async_copy_global_to_shared(d_kg, [tile * 64, 0], bar, kg_s.index(stage))
        _fetch_tokens(d_v, batch, start + n * 64, head, column, bar, v_s.index(stage))
        _fetch_lines(d_beta, d_gates, d_rates, tile, bar, beta_s, gates_s, rates_s, stage, GATED, BETA, RATES)
        if DELTA:
            tma.async_copy_global_to_shared(d_x, [tile * 64, 0], bar, x_s.index(stage))
        if not SCALAR:
            tma.async_copy_global_to_shared(d_keys, [tile * 64, 0], bar, kd_s.index(stage))


@gluon.jit
def _fetch_reverse(
    d_do, d_p, d_x, d_kg, d_keys, d_queries, d_beta, d_gates, d_rates, batch, start, head, key_head, column, first,
    step, count, do_s, p_s, x_s, kg_s, kd_s, qg_s, beta_s, gates_s, rates_s, full, empty, late, used,
    GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr, RATES: gl.constexpr,
    PAIRS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = do_s.shape[0]
    for n in range(count):
        stage = n % STAGES
        turn = ((n // STAGES) & 1) ^ 1
        tile = first + (count - 1 - n) * step
        token = start + (count - 1 - n) * 64
        mbarrier.wait(empty.index(stage), turn)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        _fetch_tokens(d_do, batch, token, head, column, bar, do_s.index(stage))
        if PAIRS:
            tma.async_copy_global_to_shared(d_p, [tile * 64, 0], bar, p_s.index(stage))
        if SCALAR:
            _fetch_tokens(d_keys, batch, token, key_head, 0, bar, kd_s.index(stage))
            _fetch_tokens(d_queries, batch, token, key_head, 0, bar, qg_s.index(stage))
        else:
            tma.async_copy_global_to_shared(d_keys, [tile * 64, 0], bar, kd_s.index(stage))
            tma.async_copy_global_to_shared(d_queries, [tile * 64, 0], bar, qg_s.index(stage))
        _fetch_lines(d_beta, d_gates, d_rates, tile, bar, beta_s, gates_s, rates_s, stage, GATED, BETA, RATES)
        if DELTA:
            tma.async_copy_global_to_shared(d_x, [tile * 64, 0], bar, x_s.index(stage))
            if not SCALAR:
                mbarrier.wait(used.index(stage), turn)
                mbarrier.expect(late.index(stage), 64 * 128 * 2)
                tma.async_copy_global_to_shared(d_kg, [tile * 64, 0], late.index(stage), kg_s.index(stage))


@gluon.jit
def _idle(count):
    pass


@gluon.jit
def _tiles(STAGES: gl.constexpr, WIDTH: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, WIDTH], TILE)


@gluon.jit(do_not_specialize=["T", "N", "first_head", "state_sn", "final_sn"])
def scan(
    d_v, d_do, d_p, d_x, d_kg, d_keys, d_queries, d_beta, d_gates, d_rates, d_s, d_d, d_y, d_z,
    state_ptr, state_sn, state_sh, state_sk, state_sv, final_ptr, final_sn, final_sh, final_sk, final_sv, dstate_ptr,
    last_ptr, cu_seqlens, chunk_offsets, N, T, scale, over, times, l2norm_eps, first_head, done_buffer, rate_buffer,
    HV: gl.constexpr, HP: gl.constexpr, GROUP: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr,
    BETA: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr, PACKED: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, FORWARD: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Grid: (sequences * heads * V / 64, 2). d_v, d_do: ``[B, T, HV, V]``, 64 columns at a time.

    The blocks FORWARD of the second dimension go forward. With FORWARD = 1 and a grid of 1 there, none does, and only
    the gradients of the first states are left. AHEAD, with FORWARD = 0 and a grid of 1 there: only the last states
    are, and the next kernel may start beside this one.

    SCALAR: a gate per token or head, or none: d_keys and d_queries are k and q as they are, ``[B, T, H, K]``, with
    what ``backward_scalar.py`` left. Otherwise they are what ``backward_prepare.py`` left of them, ``[rows, K]``.

    Without PAIRS P is not read but made here, see ``backward_pairs.py``.

    EARLY: of one sequence, ``done_buffer`` says which chunks are done, and the next kernel may start beside this one.
    """
    RATES: gl.constexpr = L2NORM and SCALAR
    APART: gl.constexpr = DELTA and not SCALAR
    GATES: gl.constexpr = 64 if SCALAR else 128
    LINES: gl.constexpr = 4 * ((64 if BETA else 0) + (GATES if GATED else 0) + (128 if RATES else 0))
    pid = gl.program_id(0)
    i_nh = pid // (V // 64)
    column = (pid % (V // 64)) * 64
    sequence = i_nh // HP
    own = i_nh % HP
    head = first_head + own
    if PACKED:
        start = gl.maximum(gl.load(cu_seqlens + sequence), 0).to(gl.int32)
        end = gl.minimum(gl.load(cu_seqlens + sequence + 1), T).to(gl.int32)
        chunk = gl.load(chunk_offsets + sequence).to(gl.int32)
        count = gl.load(chunk_offsets + sequence + 1).to(gl.int32) - chunk
        length = end - start
        batch = sequence * 0
    else:
        chunk = sequence * ((T + 63) // 64)
        count = sequence * 0 + (T + 63) // 64
        start = sequence * 0
        length = start + T
        batch = sequence
    first = chunk * HP + own
    key_head = head // GROUP
    state = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], TILE)
    solved = _tiles(2, 64)
    beta_s = gl.allocate_shared_memory(gl.float32, [3, 64], LINE)
    gates_s = gl.allocate_shared_memory(gl.float32, [3, GATES], LINE)
    rates_s = gl.allocate_shared_memory(gl.float32, [3, 128], LINE)
    full, empty, late, used = barriers(3), barriers(3), barriers(3), barriers(3)
    left, freed, made = barriers(2), barriers(2), barriers(3)
    fence_async_shared()
    barrier()
    if EARLY != "":
        previous_is_over()
    if EARLY != "" or AHEAD:
        next_may_start()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    if gl.program_id(1) == FORWARD:
        given = state_ptr + sequence.to(gl.int64) * state_sn + head.to(gl.int64) * state_sh + column * state_sv
        last = last_ptr + (sequence * HV + head).to(gl.int64) * (128 * V) + column
        v_s, kd_s = _tiles(3, 64), _tiles(3, 128)
        kg_s = _tiles(3 if APART else 1, 128)
        x_s = _tiles(3 if DELTA else 1, 64)
        BYTES: gl.constexpr = LINES + 2 * 64 * (64 + 128 + (64 if DELTA else 0) + (128 if APART else 0))
        if PAIRS:
            gl.warp_specialize(
                [
                    (forward_warps, (
                        given, state_sk, state_sv, last, count, length, v_s, x_s, kg_s, kd_s, beta_s, gates_s, rates_s,
                        state, solved, full, empty, left, freed,
                        V, GATED, DELTA, BETA, SCALAR, L2NORM, STATE, not AHEAD, PACKED,
                    )),
                    (_fetch_forward, (
                        d_v, d_x, d_kg, d_keys, d_beta, d_gates, d_rates, batch, start, head, key_head, column, first,
                        HP, count, v_s, x_s, kg_s, kd_s, beta_s, gates_s, rates_s, full, empty,
                        GATED, DELTA, BETA, SCALAR, RATES, BYTES,
                    )),
                    (leave_warp, (
                        d_s, d_y, column, count, first, HP, done_buffer, state, solved, left, freed,
                        DELTA, not AHEAD, EARLY,
                    )),
                ],
                [1, 1], [40, 40],
            )  # fmt: skip
        else:  # both halves of the grid have as many warps
            gl.warp_specialize(
                [
                    (forward_warps, (
                        given, state_sk, state_sv, last, count, length, v_s, x_s, kg_s, kd_s, beta_s, gates_s, rates_s,
                        state, solved, full, empty, left, freed,
                        V, GATED, DELTA, BETA, SCALAR, L2NORM, STATE, not AHEAD, PACKED,
                    )),
                    (_idle, (count,)),
                    (_fetch_forward, (
                        d_v, d_x, d_kg, d_keys, d_beta, d_gates, d_rates, batch, start, head, key_head, column, first,
                        HP, count, v_s, x_s, kg_s, kd_s, beta_s, gates_s, rates_s, full, empty,
                        GATED, DELTA, BETA, SCALAR, RATES, BYTES,
                    )),
                    (leave_warp, (
                        d_s, d_y, column, count, first, HP, done_buffer, state, solved, left, freed,
                        DELTA, not AHEAD, EARLY,
                    )),
                ],
                [4, 1, 1], [24, 40, 40],
            )  # fmt: skip
    else:
        behind = final_ptr + sequence.to(gl.int64) * final_sn + head.to(gl.int64) * final_sh + column * final_sv
        asked = dstate_ptr + (sequence * HV + head).to(gl.int64) * (128 * V) + column
        done = done_buffer + rounds_of(T)
        STAGES: gl.constexpr = 2 if APART else 3
        do_s, p_s, kd_t, qg_s = _tiles(STAGES, 64), _tiles(STAGES, 64), _tiles(STAGES, 128), _tiles(STAGES, 128)
        kg_t = _tiles(STAGES if APART else 1, 128)
        x_t = _tiles(STAGES if DELTA else 1, 64)
        SIZE: gl.constexpr = LINES + 2 * 64 * (64 + (64 if PAIRS else 0) + 2 * 128 + (64 if DELTA else 0))
        if PAIRS:
            gl.warp_specialize(
                [
                    (reverse_warps, (
                        behind, final_sk, final_sv, asked, count, length, scale, over, times,
                        do_s, p_s, x_t, kg_t, kd_t, qg_s, beta_s, gates_s, rates_s, state, solved,
                        full, made, empty, late, used, left, freed,
                        V, GATED, DELTA, BETA, SCALAR, L2NORM, STATE, FINAL, FORWARD == 0, PACKED, PAIRS,
                    )),
                    (_fetch_reverse, (
                        d_do, d_p, d_x, d_kg, d_keys, d_queries, d_beta, d_gates, d_rates, batch, start, head, key_head,
                        column, first, HP, count, do_s, p_s, x_t, kg_t, kd_t, qg_s, beta_s, gates_s, rates_s, full,
                        empty, late, used, GATED, DELTA, BETA, SCALAR, RATES, PAIRS, SIZE,
                    )),
                    (leave_warp, (
                        d_d, d_z, column, count, first + (count - 1) * HP, -HP, done, state, solved, left, freed,
                        True, FORWARD == 0, EARLY,
                    )),
                ],
                [1, 1], [40, 40],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (reverse_warps, (
                        behind, final_sk, final_sv, asked, count, length, scale, over, times,
                        do_s, p_s, x_t, kg_t, kd_t, qg_s, beta_s, gates_s, rates_s, state, solved,
                        full, made, empty, late, used, left, freed,
                        V, GATED, DELTA, BETA, SCALAR, L2NORM, STATE, FINAL, FORWARD == 0, PACKED, PAIRS,
                    )),
                    (pair_warps, (
                        rate_buffer + (first + (count - 1) * HP) * 128, -HP * 128, count, p_s, kd_t, qg_s, rates_s,
                        full, made, l2norm_eps, column == 0, L2NORM,
                    )),
                    (_fetch_reverse, (
                        d_do, d_p, d_x, d_kg, d_keys, d_queries, d_beta, d_gates, d_rates, batch, start, head, key_head,
                        column, first, HP, count, do_s, p_s, x_t, kg_t, kd_t, qg_s, beta_s, gates_s, rates_s, full,
                        empty, late, used, GATED, DELTA, BETA, SCALAR, RATES, PAIRS, SIZE,
                    )),
                    (leave_warp, (
                        d_d, d_z, column, count, first + (count - 1) * HP, -HP, done, state, solved, left, freed,
                        True, FORWARD == 0, EARLY,
                    )),
                ],
                [4, 1, 1], [112, 40, 40],
            )  # fmt: skip
