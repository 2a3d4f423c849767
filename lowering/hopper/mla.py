"""Gluon: MLA decoding over a latent cache, R = 512 and D = 64, 64 rows (queries times heads) of a request a program.

The accumulator, 64 x 512 in fp32, fills half a multiprocessor's registers, so three warpgroups share a program. One
takes the scores and the softmax; two multiply by a half of the latent each, and refill what they have read::

    scores:  S = Q c^T + Q' r^T      P = exp2(k S - m)      P and the change of m to shared memory
    values:  acc = acc exp2(m_old - m) + P c[:, half]

Blocks of 64 tokens arrive in halves, 64 x 256, in a ring of five: block i is entries 2i and 2i + 1. Three slots hold
its rope, and then, once the scores are done, its P. The left half of Q lives in registers, which pays for the ring.
The running maximum follows the scores lazily: only when they outgrow it by 2^8 is the accumulator rescaled.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE3 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
HALVES = gl.constexpr(5)  # entries of the ring
ROPES = gl.constexpr(3)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # below any score, and far enough from -inf for differences to be numbers
LAZY = gl.constexpr(8.0)  # binary orders by which scores may outgrow the maximum


@gluon.jit
def _load(d_cache, table, request, block, column, bar, to, PAGE: gl.constexpr, WIDTH: gl.constexpr):
    """Copy WIDTH columns of a block of 64 tokens; the barrier expects them."""
    tile = to._reinterpret(d_cache.dtype, [1, 64, WIDTH], TILE3)
    if PAGE == 0:
        tma.async_copy_global_to_shared(d_cache, [request, block * 64, column], bar, tile)
    else:
        page = gl.load(table + block // (PAGE // 64)).to(gl.int32)
        tma.async_copy_global_to_shared(d_cache, [page, (block % (PAGE // 64)) * 64, column], bar, tile)


@gluon.jit
def _clear_tail(half, owned):
    """Zero the rows of a half from ``owned`` on: they belong to nobody, and 0 times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    for j in gl.static_range(4):
        part = half.slice(64 * j, 64, 1)
        x = part.load(LAYOUT)
        part.store(gl.where((rows < owned)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _score_warps(
    d_c, table, mask, request, low, blocks, length, seen_first, seen, q_right, q_rope, halves, ropes, alphas, inverses,
    q_left_full, q_full, half_full, rope_full, p_full, done, scale, sinks, sums, sums_stride, heads, first_row, rows,
    whole, PAGE: gl.constexpr, MASK: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    m = gl.full([64], LOWEST, gl.float32, ROW)
    total = gl.full([64], 0.0, gl.float32, ROW)
    zero = gl.full([64, 64], 0.0, gl.float32, SCORES)
    # The left half of Q came in the ring's last entry, which is block 2's once Q has gone on to registers.
    mbarrier.wait(q_left_full, 0)
    q_left = halves.index(4).load(gl.DotOperandLayout(0, SCORES, 2))
    barrier()
    if blocks > 2:
        mbarrier.expect(half_full.index(4), 64 * 256 * 2)
        _load(d_c, table, request, low + 2, 0, half_full.index(4), halves.index(4), PAGE, 256)
    mbarrier.wait(q_full, 0)
    for i in range(blocks):
        token = (low + i) * 64
        if MASK:
            visible = gl.load(mask + token + column, mask=token + column < length, other=0) != 0
        left, right, third = (2 * i) % HALVES, (2 * i + 1) % HALVES, i % ROPES
        mbarrier.wait(half_full.index(left), (2 * i // HALVES) & 1)
        s = warpgroup_mma(q_left, halves.index(left).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(rope_full.index(third), (i // ROPES) & 1)
        s = warpgroup_mma(q_rope, ropes.index(third).permute((1, 0)), s, is_async=True)
        mbarrier.wait(half_full.index(right), ((2 * i + 1) // HALVES) & 1)
        s = warpgroup_mma(q_right, halves.index(right).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if MASK:
            s = gl.where(visible[None, :], s, float("-inf"))
        if token + 64 > seen_first:
            s = gl.where((token + column)[None, :] < seen[:, None], s, float("-inf"))
        if token + 64 > length:
            _clear_tail(halves.index(left), length - token)
            _clear_tail(halves.index(right), length - token)
        largest = gl.max(s, 1)
        larger = gl.where((largest - m) * scale > LAZY, largest, m)
        alpha = gl.exp2((m - larger) * scale)
        p = gl.exp2(s * scale - (larger * scale)[:, None])
        barrier()
        ropes.index(third).store(p.to(d_c.dtype))
        alphas.index(third).store(alpha)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(third), count=1)
        total = total * alpha + gl.sum(p, 1)
        m = larger
    row = first_row + gl.arange(0, 64, ROW)
    found = total > 0
    inverse = gl.where(found, 1.0 / total, 0.0)
    lse = (m * scale + gl.log2(total)) * LN2
    if whole:
        lse = gl.where(found, lse, float("inf"))
        if HAS_SINKS:
            sink = gl.load(sinks + row % heads, mask=row < rows, other=0.0).to(gl.float32)
            inverse = inverse / (1.0 + gl.exp2((sink - lse) * LOG2E))
        to = (row % heads) * sums_stride + row // heads
    else:
        lse = gl.where(found, lse, float("-inf"))
        to = row
    inverses.store(inverse)
    barrier()
    mbarrier.arrive(done, count=1)
    gl.store(sums + to, lse, mask=row < rows)


@gluon.jit
def _value_warps(
    d_c, d_r, table, request, low, blocks, halves, ropes, alphas, inverses,
    half_full, rope_full, p_full, p_free, done, o, part_o, first_row, rows, whole,
    HALF: gl.constexpr, PAGE: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    for i in range(blocks):
        third, entry = i % ROPES, (2 * i + HALF) % HALVES
        mbarrier.wait(half_full.index(entry), ((2 * i + HALF) // HALVES) & 1)
        mbarrier.wait(p_full.index(third), (i // ROPES) & 1)
        if gl.max((alphas.index(third).load(FLAT) != 1.0).to(gl.int32), 0) != 0:
            acc = acc * alphas.index(third).load(ROW)[:, None]
        product = warpgroup_mma(ropes.index(third), halves.index(entry), acc, is_async=True)
        # Five entries on, a left half's place is taken by the right half of block i + 2, a right half's by the left
        # half of block i + 3. Its barrier is armed while the product runs.
        following = i + 2 + HALF
        more, more_rope = following < blocks, i + ROPES < blocks
        mbarrier.expect(half_full.index(entry), 64 * 256 * 2, pred=more)
        if HALF == 1:
            mbarrier.expect(rope_full.index(third), 64 * 64 * 2, pred=more_rope)
        acc = warpgroup_mma_wait(0, deps=[product])
        barrier()
        if more:
            to = halves.index(entry)
            _load(d_c, table, request, low + following, (1 - HALF) * 256, half_full.index(entry), to, PAGE, 256)
        if HALF == 0:
            mbarrier.arrive(p_free.index(third), count=1)
        else:
            mbarrier.wait(p_free.index(third), (i // ROPES) & 1)
            if more_rope:
                _load(d_r, table, request, low + i + 3, 0, rope_full.index(third), ropes.index(third), PAGE, 64)
    mbarrier.wait(done, 0)
    acc = acc * inverses.load(ROW)[:, None]
    row = first_row + gl.arange(0, 64, ROW)
    column = HALF * 256 + gl.arange(0, 256, gl.SliceLayout(0, VALUES))
    to = row[:, None] * 512 + column[None, :]
    inside = (row < rows)[:, None]
    if PARTIAL:
        if whole:
            gl.store(o + to, acc.to(o.dtype.element_ty), mask=inside)
        else:
            gl.store(part_o + to, acc, mask=inside)
    else:
        gl.store(o + to, acc.to(o.dtype.element_ty), mask=inside)


@gluon.jit
def attend(
    d_q, d_q_rope, d_c, d_r, table, table_sb, lengths, mask, mask_sb, sinks, items, o, lse, part_o, part_lse,
    scale, T, H, ROWS, WIDTH, SPLITS,
    PAGE: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINKS: gl.constexpr,
    SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of 64 rows, items. Arguments and results are those of ``lowering/triton/mla.py``.

    d_q ``[B, ROWS, 512]`` and d_q_rope ``[B, ROWS, 64]``; d_c ``[B, S, 512]`` and d_r ``[B, S, 64]``, or pages of PAGE
    tokens. ``mask``: a byte for each token of each request, 0 where no row may see it. ``scale``: of the scores, times
    log2 e.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    item = gl.program_id(1)
    first_row = gl.program_id(0) * 64
    rows = ROWS
    whole = not PARTIAL
    slot = item
    if SCHEDULED:
        request = gl.load(items + item * 4)
        if request < 0:  # beyond the last item: nothing to read, nothing to write
            rows = 0
        request = gl.maximum(request, 0)
        slot = gl.load(items + item * 4 + 3)
        if PARTIAL:
            whole = slot < 0
    else:
        request = item // SPLITS
    length = WIDTH
    if HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths + request).to(gl.int32), 0), WIDTH)
    blocks = (length + 63) // 64
    if SCHEDULED:
        low = gl.load(items + item * 4 + 1)
        high = gl.minimum(gl.load(items + item * 4 + 2), blocks)
    else:
        each = (blocks + SPLITS - 1) // SPLITS
        low = (item % SPLITS) * each
        high = gl.minimum(low + each, blocks)
    seen_first = length
    seen = gl.full([64], 0, gl.int32, gl.SliceLayout(1, SCORES)) + length
    if CAUSAL:
        row = first_row + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        seen = length - T + row // H + 1
        seen_first = length - T + first_row // H + 1
        seen_last = length - T + gl.minimum(first_row + 63, ROWS - 1) // H + 1
        high = gl.minimum(high, (seen_last + 63) // 64)
    blocks = gl.where(rows > 0, gl.maximum(high - low, 0), 0)
    table += request.to(gl.int64) * table_sb
    mask += request.to(gl.int64) * mask_sb

    q_right = gl.allocate_shared_memory(d_q.dtype, [64, 256], TILE)
    q_rope = gl.allocate_shared_memory(d_q.dtype, [64, 64], TILE)
    halves = gl.allocate_shared_memory(d_q.dtype, [HALVES, 64, 256], TILE)
    ropes = gl.allocate_shared_memory(d_q.dtype, [ROPES, 64, 64], TILE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alphas = gl.allocate_shared_memory(gl.float32, [ROPES, 64], flat)
    inverses = gl.allocate_shared_memory(gl.float32, [64], flat)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_left_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    done = gl.allocate_shared_memory(gl.int64, [1], bars)
    half_full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], bars)
    rope_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_free = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    mbarrier.init(q_left_full, count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=1)
    for j in gl.static_range(ROPES):
        mbarrier.init(rope_full.index(j), count=1)
        mbarrier.init(p_full.index(j), count=1)
        mbarrier.init(p_free.index(j), count=1)
    for j in gl.static_range(HALVES):
        mbarrier.init(half_full.index(j), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(q_left_full, 64 * 256 * 2)
    _load_q(d_q, request, first_row, 0, q_left_full, halves.index(4), 256)
    mbarrier.expect(q_full, 64 * 320 * 2)
    _load_q(d_q, request, first_row, 256, q_full, q_right, 256)
    _load_q(d_q_rope, request, first_row, 0, q_full, q_rope, 64)
    for i in gl.static_range(ROPES):
        if i < blocks:
            if i < 2:
                for half in gl.static_range(2):
                    mbarrier.expect(half_full.index(2 * i + half), 64 * 256 * 2)
                    to = halves.index(2 * i + half)
                    _load(d_c, table, request, low + i, 256 * half, half_full.index(2 * i + half), to, PAGE, 256)
            mbarrier.expect(rope_full.index(i), 64 * 64 * 2)
            _load(d_r, table, request, low + i, 0, rope_full.index(i), ropes.index(i), PAGE, 64)

    if PARTIAL:
        place = gl.where(whole, 0, slot).to(gl.int64) * ROWS
        part_o += place * 512
        part_lse += place
    o += request.to(gl.int64) * ROWS * 512
    lse += request.to(gl.int64) * ROWS
    if PARTIAL:
        sums = part_lse
        if whole:
            sums = lse
    else:
        sums = lse
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_score_warps, (
                d_c, table, mask, request, low, blocks, length, seen_first, seen, q_right, q_rope, halves, ropes,
                alphas, inverses, q_left_full, q_full, half_full, rope_full, p_full, done, scale, sinks, sums, T, H,
                first_row, rows, whole, PAGE, MASK, HAS_SINKS,
            )),
            (_value_warps, (
                d_c, d_r, table, request, low, blocks, halves, ropes, alphas, inverses, half_full, rope_full, p_full,
                p_free, done, o, part_o, first_row, rows, whole, gl.constexpr(0), PAGE, PARTIAL,
            )),
            (_value_warps, (
                d_c, d_r, table, request, low, blocks, halves, ropes, alphas, inverses, half_full, rope_full, p_full,
                p_free, done, o, part_o, first_row, rows, whole, gl.constexpr(1), PAGE, PARTIAL,
            )),
        ],
        [4, 4], [168, 168],  # a third of the registers each: with fewer or more ptxas spills or serialises products
    )  # fmt: skip


@gluon.jit
def _load_q(d_q, request, row, column, bar, to, WIDTH: gl.constexpr):
    tma.async_copy_global_to_shared(d_q, [request, row, column], bar, to._reinterpret(d_q.dtype, [1, 64, WIDTH], TILE3))
