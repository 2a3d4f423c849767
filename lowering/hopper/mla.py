"""Gluon: MLA decoding over a latent cache, R = 512 and D = 64, 64 rows (queries times heads) of requests a program.

The accumulator, 64 x 512 in fp32, fills half a multiprocessor's registers, so three warpgroups share a program. One
takes the scores and the softmax; two multiply by a half of the latent each, and refill what they have read::

    scores:  S = Q c^T + Q' r^T      P = exp2(k S - m)      P and the change of m to shared memory
    values:  acc = acc exp2(m_old - m) + P c[:, half]

A program stays, and works on one item (a run of blocks of a request) after the other: as the results of one are
stored, the scores go on with the next, which has come through the ring behind it (``mla_ring.py``). An item's blocks go
from the last to the first: what belongs to nobody is at the end, and is dealt with before the loop. The tensor cores
take the scores of block i + 1, then the values of block i while block i + 1 has its softmax: values wait for the scores
after theirs. For that a block must be there while the one before is still read, and another on its way: the ring has
three. All but 64 of Q's 512 columns live in registers, which pays for it. Blocks of 64 tokens arrive in halves, 64 x
256; in the ring, the left ones come first. Two slots hold the rope of a block and then, once its scores are done, its
P. The accumulator is rescaled in every block, while the tensor cores have the next scores: the largest weight of a row
is then exactly 1, which 16 bits keep, and not some number near it.
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

from .mla_ring import BLOCKS, ROPES, TILE3, again, bits, clear_tail, copy_rope, item_of, next_half, owner_of

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # below any score, and far enough from -inf for differences to be numbers


@gluon.jit
def _score_warps(
    d_c, mask, mask_sb, lengths, items, begin, end, first_row, q_last, q_rope, halves, ropes, alphas, inverses,
    half_full, rope_full, scored, p_full, done, taken, scale, sinks, lse, part_lse, T, H, ROWS, WIDTH, SPLITS,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINKS: gl.constexpr,
    SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    zero = gl.full([64, 64], 0.0, gl.float32, SCORES)
    pairs = halves._reinterpret(d_c.dtype, [2 * BLOCKS * 2, 64, 128], TILE)
    fourths = halves._reinterpret(d_c.dtype, [2 * BLOCKS * 4, 64, 64], TILE)
    entry = 0
    for item in range(begin, end):
        request, length, last, blocks, _ = item_of(
            items, lengths, item, first_row, T, H, ROWS, WIDTH, SPLITS, CAUSAL, HAS_LENGTHS, SCHEDULED
        )
        owned = length - last * 64  # tokens of the last block
        mask_end = mask + request.to(gl.int64) * mask_sb + length
        m = gl.full([64], LOWEST, gl.float32, ROW)
        total = gl.full([64], 0.0, gl.float32, ROW)
        # Q comes like a block, and goes on to registers
        left, rope = entry % BLOCKS, entry % ROPES
        right = left + BLOCKS
        mbarrier.wait(half_full.index(left), (entry // BLOCKS) & 1)
        mbarrier.wait(half_full.index(right), (entry // BLOCKS) & 1)
        mbarrier.wait(rope_full.index(rope), (entry // ROPES) & 1)
        q_a, q_b = halves.index(left).load(OPERAND), pairs.index(2 * right).load(OPERAND)
        q_c = fourths.index(4 * right + 2).load(OPERAND)
        q_last.store(fourths.index(4 * right + 3).load(SCORES))
        q_rope.store(ropes.index(rope).load(SCORES))
        fence_async_shared()
        barrier()
        mbarrier.arrive(scored.index(rope), count=1)
        mbarrier.arrive(p_full.index(rope), count=1)
        entry += 1
        if owned < 64:
            for half in gl.static_range(2):
                place = entry % BLOCKS + BLOCKS * half
                mbarrier.wait(half_full.index(place), (entry // BLOCKS) & 1)
                clear_tail(halves, place, owned)
        for i in range(blocks):
            token = -64 * i  # after the last block's first
            if MASK:
                shown, shown_later = bits(mask_end, owned - token), bits(mask_end, owned - token - 32)
            # again: else addresses of P are held ready, for which there are no registers
            left, rope, phase = entry % BLOCKS, again(entry) % ROPES, (entry // BLOCKS) & 1
            right = left + BLOCKS
            mbarrier.wait(half_full.index(left), phase)
            s = warpgroup_mma(q_a, halves.index(left).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(half_full.index(right), phase)
            s = warpgroup_mma(q_b, pairs.index(2 * right).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q_c, fourths.index(4 * right + 2).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q_last, fourths.index(4 * right + 3).permute((1, 0)), s, is_async=True)
            mbarrier.wait(rope_full.index(rope), (entry // ROPES) & 1)
            s = warpgroup_mma(q_rope, ropes.index(rope).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            barrier()
            mbarrier.arrive(scored.index(rope), count=1)
            if MASK:
                visible = (gl.where(column < 32, shown, shown_later) >> (column % 32)) & 1
                s = gl.where((visible != 0)[None, :], s, float("-inf"))
            seen_first = owned
            if CAUSAL:
                seen_first = owned - T + first_row // H + 1
            if token + 64 > seen_first:
                seen = gl.full([64], 0, gl.int32, ROW) + owned
                if CAUSAL:
                    seen += (first_row + gl.arange(0, 64, ROW)) // H + 1 - T
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
            entry += 1
        mbarrier.wait(taken, ((item - begin) & 1) ^ 1)
        _finish(
            m,
            total,
            inverses,
            scale,
            sinks,
            items,
            item,
            lse,
            part_lse,
            first_row,
            T,
            H,
            ROWS,
            SPLITS,
            HAS_SINKS,
            SCHEDULED,
            PARTIAL,
        )
        mbarrier.arrive(done, count=1)


@gluon.jit
def _finish(
    m, total, inverses, scale, sinks, items, item, lse, part_lse, first_row, T, H, ROWS, SPLITS,
    HAS_SINKS: gl.constexpr, SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """The logarithm of the rows' sums, and what their values are multiplied by."""
    request, slot = owner_of(items, item, SPLITS, SCHEDULED)  # again: the scores have no registers to keep it in
    row = first_row + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    found = total > 0
    inverse = gl.where(found, 1.0 / total, 0.0)
    sums = (m * scale + gl.log2(total)) * LN2
    inside = row < ROWS
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
    d_q, d_q_rope, d_c, d_r, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, begin, end, first_row, halves,
    ropes, alphas, inverses, half_full, rope_full, scored, p_full, p_free, done, taken, d_o, d_part, T, H, ROWS, WIDTH,
    SPLITS,
    HALF: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, SCHEDULED: gl.constexpr,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    entry = 0
    # what goes into the ring next: of an item, a request's block, down to the low one
    ahead, request, block, low = begin, begin * 0, begin * 0 - 1, begin * 0
    outer, row, kind = begin * 0, begin * 0, begin * 0
    for item in range(begin, end):
        free = gl.where(item > begin, entry + BLOCKS - 1, 0)  # the whole ring; then what a result was stored through
        for at in range(free, entry + BLOCKS):
            ahead, request, block, low, outer, row, kind = next_half(
                d_q, d_c, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, ahead, request, block, low, end,
                first_row, T, H, ROWS, WIDTH, SPLITS, at % BLOCKS + BLOCKS * HALF, half_full, halves,
                HALF, PAGE, CAUSAL, HAS_LENGTHS, SCHEDULED,
            )  # fmt: skip
            if HALF == 1 and at < ROPES:
                copy_rope(d_q_rope, d_r, outer, row, kind, at, rope_full, ropes)
        _, _, _, blocks, _ = item_of(
            items, lengths, item, first_row, T, H, ROWS, WIDTH, SPLITS, CAUSAL, HAS_LENGTHS, SCHEDULED
        )
        final = entry + blocks  # after Q
        acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
        for at in range(entry, final + 1):
            rope, place = at % ROPES, at % BLOCKS + BLOCKS * HALF
            mbarrier.wait(half_full.index(place), (at // BLOCKS) & 1)
            mbarrier.wait(p_full.index(rope), (at // ROPES) & 1)
            if at > entry:
                acc = acc * alphas.index(rope).load(ROW)[:, None]
                if at < final:  # the next scores go first: their softmax then runs beside this product
                    mbarrier.wait(scored.index((at + 1) % ROPES), ((at + 1) // ROPES) & 1)
                product = warpgroup_mma(ropes.index(rope), halves.index(place), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[product])
            barrier()
            if HALF == 0:
                mbarrier.arrive(p_free.index(rope), count=1)
            else:
                mbarrier.wait(p_free.index(rope), (at // ROPES) & 1)
                copy_rope(d_q_rope, d_r, outer, row, kind, rope, rope_full, ropes)
            if at < final:
                ahead, request, block, low, outer, row, kind = next_half(
                    d_q, d_c, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, ahead, request, block, low,
                    end, first_row, T, H, ROWS, WIDTH, SPLITS, place, half_full, halves,
                    HALF, PAGE, CAUSAL, HAS_LENGTHS, SCHEDULED,
                )  # fmt: skip
        entry = final + 1
        mbarrier.wait(done, (item - begin) & 1)
        acc = acc * inverses.load(ROW)[:, None]
        barrier()
        mbarrier.arrive(taken, count=1)
        owner, slot = owner_of(items, item, SPLITS, SCHEDULED)
        room = halves.index(final % BLOCKS + BLOCKS * HALF)
        if not PARTIAL or slot < 0:
            _store(acc, d_o, owner, first_row, room, HALF)
        else:
            _store_part(acc, d_part, slot, first_row, room, HALF)
        barrier()


@gluon.jit
def _store(acc, d_out, which, first_row, room, HALF: gl.constexpr):
    """Through the place of the last block; the copy engine clips what is beyond the last row."""
    room.store(acc.to(d_out.dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(
        d_out, [which, first_row, 256 * HALF], room._reinterpret(d_out.dtype, [1, 64, 256], TILE3)
    )
    tma.store_wait(0)


@gluon.jit
def _store_part(acc, d_out, which, first_row, room, HALF: gl.constexpr):
    """The same in 32 bits, one half of the columns after the other."""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    DEEP: gl.constexpr = gl.NVMMASharedLayout(128, 32, 3)
    left, right = gl.split(acc.reshape([64, 2, 128]).permute([0, 2, 1]))
    for i in gl.static_range(2):
        room._reinterpret(gl.float32, [64, 128], FLAT).store(left if i == 0 else right)
        fence_async_shared()
        barrier()
        tile = room._reinterpret(gl.float32, [1, 64, 128], DEEP)
        tma.async_copy_shared_to_global(d_out, [which, first_row, 256 * HALF + 128 * i], tile)
        tma.store_wait(0)
        barrier()


@gluon.jit
def attend(
    d_q, d_q_rope, d_c, d_r, k_rope, rope_sp, rope_sr, table, table_sb, lengths, mask, mask_sb, sinks, items, starts,
    d_o, d_part, lse, part_lse, scale, T, H, ROWS, WIDTH, SPLITS,
    PAGE: gl.constexpr, MASK: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_SINKS: gl.constexpr,
    SCHEDULED: gl.constexpr, PARTIAL: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Grid: tiles of 64 rows, workers (SCHEDULED) or items. Arguments and results as in ``lowering/triton/mla.py``.

    d_q ``[B, ROWS, 512]`` and d_q_rope ``[B, ROWS, 64]``; d_c ``[B, S, 512]`` and d_r ``[B, S, 64]``, or pages of PAGE
    tokens; k_rope is what d_r describes. d_o ``[B, ROWS, 512]``, d_part ``[slots, ROWS, 512]``. ``mask``: a byte for
    each token of each request, 0 where no row may see it. ``scale``: of the scores, times log2 e. ``starts``: the
    first item of each worker.
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    first_row = gl.program_id(0) * 64
    begin = gl.program_id(1)
    end = begin + 1
    if SCHEDULED:
        end = gl.load(starts + end)
        begin = gl.load(starts + begin)

    q_last = gl.allocate_shared_memory(d_q.dtype, [64, 64], TILE)
    q_rope = gl.allocate_shared_memory(d_q.dtype, [64, 64], TILE)
    halves = gl.allocate_shared_memory(d_q.dtype, [2 * BLOCKS, 64, 256], TILE)
    ropes = gl.allocate_shared_memory(d_q.dtype, [ROPES, 64, 64], TILE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    alphas = gl.allocate_shared_memory(gl.float32, [ROPES, 64], flat)
    inverses = gl.allocate_shared_memory(gl.float32, [64], flat)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    done = gl.allocate_shared_memory(gl.int64, [1], bars)
    taken = gl.allocate_shared_memory(gl.int64, [1], bars)
    half_full = gl.allocate_shared_memory(gl.int64, [2 * BLOCKS, 1], bars)
    rope_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    scored = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_full = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    p_free = gl.allocate_shared_memory(gl.int64, [ROPES, 1], bars)
    mbarrier.init(done, count=1)
    mbarrier.init(taken, count=2)
    for j in gl.static_range(2 * BLOCKS):
        mbarrier.init(half_full.index(j), count=1)
    for j in gl.static_range(ROPES):
        mbarrier.init(rope_full.index(j), count=1)
        mbarrier.init(scored.index(j), count=1)
        mbarrier.init(p_full.index(j), count=1)
        mbarrier.init(p_free.index(j), count=1)
    fence_async_shared()
    barrier()

    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_score_warps, (
                d_c, mask, mask_sb, lengths, items, begin, end, first_row, q_last, q_rope, halves, ropes, alphas,
                inverses, half_full, rope_full, scored, p_full, done, taken, scale, sinks, lse, part_lse, T, H, ROWS,
                WIDTH, SPLITS, MASK, CAUSAL, HAS_LENGTHS, HAS_SINKS, SCHEDULED, PARTIAL,
            )),
            (_value_warps, (
                d_q, d_q_rope, d_c, d_r, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, begin, end,
                first_row, halves, ropes, alphas, inverses, half_full, rope_full, scored, p_full, p_free, done, taken,
                d_o, d_part, T, H, ROWS, WIDTH, SPLITS, gl.constexpr(0), PAGE, CAUSAL, HAS_LENGTHS, SCHEDULED, PARTIAL,
            )),
            (_value_warps, (
                d_q, d_q_rope, d_c, d_r, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, begin, end,
                first_row, halves, ropes, alphas, inverses, half_full, rope_full, scored, p_full, p_free, done, taken,
                d_o, d_part, T, H, ROWS, WIDTH, SPLITS, gl.constexpr(1), PAGE, CAUSAL, HAS_LENGTHS, SCHEDULED, PARTIAL,
            )),
        ],
        [4, 4], [160, 160],  # and 184 for the scores: with fewer ptxas serialises products
    )  # fmt: skip
