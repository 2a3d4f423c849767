"""Gluon: what four warps of the backward's scan do, chunk by chunk, in either direction (see ``backward_scan.py``).

States are kept transposed, in registers: what a product leaves in an accumulator is already in place as the left
operand of the next one, so that a chunk's chain of three products meets no shared memory. All else runs beside these:
what leaves does so through shared memory, the reverse half's products of dO fill gaps, and the first product of the
next chunk that can is under way when a chunk's round of the loop ends.

The reverse half works on gradients over ``scale``, so that products of dO and of the states share accumulators.
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

from .backward_early import say_done
from .chunks import LINE, clear_beyond
from .common import ACROSS, LEFT, SQUARE, barrier, exp2, stores_done

KEYS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # [columns of V, K]; of tokens: SQUARE
LEFT_KEYS = gl.constexpr(gl.DotOperandLayout(0, KEYS.value, 2))
CHANNELS = gl.constexpr(gl.SliceLayout(0, KEYS.value))


@gluon.jit
def _state(base, st_k, st_v, HAS: gl.constexpr):
    d = gl.arange(0, 128, layout=CHANNELS)[None, :]
    c = gl.arange(0, 64, layout=gl.SliceLayout(1, KEYS))[:, None]
    s = gl.zeros([64, 128], gl.float32, layout=KEYS)
    if HAS:
        s += gl.load(base + d * st_k + c * st_v).to(gl.float32)
    return s


@gluon.jit
def _leave_state(base, s, V: gl.constexpr):
    d = gl.arange(0, 128, layout=CHANNELS)[None, :]
    c = gl.arange(0, 64, layout=gl.SliceLayout(1, KEYS))[:, None]
    gl.store(base + d * V + c, s)


@gluon.jit
def _left(x):
    """What products left, [64, 64 or 128], as the left operand of one over those columns."""
    return gl.convert_layout(x.to(gl.bfloat16), LEFT)


@gluon.jit
def _left_of_keys(x):
    return gl.convert_layout(x.to(gl.bfloat16), LEFT_KEYS)


@gluon.jit
def _begun(left, right):
    """[64, 64]: left right, under way."""
    zero = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _put(tile, x):
    """x, transposed, into a tile that leaves."""
    tile.permute((1, 0)).store(x.to(gl.bfloat16))


@gluon.jit
def leave_warp(
    d_state, d_solved, column, count, first, step, done, state, solved, left, freed,
    SOLVED: gl.constexpr, KEEP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """One warp, which has the copy engine take what the four leave: ``step`` tiles on from one to the next.

    With a state goes what the chunk before has solved. To say what is done takes a while, for which the four do not
    wait: it is the chunks but for the last two.
    """
    if KEEP:
        for n in range(count + 1):
            place = n & 1
            mbarrier.wait(left.index(place), (n >> 1) & 1)
            tile = first + n * step
            if SOLVED:
                if n > 0:
                    tma.async_copy_shared_to_global(d_solved, [(tile - step) * 64, column], solved.index(place))
            if n < count:
                tma.async_copy_shared_to_global(d_state, [tile * 128, column], state.index(place))
            tma.store_wait(2 if SOLVED else 1)
            barrier()
            mbarrier.arrive(freed.index(1 - place), count=1, pred=n > 0)
            if EARLY != "":
                if SOLVED:
                    gl.inline_asm_elementwise("cp.async.bulk.wait_group 2; // $0", "=r", [], gl.int32, False, 1)
                else:
                    gl.inline_asm_elementwise("cp.async.bulk.wait_group 1; // $0", "=r", [], gl.int32, False, 1)
                barrier()
                say_done(done, n - 1, count, EARLY)
        stores_done(True)
        barrier()
        say_done(done, count, count, EARLY)


@gluon.jit
def _all_here(left, n, KEEP: gl.constexpr):
    """What was in shared memory for the chunk before may be written over; what is to leave can."""
    if KEEP:
        fence_async_shared()
    barrier()
    if KEEP:
        mbarrier.arrive(left.index(n & 1), count=1)


@gluon.jit
def _await_place(freed, n):
    """Until what leaves with the state before the n-th chunk may be put in its place."""
    mbarrier.wait(freed.index(n & 1), ((n >> 1) & 1) ^ 1, pred=n > 1)


@gluon.jit
def _line(lines, stage):
    COUNT: gl.constexpr = lines.shape[1]
    return lines.index(stage)._reinterpret(gl.float32, [COUNT], LINE)


@gluon.jit
def _beta(beta_s, stage, BETA: gl.constexpr):
    b = gl.full([64], 1.0, gl.float32, layout=ACROSS)
    if BETA:
        b = _line(beta_s, stage).load(ACROSS)
    return b[None, :]


@gluon.jit
def _factor(gates_s, rates_s, stage, BEHIND: gl.constexpr, GATED: gl.constexpr, SCALAR: gl.constexpr,
            L2NORM: gl.constexpr):  # fmt: skip
    """Of a chunk's tokens: what multiplies products of its keys with the state before or, BEHIND, with that behind."""
    factor = gl.full([64], 1.0, gl.float32, layout=ACROSS)
    if GATED and SCALAR:
        gates = _line(gates_s, stage)
        until = gates.load(ACROSS)
        if BEHIND:
            until = gates.slice(63, 1).load(ACROSS) - until
        factor = exp2(until)
    if L2NORM and SCALAR:
        factor = factor * _line(rates_s, stage).slice(64, 64).load(ACROSS)
    return factor[None, :]


