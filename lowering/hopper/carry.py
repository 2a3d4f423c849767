"""Gluon: the state carried to a segment of :mod:`.scan_channel`, by the block that scans it.

A first pass leaves of each segment how it takes a state on, ``S -> A S + B``; of the first one the state after it. What
stands before segment s is s - 1 such steps away, in tf32, rounded, 1.4e-4 of each a step. As in the scan S^T lies in
registers, in halves of 64 channels, and is the left operand as it is: of eight fp32 numbers in a row the tensor cores
want t and t + 4 where an accumulator has 2 t and 2 t + 1, so A's columns lie in that order (:func:`channel`). Maps come
in parts of 64 by 64 through the places of the scan's tiles, B's halves before A's quarters, the last four in the places
that the scan fills last: its first tiles are there when the state is.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .combine import SINGLE
from .common import SQUARE, barrier, tf32

HERE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, HERE.value, 1))


@gluon.jit
def channel(place):
    """The channel whose column of A lies there."""
    return place // 8 * 8 + place % 4 * 2 + place // 4 % 2


@gluon.jit
def _left(S):
    S = gl.permute(gl.reshape(tf32(S), [64, 8, 4, 2]), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(S, [64, 64]), LEFT)


@gluon.jit
def _span(maps, PLACES: gl.constexpr):
    """Of the parts of so many maps, without the first one's A, the first and the end: the last is in the last place."""
    parts = gl.maximum(6 * maps - 4, 0)
    first = (PLACES - parts % PLACES) % PLACES
    return first, first + parts


@gluon.jit
def _use(i, first, PLACES: gl.constexpr):
    """How many parts were in part i's place before it."""
    return i // PLACES - (i % PLACES < first).to(gl.int32)


@gluon.jit
def _part(tiles, carried, i, first):
    PLACES: gl.constexpr = tiles.shape[0]
    mbarrier.wait(carried.index(i % PLACES), _use(i, first, PLACES) & 1)
    return tiles.index(i % PLACES)._reinterpret(gl.float32, [64, 64], SINGLE)


@gluon.jit
def _times(left, tiles, carried, i, first, x):
    return warpgroup_mma(left, _part(tiles, carried, i, first).permute((1, 0)), x, is_async=True)


@gluon.jit
def carry(maps, tiles, carried, emptied):
    """The halves of S^T after so many maps, one or more, ``[64 columns, 64 channels]``."""
    PLACES: gl.constexpr = tiles.shape[0]
    first, _ = _span(maps, PLACES)
    i = first
    S0 = _part(tiles, carried, i, first).load(HERE)
    S1 = _part(tiles, carried, i + 1, first).load(HERE)
    barrier()
    mbarrier.arrive(emptied.index(i % PLACES), count=1)
    mbarrier.arrive(emptied.index((i + 1) % PLACES), count=1)
    i += 2
    for _ in range(maps - 1):
        left0 = _left(S0)
        left1 = _left(S1)
        S0 = _part(tiles, carried, i, first).load(HERE)
        S1 = _part(tiles, carried, i + 1, first).load(HERE)
        S0 = _times(left0, tiles, carried, i + 2, first, S0)
        S1 = _times(left0, tiles, carried, i + 3, first, S1)
        S0 = _times(left1, tiles, carried, i + 4, first, S0)
        S1 = _times(left1, tiles, carried, i + 5, first, S1)
        S0, S1 = warpgroup_mma_wait(0, [S0, S1])
        barrier()
        for part in gl.static_range(6):
            mbarrier.arrive(emptied.index((i + part) % PLACES), count=1)
        i += 6
    return gl.convert_layout(S0, SQUARE), gl.convert_layout(S1, SQUARE)


@gluon.jit
def load_maps(d_ends, row, rows, i_v, VP, segment, joined, maps, tiles, carried, emptied):
    """What :func:`carry` asks for. row: where the first segment's B is, and A behind it; ``rows`` to the next one's."""
    PLACES: gl.constexpr = tiles.shape[0]
    first, end = _span(maps, PLACES)
    for i in range(first, end):
        place = i % PLACES
        mbarrier.wait(emptied.index(place), (_use(i, first, PLACES) & 1) ^ 1)
        bar = carried.index(place)
        mbarrier.expect(bar, 64 * 64 * 4)
        part = gl.where(i < first + 2, i - first, (i - first + 4) % 6)
        quarter = part - 2
        within = gl.where(part < 2, i_v * 64, VP + quarter % 2 * 64)
        after = gl.minimum(((i - first + 4) // 6 + 1) * joined, segment)
        at = [row + (after - 1) * rows + within, gl.where(part < 2, part, quarter // 2) * 64]
        to = tiles.index(place)._reinterpret(gl.float32, [64, 64], SINGLE)
        tma.async_copy_global_to_shared(d_ends, at, bar, to)


@gluon.jit
def await_emptied(emptied, place, maps):
    """Wait until the last part that was to be there has been read."""
    PLACES: gl.constexpr = emptied.shape[0]
    first, end = _span(maps, PLACES)
    uses = _use(end + place, first, PLACES)
    mbarrier.wait(emptied.index(place), (uses - 1) & 1, pred=uses > 0)
