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
def _span(segment, PLACES: gl.constexpr):
    """Of the parts that a segment asks for, counted so that the last one is in the last place: the first, the end."""
    parts = gl.maximum(6 * segment - 4, 0)
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
def carry(segment, tiles, carried, emptied):
    """The halves of S^T before a segment behind the first, ``[64 columns, 64 channels]``."""
    PLACES: gl.constexpr = tiles.shape[0]
    first, _ = _span(segment, PLACES)
    i = first
    S0 = _part(tiles, carried, i, first).load(HERE)
    S1 = _part(tiles, carried, i + 1, first).load(HERE)
    barrier()
    mbarrier.arrive(emptied, count=1)
    i += 2
    for _ in range(segment - 1):
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
        mbarrier.arrive(emptied, count=1)
        i += 6
    return gl.convert_layout(S0, SQUARE), gl.convert_layout(S1, SQUARE)


@gluon.jit
def load_maps(d_ends, row, rows, i_v, VP, segment, tiles, carried, emptied):
    """What :func:`carry` asks for. row: where the first segment's B is, and A behind it; ``rows`` to the next one's."""
    PLACES: gl.constexpr = tiles.shape[0]
    first, end = _span(segment, PLACES)
    for i in range(first, end):
        n = i - first
        bar = carried.index(i % PLACES)
        mbarrier.wait(emptied, (n // 6 + 1) & 1, pred=(n >= 6) & (n % 6 == 0))  # PLACES parts before are read
        mbarrier.expect(bar, 64 * 64 * 4)
        part = gl.where(n < 2, n, (n + 4) % 6)
        quarter = part - 2
        within = gl.where(part < 2, i_v * 64, VP + quarter % 2 * 64)
        at = [row + (n + 4) // 6 * rows + within, gl.where(part < 2, part, quarter // 2) * 64]
        to = tiles.index(i % PLACES)._reinterpret(gl.float32, [64, 64], SINGLE)
        tma.async_copy_global_to_shared(d_ends, at, bar, to)


@gluon.jit
def await_emptied(emptied, place, segment, PLACES: gl.constexpr):
    """Wait until the last part that was to be there has been read, if it is of the last map: for all before that
    :func:`load_maps` has waited."""
    first, end = _span(segment, PLACES)
    here = (place >= PLACES - 6) & (place >= first - end + PLACES) & (segment > 0)
    mbarrier.wait(emptied, (segment + 1) & 1, pred=here)