@gluon.jit
def _decayed(s, gates_s, stage, some, SCALAR: gl.constexpr, LAST: gl.constexpr):
    """s over a chunk, if there is ``some``; or at any rate, where nobody reads the LAST one."""
    gates = _line(gates_s, stage)
    if SCALAR:
        total = exp2(gates.slice(63, 1).load(CHANNELS))
    else:
        total = gates.load(CHANNELS)
    if LAST:
        total = gl.where(some, total, 1.0)
    return s * total[None, :]


@gluon.jit
def _lifted(do, gates_s, rates_s, stage, GATED: gl.constexpr, L2NORM: gl.constexpr):
    """dO as q meets it, times decays from the chunk's start and the rates of q: a left operand."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, LEFT_KEYS)
    x = do.load(LEFT_KEYS).to(gl.float32)
    if GATED:
        x = x * exp2(_line(gates_s, stage).load(TOKENS))[None, :]
    if L2NORM:
        x = x * _line(rates_s, stage).slice(0, 64).load(TOKENS)[None, :]
    return x.to(gl.bfloat16)


@gluon.jit
def _open_forward(
    s, n, count, length, met_s, gates_s, state, full,
    GATED: gl.constexpr, DELTA: gl.constexpr, SCALAR: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Begin the n-th chunk: its keys with the state before, which is kept in shared memory and decayed.

    Behind the last chunk what begins does so in vain, with what happens to be there. That reads of ``s`` are here and
    not in the next round of a loop matters: behind a branch the compiler would have products under way end first.
    """
    STAGES: gl.constexpr = met_s.shape[0]
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1, pred=n < count)
    if PACKED and SCALAR:
        clear_beyond(met_s.index(stage), length - n * 64, 4)
    s = warpgroup_mma_wait(0, [s])
    r = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    if DELTA:
        r = warpgroup_mma(_left(s), met_s.index(stage).permute((1, 0)), r, use_acc=False, is_async=True)
    if KEEP:
        _put(state.index(n & 1), s)
    if GATED:
        s = _decayed(s, gates_s, stage, n < count, SCALAR, not KEEP)
    return s, r


