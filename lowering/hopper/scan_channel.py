"""Gluon: the scan where few of its blocks run, with a gate per channel and K = 128 (see :mod:`.scan`).

Then a chunk's chain is what counts: the products that wait for each other. With what :mod:`.fold` leaves behind they
are two, R, whose accumulator begins as V, and S from that. What only the outputs need runs in between: half of Q S
while R is rounded, the other half and A_qk M R while S is. The state is kept in halves of 64 channels, and the next
chunk's first product is under way when a chunk's turn of the loop ends, where nothing else is: ptxas waits for all that
was begun in another turn. K_gated and v have a ring of tiles of their own: they are wanted, and done with, sooner.
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

from .carry import await_emptied, carry, channel, load_maps
from .chunks import LINE, await_known, locate_chunks
from .common import TILE, TILE4, barrier, barriers, next_may_start, previous_is_over, tf32

HERE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, HERE.value, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, HERE.value))


@gluon.jit
def _rounded(x):
    """x in bf16, and here: the compiler would move it behind a branch, where products under way have to end first."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, False, 2)


@gluon.jit
def _times(left, rows, FROM: gl.constexpr, x):
    """x + left times half of rows [64, 128], transposed: under way."""
    return warpgroup_mma(left, rows.slice(FROM, 64, 1).permute((1, 0)), x, is_async=True)


@gluon.jit
def _decayed(S, line, FROM: gl.constexpr, some):
    """Half of the state after a chunk's decay, if there is ``some`` chunk."""
    decay = line._reinterpret(gl.float32, [128], LINE).slice(FROM, 64).load(ACROSS)
    return S * gl.where(some, decay, 1.0)[None, :]


@gluon.jit
def _first_state(initial, s_sk, s_sv, K, V, VP, segment, key, column, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr):
    """Half of the state before the first segment, or of what another one's A is made from."""
    S = gl.zeros([64, 64], gl.float32, layout=HERE)
    if HAS_INITIAL:
        given = (key < K) & (column < V) & (segment == 0)
        S = gl.load(initial + key * s_sk + column * s_sv, mask=given, other=0.0).to(gl.float32)
    if not OUTPUT:
        S = gl.where((column >= VP) & (key == channel(column - VP)), 1.0, S)
    return S


@gluon.jit
def _leave_map(S, ends, VP, i_v, key, column):
    """Half of B, a row a column, or of A behind it, a row for every channel that comes out."""
    if i_v * 64 < VP:
        gl.store(ends + column * 128 + key, S)
    else:  # A meets the tensor cores again
        gl.store(ends + (VP + key) * 128 + (column - VP), tf32(S))


@gluon.jit
def _leave(d_o, out, i_b, i_h, i_v, token):
    """Outputs of a chunk, whose first token is ``token``; what is behind the sequence the copy engine leaves out."""
    rows = out._reinterpret(gl.bfloat16, [1, 64, 1, 64], TILE4)
    tma.async_copy_shared_to_global(d_o, [i_b, token, i_h, i_v * 64], rows)


@gluon.jit
def _load_early(d_buffer, d_v, c, i_b, i_h, i_v, token, n, tiles, values, full, empty, PARTS: gl.constexpr):
    STAGES: gl.constexpr = values.shape[0]
    stage = n % STAGES
    mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
    bar = full.index(stage)
    mbarrier.expect(bar, 64 * 128 * 2 + 64 * 64 * 2)
    tma.async_copy_global_to_shared(d_buffer, [c * 256, 0], bar, tiles.index(PARTS * stage))
    to = values.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, 64], TILE4)
    tma.async_copy_global_to_shared(d_v, [i_b, token + n * 64, i_h, i_v * 64], bar, to)


