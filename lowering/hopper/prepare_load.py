"""Gluon: the warps of the prepare kernels with a gate per channel that bring their tiles and announce what they left.

One is two tiles ahead at most, loads what else a tile needs as well, and works out where the tile is. Nobody else waits
for an answer of the memory or for a division, and but for the other one for what a tile left to be seen everywhere.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .common import TILE4, announce, barrier, fetch, fetch_bias, given_beta, given_rate, nth_tile, own_tiles

LOAD_REGISTERS = gl.constexpr(24)  # of a thread of this warp
ANNOUNCE_REGISTERS = gl.constexpr(24)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
LANE_PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def load_warp(
    d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places,
    T, K, HV, GROUP, batch, first, begin, total, rounds, early,
    inputs, gates, biases, numbers, betas, full, full_gates, inputs_free, gates_free,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, RATE: gl.constexpr,
):  # fmt: skip
    """``inputs`` holds k and q of two tiles, ``gates`` one or two, each with the barriers that free them.

    With the gates come dt_bias, exp(A_log) and how many tokens there are (see ``header``); RATE: what both are
    multiplied by, dt_bias by exp(A_log) as well, or 0: neither is.
    """
    WIDTH: gl.constexpr = inputs.shape[2]
    GATES: gl.constexpr = gates.shape[0]
    BITS: gl.constexpr = d_g.dtype.primitive_bitwidth
    WIDE: gl.constexpr = gl.BlockedLayout([WIDTH // 32], [32], [1], [0])
    place = gl.arange(0, 64, layout=LANE_PAIRS)
    column = gl.arange(0, WIDTH, layout=WIDE)
    number = gl.arange(0, 32, layout=LANES)
    block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
    for n in range(count):
        c = nth_tile(n, begin, total, block, step, rounds, early)
        i_b, token, end, i_h, A, b = fetch(
            c, T, HV, batch, first, places, A_log, beta, beta_sb, beta_st, beta_sh, place, HAS_A, HAS_BETA, PACKED
        )  # fmt: skip
        bias = fetch_bias(dt_bias, i_h, K, column, HAS_DT)
        if n >= GATES:
            mbarrier.wait(gates_free.index(n % GATES), (n // GATES + 1) & 1)
        bar = full_gates.index(n % GATES)
        mbarrier.expect(bar, 64 * WIDTH * (BITS // 8))
        to = gates.index(n % GATES)._reinterpret(d_g.dtype, [1, 64, 1, WIDTH], d_g.layout)
        tma.async_copy_global_to_shared(d_g, [i_b, token, i_h, 0], bar, to)
        if n >= 2:
            mbarrier.wait(inputs_free.index(n & 1), ((n >> 1) + 1) & 1)
        rows = full.index(n & 1)
        mbarrier.expect(rows, 2 * 64 * WIDTH * 2)
        k_to = inputs.index(2 * (n & 1))._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
        tma.async_copy_global_to_shared(d_k, [i_b, token, i_h // GROUP, 0], rows, k_to)
        q_to = inputs.index(2 * (n & 1) + 1)._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
        tma.async_copy_global_to_shared(d_q, [i_b, token, i_h // GROUP, 0], rows, q_to)
        rate = given_rate(A, HAS_A)
        bias = bias.to(gl.float32)
        if RATE != 0:
            rate = rate * RATE
            bias = bias * rate
        biases.index(n & 1).store(bias)
        rate = gl.zeros([32], gl.float32, layout=LANES) + rate
        numbers.index(n & 1).store(gl.where(number == 0, rate.to(gl.int32, bitcast=True), end - token))
        betas.index(n & 3).store(given_beta(b, token + place, end, SIGMOID_BETA))
        barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def announce_warp(
    announced, written, HV, first, places, begin, total, rounds, early, PACKED: gl.constexpr, READY: gl.constexpr
):  # fmt: skip
    """``written``: of four tiles, when all they leave is in memory. To say so takes a warp half a microsecond."""
    if READY:
        block, step, total, count = own_tiles(total, HV, first, places, begin, rounds, early, PACKED)
        for n in range(count):
            mbarrier.wait(written.index(n & 3), (n >> 2) & 1)
            announce(announced + nth_tile(n, begin, total, block, step, rounds, early), True)


@gluon.jit
def header(biases, numbers, slot, LINE: gl.constexpr):
    """What came with a tile's gates: dt_bias ``[1, 1, WIDTH]``, exp(A_log), the tokens to the end of its sequence."""
    bias = biases.index(slot).load(gl.SliceLayout(0, LINE))[None, None, :]
    rate = numbers.index(slot).slice(0, 1).load(gl.SliceLayout(0, LINE))[None, None, :]
    left = numbers.index(slot).slice(1, 1).load(gl.SliceLayout(0, LINE))[None, None, :]
    return bias, rate.to(gl.float32, bitcast=True), left


@gluon.jit
def header_buffers(WIDTH: gl.constexpr):
    """Shared memory for it, of two tiles, and for the betas of four: the gram warps read a tile's until they begin the
    next one, and the row warps are two ahead by then."""
    biases = gl.allocate_shared_memory(gl.float32, [2, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    betas = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return biases, numbers, betas