@gluon.jit
def forward_warps(
    given, g_sk, g_sv, last, count, length, v_s, x_s, kg_s, kd_s, beta_s, gates_s,
    rates_s, state, solved, full, empty, left, freed,
    V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, STATE: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The states before every chunk, and with the delta rule Y; or, without KEEP, the last states."""
    STAGES: gl.constexpr = v_s.shape[0]
    token = gl.arange(0, 64, layout=ACROSS)[None, :]
    met_s = kd_s if SCALAR or not DELTA else kg_s
    s = _state(given, g_sk, g_sv, STATE)
    s, r = _open_forward(s, 0, count, length, met_s, gates_s, state, full, GATED, DELTA, SCALAR, KEEP, PACKED)
    for n in range(count):
        stage = n % STAGES
        b = _beta(beta_s, stage, BETA)
        y = v_s.index(stage).permute((1, 0)).load(SQUARE).to(gl.float32)
        if PACKED:
            y = gl.where(token < length - n * 64, y, 0.0)
        _all_here(left, n, KEEP)
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
        if DELTA:
            r = warpgroup_mma_wait(0, [r])
            y = y - r * _factor(gates_s, rates_s, stage, False, GATED, SCALAR, L2NORM)
            y = warpgroup_mma(_left(y * -b), x_s.index(stage).permute((1, 0)), y, is_async=True)
        if DELTA:
            y = warpgroup_mma_wait(0, [y])
        b = b * _factor(gates_s, rates_s, stage, True, GATED, SCALAR, L2NORM)
        s = warpgroup_mma(_left_of_keys(y * b), kd_s.index(stage), s, is_async=True)
        if KEEP:
            _await_place(freed, n + 1)
            if DELTA:
                _put(solved.index((n + 1) & 1), y)
        s, r = _open_forward(s, n + 1, count, length, met_s, gates_s, state, full, GATED, DELTA, SCALAR, KEEP, PACKED)
    if DELTA:
        warpgroup_mma_wait(0, [r])
    if KEEP:
        _all_here(left, count, KEEP)
    else:
        _leave_state(last, s, V)


@gluon.jit
def _open_reverse(
    s, n, count, length, scale, do_s, p_s, kd_s, qg_s, gates_s, state, full, made,
    GATED: gl.constexpr, SCALAR: gl.constexpr, STATE: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The same in reverse, where it is what reaches V' from dO and from the state behind: with SCALAR each by itself.

    The last chunk of a sequence, which comes first, may have rows of the next one.
    """
    STAGES: gl.constexpr = do_s.shape[0]
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1, pred=n < count)
    if not PAIRS:
        mbarrier.wait(made.index(stage), (n // STAGES) & 1, pred=n < count)
    if PACKED:
        rows = length - (count - 1 - n) * 64
        clear_beyond(do_s.index(stage), rows, 4)
        if SCALAR:
            clear_beyond(kd_s.index(stage), rows, 4)
            clear_beyond(qg_s.index(stage), rows, 4)
    keys = kd_s.index(stage).permute((1, 0))
    z = _begun(do_s.index(stage).permute((1, 0)), p_s.index(stage))
    s = warpgroup_mma_wait(1, [s])
    more = scale  # nothing
    if SCALAR:
        more = _begun(_left(s), keys)
    else:
        z = warpgroup_mma(_left(s), keys, z, is_async=True)
    if KEEP:
        _put(state.index(n & 1), s * scale)
    if GATED:
        s = _decayed(s, gates_s, stage, n < count, SCALAR, STATE)
    return s, z, more


@gluon.jit
def reverse_warps(
    given, g_sk, g_sv, last, count, length, scale, over, times,
    do_s, p_s, x_s, kg_s, kd_s, qg_s, beta_s, gates_s, rates_s, state, solved,
    full, made, empty, late, used, left, freed,
    V: gl.constexpr, GATED: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr, SCALAR: gl.constexpr,
    L2NORM: gl.constexpr, STATE: gl.constexpr, FINAL: gl.constexpr, KEEP: gl.constexpr, PACKED: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """The gradients of the states behind every chunk, and Z; KEEP: whether they are kept, or the last state alone.

    The state that is given is over ``scale`` once it is divided by ``over``, and the last one leaves ``times`` that.
    """
    STAGES: gl.constexpr = do_s.shape[0]
    APART: gl.constexpr = DELTA and not SCALAR  # keys of the last product come and go by themselves
    s = _state(given, g_sk, g_sv, FINAL)
    if FINAL:
        s = s / over
    s, z, more = _open_reverse(
        s, 0, count, length, scale, do_s, p_s, kd_s, qg_s, gates_s, state, full, made, GATED, SCALAR, STATE, KEEP,
        PACKED, PAIRS,
    )  # fmt: skip
    for n in range(count):
        stage = n % STAGES
        do = do_s.index(stage).permute((1, 0))
        b = _beta(beta_s, stage, BETA)
        _all_here(left, n, KEEP)
        before = (n + STAGES - 1) % STAGES
        mbarrier.arrive(used.index(before) if APART else empty.index(before), count=1, pred=n > 0)
        if APART:
            mbarrier.wait(late.index(stage), (n // STAGES) & 1)
        if SCALAR:
            z, more = warpgroup_mma_wait(0, [z, more])
            z = z + more * _factor(gates_s, rates_s, stage, True, GATED, SCALAR, L2NORM)
        else:
            z = warpgroup_mma_wait(0, [z])
        if DELTA:
            z = warpgroup_mma(_left(z * -b), x_s.index(stage), z, is_async=True)
        if SCALAR:
            do = _lifted(do, gates_s, rates_s, stage, GATED, L2NORM)
        s = warpgroup_mma(do, qg_s.index(stage), s, is_async=True)
        if DELTA:
            z = warpgroup_mma_wait(1, [z])
            b = b * _factor(gates_s, rates_s, stage, False, GATED, SCALAR, L2NORM)
            lost = _left_of_keys(z * -b)
            s = warpgroup_mma(lost, kg_s.index(stage) if APART else kd_s.index(stage), s, is_async=True)
            s = warpgroup_mma_wait(1, [s])
        if APART:
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if KEEP:
            _await_place(freed, n + 1)
            _put(solved.index((n + 1) & 1), z * scale)
        s, z, more = _open_reverse(
            s, n + 1, count, length, scale, do_s, p_s, kd_s, qg_s, gates_s, state, full, made, GATED, SCALAR, STATE,
            KEEP, PACKED, PAIRS,
        )  # fmt: skip
    warpgroup_mma_wait(0, [z])
    if KEEP:
        _all_here(left, count, KEEP)
    if STATE:
        _leave_state(last, s * times, V)
