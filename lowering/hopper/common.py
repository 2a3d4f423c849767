"""Gluon: what the prepare kernels share: layouts, fast exponentials, gate functions, where a tile's tokens are."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..triton.load import load_source
from .gates import source

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

LOG2E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)  # tiles of q, k and g under way or in use

TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SEQUENCE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each of four warps holds all 64 tokens
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
QUARTER = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
DOWN = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
ACROSS = gl.constexpr(gl.SliceLayout(0, SQUARE.value))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE4 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@gluon.constexpr_function
def rows_layout(width):
    """Of token rows [8, 8, width]: warp w holds tokens 8 w .. 8 w + 7, a thread all eight of them in a few columns, so
    that the running sum of gates stays in the thread and a row's norm in the warp."""
    return gl.BlockedLayout([1, 8, width // 32], [1, 1, 32], [8, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def squares_rows(width):
    """Rows of ``width`` that M and A_qk take: side by side in 64, or one after the other."""
    return 64 * 128 // width


# 2^-256 of anything fp32 holds is 0, and 64 of these still leave a sum of log2 gates accurate to 2^-10.
FLOOR = gl.constexpr(-256.0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def exp2(x):
    # exp2 proper wraps this in a rescue of subnormal results; here they may flush to zero.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def tf32(x):
    """x with tf32's eleven bits, rounded to nearest: a product of fp32 tiles would cut the others off."""
    bits = gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], gl.int32, True, 1)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def sigmoid2(x):
    """sigmoid(x / log2 e)"""
    return reciprocal(1.0 + exp2(-x))


@gluon.jit
def magnitude(square):
    """The power of two 2^e, e in -64 .. 64, with ``square`` in [4^e, 4^(e + 1)): of a row of that squared norm."""
    e = ((square.to(gl.int32, bitcast=True) >> 23) - 127) >> 1
    return ((127 + e) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def over(power):
    """One over a power of two, exactly."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def pinned(x):
    """x, opaque: masks made from it are computed where they are used, not kept in registers across the loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _log2_1p(e):
    """log2(1 + e) for e in [0, 1]; the series where 1 + e would lose e's digits."""
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - 0.25 * e)))
    return gl.where(e < 0.03125, series * LOG2E, _log2(1.0 + e))


# What it is generated from reads the functions above, of a module that is being imported: not to be moved up.
_generated = load_source("log2_gates", source())
log2_gate, gate_slopes = _generated.log2_gate, _generated.gate_slopes


@gluon.jit
def given_rate(A_log, HAS_A: gl.constexpr):
    """exp(A_log) of a head, from what ``fetch`` returned; 1 without."""
    rate = 1.0
    if HAS_A:
        rate = gl.exp2(A_log.to(gl.float32) * LOG2E)
    return rate


@gluon.jit
def given_beta(b, token, end, SIGMOID: gl.constexpr):
    """Beta from what ``fetch`` returned, 0 from ``end`` on: rows there then leave nothing in the state."""
    b = b.to(gl.float32)
    if SIGMOID:
        b = sigmoid2(b * LOG2E)
    return gl.where(token < end, b, 0.0)


@gluon.jit
def locate(c, T, HV, batch, first, places, PACKED: gl.constexpr):
    """Of tile c: batch entry, first token, end of its sequence, value head.

    Heads vary fastest, so blocks side by side share DRAM pages; then batch entries, then chunks, in the order in which
    a scan wants them. Packed sequences have a table, see ``packing.py``.
    """
    i_h = c % HV
    n = c // HV
    if PACKED:
        at = places + 2 * (1 + first + n)
        i_b = n * 0
        token = gl.load(at)
        end = gl.load(at + 1)
    else:
        i_b = n % batch
        token = (first + n // batch) * 64
        end = T
    return i_b, token, end, i_h


@gluon.jit
def nth_tile(n, begin, total, worker, workers, rounds, early):
    """A worker's n-th tile of ``begin .. total``; ``total`` or more where it has fewer.

    The first ``early`` of the workers leave after ``rounds`` tiles; ``begin + rounds * workers <= total`` where any do.
    """
    late = begin + rounds * workers + (n - rounds) * (workers - early) + worker - early
    return gl.where(n < rounds, begin + n * workers + worker, gl.where(worker < early, total, late))


@gluon.jit
def tile_count(begin, total, worker, workers, rounds, early):
    """How many tiles that makes."""
    rest = workers - early
    left = total - begin - rounds * workers - (worker - early)
    return rounds + gl.where(worker < early, 0, gl.maximum(left + rest - 1, 0) // rest)


@gluon.jit
def announce(flag, some):
    """Set ``flag``, if ``some``: who sees that sees what came before the last barrier of these warps.

    What they had waited for until then, other warps' writes too, came before.
    """
    if some:
        gl.atomic_add(flag, 1, sem="release", scope="gpu")


@gluon.jit
def stores_done(READY: gl.constexpr):
    """Wait for the copies this thread has sent out: READY until they are in memory, else until their source is free."""
    if READY:
        gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], gl.int32, False, 1)
    else:
        tma.store_wait(0)