@gluon.jit
def _load_warp(
    d_buffer, d_squares, d_v, d_decay, d_ends, announced, i_b, i_h, i_v, step, tile, token, count,
    row, rows, VP, segment, joined, maps, tiles, values, squares, lines, full_early, empty_early, full, empty,
    carried, emptied,
    READY: gl.constexpr, OUTPUT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = lines.shape[0]
    PARTS: gl.constexpr = 3 if OUTPUT else 2
    BYTES: gl.constexpr = 64 * 128 * 2 * (2 if OUTPUT else 1) + (64 * 64 * 2 if OUTPUT else 0) + 128 * 4
    known = 0
    if AHEAD:
        if segment > 0:
            previous_is_over()
        load_maps(d_ends, row, rows, i_v, VP, segment, joined, maps, tiles, carried, emptied)
    for n in range(count):
        c = tile + n * step
        if READY:
            known = await_known(announced + tile, n, known, count, step)
        if AHEAD:
            if n < values.shape[0]:
                await_emptied(emptied, PARTS * n, maps)
        _load_early(d_buffer, d_v, c, i_b, i_h, i_v, token, n, tiles, values, full_early, empty_early, PARTS)
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        if AHEAD:
            if n < STAGES:
                await_emptied(emptied, PARTS * n + 1, maps)
                await_emptied(emptied, PARTS * n + 2, maps)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        if OUTPUT:
            tma.async_copy_global_to_shared(d_buffer, [c * 256 + 64, 0], bar, tiles.index(PARTS * stage + 1))
        to = tiles.index(PARTS * stage + PARTS - 1)
        tma.async_copy_global_to_shared(d_buffer, [c * 256 + 128, 0], bar, to)
        if OUTPUT:
            tma.async_copy_global_to_shared(d_squares, [c * 256 + 192, 64], bar, squares.index(stage))
        tma.async_copy_global_to_shared(d_decay, [c * 128], bar, lines.index(stage))


@gluon.jit
def _turn(
    R, S0, S1, left0, left1, zero, n, stop, count, d_o, i_b, i_h, i_v, token,
    tiles, values, squares, lines, out, full_early, empty_early, full, empty, OUTPUT: gl.constexpr,
):  # fmt: skip
    """Chunk n of ``count``, whose R is under way; the state decays for the next one where that is before ``stop``."""
    EARLY: gl.constexpr = values.shape[0]
    STAGES: gl.constexpr = lines.shape[0]
    PARTS: gl.constexpr = 3 if OUTPUT else 2
    stage = n % STAGES
    more = n + 1 < count
    R = warpgroup_mma_wait(0, [R])
    if OUTPUT:
        queries = tiles.index(PARTS * stage + 1)
        o = warpgroup_mma(left0, queries.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    R16 = gl.convert_layout(_rounded(R), LEFT)
    left = tiles.index(PARTS * stage + PARTS - 1)
    S0 = warpgroup_mma(R16, left.slice(0, 64, 1), S0, is_async=True)
    S1 = warpgroup_mma(R16, left.slice(64, 64, 1), S1, is_async=True)
    if OUTPUT:
        o = _times(left1, queries, 64, o)
        o = warpgroup_mma(R16, squares.index(stage).permute((1, 0)), o, is_async=True)
        # Beside these products the outputs of the chunk before leave.
        fence_async_shared()
        barrier()
        if n > 0:
            _leave(d_o, out, i_b, i_h, i_v, token + (n - 1) * 64)
        mbarrier.arrive(empty_early.index(n % EARLY), count=1)
    # Behind the last chunk the next one begins in vain, with what happens to be there.
    then = (n + 1) % EARLY
    mbarrier.wait(full_early.index(then), ((n + 1) // EARLY) & 1, pred=more)
    R = values.index(then).permute((1, 0)).load(HERE).to(gl.float32)
    S0, R = warpgroup_mma_wait(3 if OUTPUT else 1, [S0, R])
    left0 = gl.convert_layout(_rounded(S0), LEFT)
    R = _times(left0, tiles.index(PARTS * then), 0, R)
    S1 = warpgroup_mma_wait(2 if OUTPUT else 1, [S1])
    left1 = gl.convert_layout(_rounded(S1), LEFT)
    R = _times(left1, tiles.index(PARTS * then), 64, R)
    if OUTPUT:
        o = warpgroup_mma_wait(2, [o])
        tma.store_wait(0)
        barrier()
        out.permute((1, 0)).store(_rounded(o))
    else:
        barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    then = (n + 1) % STAGES
    mbarrier.wait(full.index(then), ((n + 1) // STAGES) & 1, pred=more)
    S0 = _decayed(S0, lines.index(then), 0, n + 1 < stop)
    S1 = _decayed(S1, lines.index(then), 64, n + 1 < stop)
    return R, S0, S1, left0, left1


@gluon.jit
def _state_warps(
    d_o, initial, s_sn, s_sh, s_sk, s_sv, final, ends, size, K, V, VP, i_n, i_b, i_h, i_v, segment, maps, leaves, token,
    count, length, tiles, values, squares, lines, out, full_early, empty_early, full, empty, carried, emptied,
    READY: gl.constexpr, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = lines.shape[0]
    key = gl.arange(0, 64, layout=ACROSS)[None, :]
    column = (i_v * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, HERE)))[:, None]
    initial += i_n.to(gl.int64) * s_sn + i_h.to(gl.int64) * s_sh
    S0 = _first_state(initial, s_sk, s_sv, K, V, VP, segment, key, column, HAS_INITIAL, OUTPUT)
    S1 = _first_state(initial, s_sk, s_sv, K, V, VP, segment, 64 + key, column, HAS_INITIAL, OUTPUT)
    if AHEAD:
        if segment > 0:
            S0, S1 = carry(maps, tiles, carried, emptied)
    zero = gl.zeros([64, 64], gl.float32, layout=HERE)
    left0 = gl.convert_layout(_rounded(S0), LEFT)
    left1 = gl.convert_layout(_rounded(S1), LEFT)
    mbarrier.wait(full_early.index(0), 0, pred=count > 0)
    R = values.index(0).permute((1, 0)).load(HERE).to(gl.float32)
    R = _times(left1, tiles.index(0), 64, _times(left0, tiles.index(0), 0, R))
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    S0 = _decayed(S0, lines.index(0), 0, count > 0)
    S1 = _decayed(S1, lines.index(0), 64, count > 0)
    if OUTPUT:
        for n in range(count):
            R, S0, S1, left0, left1 = _turn(
                R, S0, S1, left0, left1, zero, n, count, count, d_o, i_b, i_h, i_v, token,
                tiles, values, squares, lines, out, full_early, empty_early, full, empty, OUTPUT,
            )  # fmt: skip
    else:
        for begin in range(0, count, length):
            stop = gl.minimum(begin + length, count)
            for n in range(begin, stop):
                R, S0, S1, left0, left1 = _turn(
                    R, S0, S1, left0, left1, zero, n, stop, count, d_o, i_b, i_h, i_v, token,
                    tiles, values, squares, lines, out, full_early, empty_early, full, empty, OUTPUT,
                )  # fmt: skip
            _leave_map(S0, ends, VP, i_v, key, column)
            _leave_map(S1, ends, VP, i_v, 64 + key, column)
            ends += size
            S0 = _decayed(S0, lines.index(stop % STAGES), 0, stop < count)
            S1 = _decayed(S1, lines.index(stop % STAGES), 64, stop < count)
    if OUTPUT:
        fence_async_shared()
        barrier()
        _leave(d_o, out, i_b, i_h, i_v, token + (count - 1) * 64)
        tma.store_wait(0)
    warpgroup_mma_wait(0, [R])
    if leaves:
        gl.store(final + key * V + column, S0, mask=(key < K) & (column < V))
        gl.store(final + (64 + key) * V + column, S1, mask=(64 + key < K) & (column < V))
    if READY:
        previous_is_over()


@gluon.jit(do_not_specialize=["T", "first", "skip", "chunks", "length", "joined"])  # they change from run to run
def scan_channel(
    d_buffer, d_squares, d_v, d_decay, d_ends, announced, d_o, initial, s_sn, s_sh, s_sk, s_sv, final, ends,
    T, K, V, VP, HV, first, skip, chunks, length, joined,
    EARLY: gl.constexpr, STAGES: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """As :func:`.scan.scan`, of blocks of 64 columns, with tiles as :mod:`.fold` leaves them; d_squares describes their
    rows as two halves of 64 columns, and the first ``skip`` chunks of the tiles are left out. EARLY, STAGES: tiles in
    the two rings.

    Without OUTPUT a block takes ``joined`` segments and leaves what there is after each of them, the first block the
    state: ends ``[segments - 1, N * HV, VP + 128, 128]``, fp32, which d_ends describes as rows, B and A. AHEAD: after
    such a pass, and a block carries the state to its segment itself.
    """
    i_v = gl.program_id(0)
    segment = gl.program_id(2)
    i_n, i_h, i_b, tile, step, count, token, _ = locate_chunks(
        announced, announced, T, HV, first + skip, chunks, length if OUTPUT else length * joined, segment, False
    )  # fmt: skip
    tile += skip * step
    row = (i_n * HV + i_h) * (VP + 128)
    rows = step * (VP + 128)
    size = rows.to(gl.int64) * 128
    ends += row.to(gl.int64) * 128 + segment * joined * size
    maps = (segment + joined - 1) // joined
    final += (i_n * HV + i_h).to(gl.int64) * K * V
    leaves = segment == gl.num_programs(2) - 1
    if not OUTPUT:
        leaves = segment < 0
        count = gl.where((segment == 0) & (i_v * 64 >= VP), 0, count)
    # Of every chunk K_gated, Q_gated if there are outputs, and M^T K_decayed, in that order; K_gated of one more.
    PLACES: gl.constexpr = EARLY + 2 * STAGES if OUTPUT else EARLY + STAGES
    tiles = gl.allocate_shared_memory(gl.bfloat16, [PLACES, 64, 128], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [EARLY, 64, 64], TILE)
    squares = gl.allocate_shared_memory(gl.bfloat16, [STAGES if OUTPUT else 1, 64 if OUTPUT else 8, 64], TILE)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, 128], d_decay.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [64 if OUTPUT else 8, 64], TILE)
    full_early = barriers(EARLY)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    empty_early = empty
    if OUTPUT:
        empty_early = barriers(EARLY)
    carried = full
    emptied = empty
    if AHEAD:
        carried = barriers(PLACES)
        emptied = barriers(PLACES)
    fence_async_shared()
    barrier()
    if not READY:
        if not AHEAD:
            previous_is_over()
        next_may_start()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_state_warps, (
                d_o, initial, s_sn, s_sh, s_sk, s_sv, final, ends, size, K, V, VP, i_n, i_b, i_h, i_v, segment, maps,
                leaves, token, count, length, tiles, values, squares, lines, out, full_early, empty_early, full, empty,
                carried, emptied,
                READY, HAS_INITIAL, OUTPUT, AHEAD,
            )),
            (_load_warp, (
                d_buffer, d_squares, d_v, d_decay, d_ends, announced, i_b, i_h, i_v, step, tile, token, count,
                row, rows, VP, segment, joined, maps, tiles, values, squares, lines, full_early, empty_early, full,
                empty, carried, emptied, READY, OUTPUT, AHEAD,
            )),
        ],
        [1], [40],
    )  # fmt: skip
