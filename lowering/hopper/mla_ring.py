"""Gluon: the items of a program and the ring through which they come, for the warps of ``mla.py``.

An item is a run of blocks of a request. What comes through the ring is of every item its Q, and then its blocks, from
the last to the first: entry n of all these lies in place n % BLOCKS, its rope in slot n % ROPES. So the next item's Q
and first blocks are on their way before the last blocks of this one are done.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

TILE3 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
BLOCKS = gl.constexpr(3)  # of the ring
ROPES = gl.constexpr(2)  # slots of a block's rope, then its P


@gluon.jit
def item_of(
    items, lengths, item, first_row, T, H, ROWS, WIDTH, SPLITS,
    CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, SCHEDULED: gl.constexpr,
):  # fmt: skip
    """An item's request, the request's length, the item's last block and how many it has, and whether any is seen.

    Where none is, it has one, of zeros.
    """
    request = gl.to_tensor(item) // SPLITS
    if SCHEDULED:
        request = gl.load(items + item * 4)
    length = WIDTH
    if HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths + request).to(gl.int32), 0), WIDTH)
    owned = (length + 63) // 64
    if SCHEDULED:
        low = gl.load(items + item * 4 + 1)
        high = gl.minimum(gl.load(items + item * 4 + 2), owned)
    else:
        each = (owned + SPLITS - 1) // SPLITS
        low = (item % SPLITS) * each
        high = gl.minimum(low + each, owned)
    if CAUSAL:
        seen_last = length - T + gl.minimum(first_row + 63, ROWS - 1) // H + 1
        high = gl.minimum(high, (seen_last + 63) // 64)
    return request, length, gl.maximum(high - 1, low), gl.maximum(high - low, 1), high > low


@gluon.jit
def owner_of(items, item, SPLITS, SCHEDULED: gl.constexpr):
    """The request of an item, and the slot of its partial result (-1: it is no part)."""
    slot = gl.to_tensor(item)
    request = slot // SPLITS
    if SCHEDULED:
        request, slot = gl.load(items + item * 4), gl.load(items + item * 4 + 3)
    return request, slot


@gluon.jit
def next_half(
    d_q, d_c, k_rope, rope_sp, rope_sr, table, table_sb, lengths, items, item, request, block, low, end, first_row, T,
    H, ROWS, WIDTH, SPLITS, place, half_full, halves,
    HALF: gl.constexpr, PAGE: gl.constexpr, CAUSAL: gl.constexpr, HAS_LENGTHS: gl.constexpr, SCHEDULED: gl.constexpr,
):  # fmt: skip
    """Copy half of what comes next to a place of the ring: the item's blocks down to ``low``, then the next one's Q.

    Returns the next item and what is left of the one under way (request -1: no request's), then where the rope that
    goes with the half lies, and what it is: 0 nothing, 1 of Q, 2 of a block.
    """
    bar = half_full.index(place)
    to = halves.index(place)._reinterpret(d_c.dtype, [1, 64, 256], TILE3)
    outer, row, kind = request, first_row, 0
    if block >= low:
        outer, row = _place(table + gl.maximum(request, 0).to(gl.int64) * table_sb, request, block, PAGE)
        mbarrier.expect(bar, 64 * 256 * 2)
        tma.async_copy_global_to_shared(d_c, [outer, row, 256 * HALF], bar, to)
        if HALF == 0:
            _fetch(k_rope, rope_sp, rope_sr, outer, row)
        block = block - 1
        kind = 2
    elif item < end:
        outer, _, last, blocks, some = item_of(
            items, lengths, item, first_row, T, H, ROWS, WIDTH, SPLITS, CAUSAL, HAS_LENGTHS, SCHEDULED
        )
        mbarrier.expect(bar, 64 * 256 * 2)
        tma.async_copy_global_to_shared(d_q, [outer, row, 256 * HALF], bar, to)
        request = gl.where(some, outer, -1)
        block, low = last, last - blocks + 1
        item = item + 1
        kind = 1
    return item, request, block, low, outer, row, kind


@gluon.jit
def copy_rope(d_q_rope, d_r, outer, row, kind, slot, rope_full, ropes):
    """Copy the rope of what a half was copied of before."""
    bar = rope_full.index(slot)
    to = ropes.index(slot)._reinterpret(d_r.dtype, [1, 64, 64], TILE3)
    mbarrier.expect(bar, 64 * 64 * 2, pred=kind > 0)
    if kind == 2:
        tma.async_copy_global_to_shared(d_r, [outer, row, 0], bar, to)
    elif kind == 1:
        tma.async_copy_global_to_shared(d_q_rope, [outer, row, 0], bar, to)


@gluon.jit
def _place(table, request, block, PAGE: gl.constexpr):
    """Where a block begins: the request or the page, and the row of it; -1, which the copy engine reads as zeros, for
    that of no request."""
    outer, row = request, block * 64
    if PAGE != 0:
        outer = gl.load(table + block // (PAGE // 64), mask=request >= 0, other=-1).to(gl.int32)
        row = (block % (PAGE // 64)) * 64
    return outer, row


@gluon.jit
def _fetch(k_rope, step, row_step, outer, row):
    """Ask L2 for the rope of a block, which is copied late: a P is in its place until then."""
    rows = row + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    at = k_rope + gl.maximum(outer, 0).to(gl.int64) * step + rows.to(gl.int64) * row_step
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], gl.int32, False, 1)


@gluon.jit
def clear_tail(halves, entry, owned):
    """Zero the rows of a half from ``owned`` on: they belong to nobody, and 0 times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    tiles = halves._reinterpret(gl.int32, [2 * BLOCKS * 8, 32, 32], gl.NVMMASharedLayout(128, 32, 2))
    for j in range(8):  # a few registers at a time
        tile = tiles.index(8 * entry + j)
        x = tile.load(LAYOUT)
        tile.store(gl.where((rows + 32 * (j % 2) < owned)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def bits(mask_end, owned):
    """Which of the first 32 of these last tokens a mask shows, in one register."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
    shown = gl.load(mask_end + (lane - owned), mask=lane < owned, other=0) != 0
    return gl.sum(shown.to(gl.int32) << lane, 0)


@gluon.jit
def again(x):
    """The same number, of which the compiler knows nothing: what is made of it is made here, and not held ready."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)