@gluon.jit
def barriers(N: gl.constexpr):
    """To be told that one of N tiles is full, or empty."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(N):
        mbarrier.init(bars.index(n), count=1)
    return bars


@gluon.jit
def await_tiles(flags, n, count, step):
    """Wait, in one warp, until its n-th tile has been announced, and say up to which tile all have.

    Its tiles are ``step`` flags apart. Whoever is told may read them, the copy engine too.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    at = flags.to(gl.int64) + 4 * (gl.minimum(n + lane, count - 1) * step).to(gl.int64)
    seen = _leading(at, lane)
    while seen == 0:
        seen = _leading(at, lane)
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [lane], gl.int32, False, 1)
    barrier()
    return n + seen


@gluon.jit
def _leading(at, lane):
    flags = gl.inline_asm_elementwise("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], gl.int32, False, 1)
    return gl.min(gl.where(flags > 0, 32, lane), 0)


@gluon.jit
def next_may_start():
    """From here on the next kernel may take what blocks of this one leave, if it was launched to run beside.

    It starts once every block has come here: each is at work then, and what the next one waits for will come.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def previous_is_over():
    """Wait until the kernel before this one is over and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def fetch(
    c, T, HV, batch, first, places, A_log, beta, beta_sb, beta_st, beta_sh, place,
    HAS_A: gl.constexpr, HAS_BETA: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Where tile c is (see ``locate``), its head's A_log and its tokens' beta as given.

    A sixth of a tile's time goes by before these loads return; called a tile ahead they cost registers, and more time.
    """
    i_b, token, end, i_h = locate(c, T, HV, batch, first, places, PACKED)
    A = i_h
    if HAS_A:
        A = gl.load(A_log + i_h)
    LAYOUT: gl.constexpr = place.type.layout
    b = gl.full([64], 1.0, gl.float32, layout=LAYOUT)
    if HAS_BETA:
        at = beta + i_b.to(gl.int64) * beta_sb + i_h.to(gl.int64) * beta_sh + (token + place).to(gl.int64) * beta_st
        b = gl.load(at, mask=token + place < end, other=0.0)
    return i_b, token, end, i_h, A, b


@gluon.jit
def fetch_bias(dt_bias, i_h, K, column, HAS_DT: gl.constexpr):
    """dt_bias ``[HV, K]`` of a head; 0 without."""
    LAYOUT: gl.constexpr = column.type.layout
    bias = gl.zeros([column.shape[0]], gl.float32, layout=LAYOUT)
    if HAS_DT:
        bias = gl.load(dt_bias + i_h * K + column, mask=column < K, other=0.0)
    return bias


@gluon.jit
def tiles_of(total, HV, first, places, PACKED: gl.constexpr):
    """How many tiles there are: of packed sequences ``total`` is the most there can be."""
    if PACKED:
        total = gl.minimum(total, (gl.load(places) - first) * HV)
    return total


@gluon.jit
def own_tiles(total, HV, first, places, begin, rounds, early, PACKED: gl.constexpr):
    """A block's number and how many blocks there are, how many tiles there are and how many of them are its own."""
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    total = tiles_of(total, HV, first, places, PACKED)
    return block, blocks, total, tile_count(begin, total, block, blocks, rounds, early)


@gluon.jit
def rows_of(tile):
    """A tile [64, WIDTH] as fp32 [8, 8, WIDTH]."""
    WIDTH: gl.constexpr = tile.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([8, WIDTH // 32], [1, 32], [8, 1], [1, 0])
    return gl.convert_layout(gl.reshape(tile.load(FLAT), [8, 8, WIDTH]), rows_layout(WIDTH)).to(gl.float32)


@gluon.jit
def rows_within(tile, live, PACKED: gl.constexpr):
    """The same without the rows of the next sequence; beyond the last one the copy engine filled in zeros."""
    x = rows_of(tile)
    if PACKED:
        x = gl.where(live, x, 0.0)
    return x


@gluon.jit
def put(tile, x):
    tile.store(gl.reshape(x.to(gl.bfloat16), [64, tile.shape[1]]))
