"""Gluon: MLA decoding over a latent cache, R = 512 and D = 64, 64 rows (queries times heads) of a request a program.

The accumulator, 64 x 512 in fp32, fills half a multiprocessor's registers, so three warpgroups share a program. One
takes the scores and the softmax; two multiply by a half of the latent each, and refill what they have read::

    scores:  S = Q c^T + Q' r^T      P = exp2(k S - m)      P and the change of m to shared memory
    values:  acc = acc exp2(m_old - m) + P c[:, half]

An item's blocks go from the last to the first: what belongs to nobody is at the end, and is dealt with before the loop.
The tensor cores take the scores of block i + 1, then the values of block i while block i + 1 has its softmax: values
wait for the scores after theirs. For that a block must be there while the one before is still read, and another on its
way: the ring has three. All but 64 of Q's 512 columns live in registers, which pays for it. Blocks of 64 tokens arrive
in halves, 64 x 256; in the ring, the left ones come first. Two slots hold the rope of a block and then, once its
scores are done, its P. The accumulator is rescaled in every block, while the tensor cores have the next scores: the
largest weight of a row is then exactly 1, which 16 bits keep, and not some number near it.
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
BLOCKS = gl.constexpr(3)  # of the ring
ROPES = gl.constexpr(2)  # slots of a block's rope, then its P
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # below any score, and far enough from -inf for differences to be numbers


@gluon.jit
def _load(d_cache, table, request, block, column, bar, to, PAGE: gl.constexpr, WIDTH: gl.constexpr):
    """Copy WIDTH columns of a block of 64 tokens; the barrier expects them."""
    outer, row = _place(table, request, block, PAGE)
    tile = to._reinterpret(d_cache.dtype, [1, 64, WIDTH], TILE3)
    tma.async_copy_global_to_shared(d_cache, [outer, row, column], bar, tile)


@gluon.jit
def _place(table, request, block, PAGE: gl.constexpr):
    """Where a block begins: the request or the page, and the row of it."""
    outer, row = request, block * 64
    if PAGE != 0:
        outer = gl.load(table + block // (PAGE // 64)).to(gl.int32)
        row = (block % (PAGE // 64)) * 64
    return outer, row


@gluon.jit
def _fetch(k_rope, step, row_step, table, request, block, PAGE: gl.constexpr):
    """Ask L2 for the rope of a block, which is copied late: a P is in its place until then."""
    outer, row = _place(table, request, block, PAGE)
    rows = row + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    at = k_rope + outer.to(gl.int64) * step + rows.to(gl.int64) * row_step
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], gl.int32, False, 1)


@gluon.jit
def _clear_tail(halves, entry, owned):
    """Zero the rows of a half from ``owned`` on: they belong to nobody, and 0 times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    tiles = halves._reinterpret(gl.int32, [2 * BLOCKS * 8, 32, 32], gl.NVMMASharedLayout(128, 32, 2))
    for j in range(8):  # a few registers at a time
        tile = tiles.index(8 * entry + j)
        x = tile.load(LAYOUT)
        tile.store(gl.where((rows + 32 * (j % 2) < owned)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _bits(mask, token, owned):
    """Which of 32 tokens a mask shows, in one register."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    shown = gl.load(mask + token + lane, mask=token + lane < owned, other=0) != 0
    return gl.sum(shown.to(gl.int32) << lane, 0)


@gluon.jit
def _owner(items, SPLITS, SCHEDULED: gl.constexpr):
    """The request of this program's item (-1: none), and the slot of its partial result (-1: it is no part)."""
    item = gl.program_id(1)
    request, slot = item // SPLITS, item
    if SCHEDULED:
        request, slot = gl.load(items + item * 4), gl.load(items + item * 4 + 3)
    return request, slot


@gluon.jit
def _score_warps(
    d_c, k_rope, rope_sp, rope_sr, table, mask, request, last, blocks, owned, seen_first, seen, q_last, q_rope,
    halves, ropes, alphas, inverses, q_full, half_full, rope_full, scored, p_full, done, scale, sinks, items, lse,
    part_lse, T, H, ROWS, SPLITS,
    PAGE: gl.constexpr, MASK: gl.constexpr, HAS_SINKS: gl.constexpr, SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    m = gl.full([64], LOWEST, gl.float32, ROW)
    total = gl.full([64], 0.0, gl.float32, ROW)
    zero = gl.full([64, 64], 0.0, gl.float32, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    if (blocks > 0) & (owned < 64):
        for half in gl.static_range(2):
            mbarrier.wait(half_full.index(BLOCKS * half), 0)
            _clear_tail(halves, BLOCKS * half, owned)
    # Q came in the ring's last place, which is block 2's once Q has gone on to registers.
    mbarrier.wait(q_full, 0)
    pairs = halves._reinterpret(d_c.dtype, [2 * BLOCKS * 2, 64, 128], TILE)
    fourths = halves._reinterpret(d_c.dtype, [2 * BLOCKS * 4, 64, 64], TILE)
    q_a, q_b, q_c = halves.index(2).load(OPERAND), pairs.index(10).load(OPERAND), fourths.index(22).load(OPERAND)
    q_last.store(fourths.index(23).load(SCORES))
    fence_async_shared()
    barrier()
    if blocks > 2:
        for half in gl.static_range(2):
            mbarrier.expect(half_full.index(2 + BLOCKS * half), 64 * 256 * 2)
            to = halves.index(2 + BLOCKS * half)
            _load(d_c, table, request, last - 2, 256 * half, half_full.index(2 + BLOCKS * half), to, PAGE, 256)
    for i in range(blocks):
        token = -64 * i  # after the last block's first
        if MASK:
            shown, shown_later = _bits(mask, token, owned), _bits(mask, token + 32, owned)
        third, rope, phase = i % BLOCKS, i % ROPES, (i // BLOCKS) & 1
        left, right = third, third + BLOCKS
        mbarrier.wait(half_full.index(left), phase)
        s = warpgroup_mma(q_a, halves.index(left).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(half_full.index(right), phase)
        s = warpgroup_mma(q_b, pairs.index(2 * right).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_c, fourths.index(4 * right + 2).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_last, fourths.index(4 * right + 3).permute((1, 0)), s, is_async=True)
        if i + 2 < blocks:
            _fetch(k_rope, rope_sp, rope_sr, table, request, last - i - 2, PAGE)
        mbarrier.wait(rope_full.index(rope), (i // ROPES) & 1)
        s = warpgroup_mma(q_rope, ropes.index(rope).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        barrier()
        mbarrier.arrive(scored.index(rope), count=1)
        if MASK:
            visible = (gl.where(column < 32, shown, shown_later) >> (column % 32)) & 1
            s = gl.where((visible != 0)[None, :], s, float("-inf"))
        if token + 64 > seen_first:
            s = gl.where((token + column)[None, :] < seen[:, None], s, float("-inf"))
        largest = gl.max(s, 1)
        larger = gl.maximum(m, largest)
        alpha = gl.exp2((m - larger) * scale)
        p = gl.exp2(s * scale - (larger * scale)[:, None])
        ropes.index(rope).store(p.to(d_c.dtype))
        alphas.index(rope).store(alpha)
        fence_async_shared()
        barrier()
        mbarrier.arrive(p_full.index(rope), count=1)
        total = total * alpha + gl.sum(p, 1)
        m = larger
    _finish(m, total, inverses, scale, sinks, items, lse, part_lse, T, H, ROWS, SPLITS, HAS_SINKS, SCHEDULED, PARTIAL)
    mbarrier.arrive(done, count=1)


@gluon.jit
def _finish(
    m, total, inverses, scale, sinks, items, lse, part_lse, T, H, ROWS, SPLITS,
    HAS_SINKS: gl.constexpr, SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """The logarithm of the rows' sums, and what their values are multiplied by."""
    request, slot = _owner(items, SPLITS, SCHEDULED)  # read once more: the scores have no registers to keep it in
    row = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    found = total > 0
    inverse = gl.where(found, 1.0 / total, 0.0)
    sums = (m * scale + gl.log2(total)) * LN2
    inside = (row < ROWS) & (request >= 0)
    if PARTIAL and slot >= 0:
        gl.store(part_lse + slot.to(gl.int64) * ROWS + row, gl.where(found, sums, float("-inf")), mask=inside)
    if not PARTIAL or slot < 0:
        sums = gl.where(found, sums, float("inf"))
        if HAS_SINKS:
            sink = gl.load(sinks + row % H, mask=inside, other=0.0).to(gl.float32)
            inverse = inverse / (1.0 + gl.exp2((sink - sums) * LOG2E))
        gl.store(lse + request.to(gl.int64) * ROWS + (row % H) * T + row // H, sums, mask=inside)
    inverses.store(inverse)
    barrier()


@gluon.jit
def _value_warps(
    d_c, d_r, table, request, last, blocks, halves, ropes, alphas, inverses,
    half_full, rope_full, scored, p_full, p_free, done, d_o, d_part, slot, first_row, rows,
    HALF: gl.constexpr, PAGE: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    for i in range(blocks):
        rope, rope_phase = i % ROPES, (i // ROPES) & 1
        entry = i % BLOCKS + BLOCKS * HALF
        mbarrier.wait(half_full.index(entry), (i // BLOCKS) & 1)
        mbarrier.wait(p_full.index(rope), rope_phase)
        acc = acc * alphas.index(rope).load(ROW)[:, None]
        if i + 1 < blocks:  # the next scores go first: their softmax then runs beside this product
            mbarrier.wait(scored.index((i + 1) % ROPES), ((i + 1) // ROPES) & 1)
        product = warpgroup_mma(ropes.index(rope), halves.index(entry), acc, is_async=True)
        more, more_rope = i + BLOCKS < blocks, i + ROPES < blocks
        mbarrier.expect(half_full.index(entry), 64 * 256 * 2, pred=more)
        if HALF == 1:
            mbarrier.expect(rope_full.index(rope), 64 * 64 * 2, pred=more_rope)
        acc = warpgroup_mma_wait(0, deps=[product])
        barrier()
        if HALF == 0:
            mbarrier.arrive(p_free.index(rope), count=1)
        if more:
            to = halves.index(entry)
            _load(d_c, table, request, last - i - BLOCKS, HALF * 256, half_full.index(entry), to, PAGE, 256)
        if HALF == 1:
            mbarrier.wait(p_free.index(rope), rope_phase)
            if more_rope:
                _load(d_r, table, request, last - i - ROPES, 0, rope_full.index(rope), ropes.index(rope), PAGE, 64)
    mbarrier.wait(done, 0)
    acc = acc * inverses.load(ROW)[:, None]
    if rows > 0:
        if not PARTIAL or slot < 0:
            _store(acc, d_o, request, first_row, halves, HALF)
        else:
            _store(acc, d_part, slot, first_row, halves, HALF)


@gluon.jit
def _store(acc, d_out, which, first_row, halves, HALF: gl.constexpr):
    """Through the ring's places of this half; the copy engine clips what is beyond the last row."""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, d_out.layout.element_bitwidth, 2)
    DEEP: gl.constexpr = gl.NVMMASharedLayout(128, d_out.layout.element_bitwidth, 3)
    room = halves.index(BLOCKS * HALF)
    room._reinterpret(d_out.dtype, [64, 256], FLAT).store(acc.to(d_out.dtype))
    fence_async_shared()
    barrier()
    tile = room._reinterpret(d_out.dtype, [1, 64, 256], DEEP)
    tma.async_copy_shared_to_global(d_out, [which, first_row, 256 * HALF], tile)
    tma.store_wait(0)


@gluon.jit
def attend(
    d_q, d_q_rope, d_c, d_r, k_rope, rope_sp, rope_sr, table, table_sb, lengths, mask, mask_sb, sinks, items, d_o,
    d_part, lse, part_lse, scale, T, H, ROWS, WIDTH, SPLITS,
    PAGE: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINKS: gl.constexpr,
    SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of 64 rows, items. Arguments and results are those of ``lowering/triton/mla.py``.

    d_q ``[B, ROWS, 512]`` and d_q_rope ``[B, ROWS, 64]``; d_c ``[B, S, 512]`` and d_r ``[B, S, 64]``, or pages of PAGE
    tokens; k_rope is what d_r describes. d_o ``[B, ROWS, 512]``, d_part ``[slots, ROWS, 512]``. ``mask``: a byte for
    each token of each request, 0 where no row may see it. ``scale``: of the scores, times log2 e.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    item = gl.program_id(1)
    first_row = gl.program_id(0) * 64
    rows = ROWS
    request, slot = _owner(items, SPLITS, SCHEDULED)
    if request < 0:  # beyond the last item: nothing to read, nothing to write
        rows = 0
    request = gl.maximum(request, 0)
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
    last = high - 1
    ahead = last * 64  # tokens before the last block
    table += request.to(gl.int64) * table_sb
    mask += request.to(gl.int64) * mask_sb

    q_last = gl.allocate_shared_memory(d_q.dtype, [64, 64], TILE)
    q_rope = gl.allocate_shared_memory(d_q.dtype, [64, 64], TILE)
    halves = gl.allocate_shared_memory(d_q.dtype, [2 * BLOCKS, 64, 256], TILE)
    ropes = gl.allocate_shared_memory(d_q.dtype, [ROPES, 64, 64], TILE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alphas = gl.allocate_shared_memory(gl.float32, [ROPES, 64], flat)
    inverses = gl.allocate_shared_memory(gl.float32, [64], flat)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    done = gl.allocate_shared_memory(gl.int64, [1], bars)
    half_full = gl.allocate_shared_memory(gl.int64, [2 * BLOCKS, 1], bars)
    rope_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    scored = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_free = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=1)
    for j in gl.static_range(BLOCKS):
        mbarrier.init(half_full.index(j), count=1)
        mbarrier.init(half_full.index(j + BLOCKS), count=1)
    for j in gl.static_range(ROPES):
        mbarrier.init(scored.index(j), count=1)
        mbarrier.init(rope_full.index(j), count=1)
        mbarrier.init(p_full.index(j), count=1)
        mbarrier.init(p_free.index(j), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(q_full, 64 * 576 * 2)
    _load_q(d_q, request, first_row, 0, q_full, halves.index(2), 256)
    _load_q(d_q, request, first_row, 256, q_full, halves.index(5), 256)
    _load_q(d_q_rope, request, first_row, 0, q_full, q_rope, 64)
    for i in gl.static_range(2):
        if i < blocks:
            for half in gl.static_range(2):
                mbarrier.expect(half_full.index(i + BLOCKS * half), 64 * 256 * 2)
                to = halves.index(i + BLOCKS * half)
                _load(d_c, table, request, last - i, 256 * half, half_full.index(i + BLOCKS * half), to, PAGE, 256)
            mbarrier.expect(rope_full.index(i), 64 * 64 * 2)
            _load(d_r, table, request, last - i, 0, rope_full.index(i), ropes.index(i), PAGE, 64)

    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_score_warps, (
                d_c, k_rope, rope_sp, rope_sr, table, mask + ahead, request, last, blocks, length - ahead,
                seen_first - ahead, seen - ahead, q_last, q_rope, halves, ropes, alphas, inverses, q_full, half_full,
                rope_full, scored, p_full, done, scale, sinks, items, lse, part_lse, T, H, ROWS, SPLITS, PAGE, MASK,
                HAS_SINKS, SCHEDULED, PARTIAL,
            )),
            (_value_warps, (
                d_c, d_r, table, request, last, blocks, halves, ropes, alphas, inverses, half_full, rope_full, scored,
                p_full, p_free, done, d_o, d_part, slot, first_row, rows, gl.constexpr(0), PAGE, PARTIAL,
            )),
            (_value_warps, (
                d_c, d_r, table, request, last, blocks, halves, ropes, alphas, inverses, half_full, rope_full, scored,
                p_full, p_free, done, d_o, d_part, slot, first_row, rows, gl.constexpr(1), PAGE, PARTIAL,
            )),
        ],
        [4, 4], [160, 160],  # and 184 for the scores: with fewer ptxas serialises products
    )  # fmt: skip


@gluon.jit
def _load_q(d_q, request, row, column, bar, to, WIDTH: gl.constexpr):
    tma.async_copy_global_to_shared(d_q, [request, row, column], bar, to._reinterpret(d_q.dtype, [1, 64, WIDTH], TILE3))
