"""Gluon: the state of a segmented scan, carried from segment to segment (see :mod:`.scan`).

The steps ``S -> A S + B`` depend on each other, so one must take no longer than reading A: copies run STAGES segments
ahead, and A and S meet in tf32, rounded, 1.4e-4 of each a step.
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
)

from .common import barrier, next_may_start, previous_is_over, tf32

STAGES = gl.constexpr(3)
SINGLE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def _load(d_ends, i_nh, NH, segment, segments, VP, tiles, full, stage):
    """A of a segment, if there is one: rows of VP + WIDTH numbers, A behind B."""
    WIDTH: gl.constexpr = tiles.shape[1]
    here = segment < segments - 1
    bar = full.index(stage)
    mbarrier.expect(bar, WIDTH * WIDTH * 4, pred=here)
    at = [(segment * NH + i_nh) * WIDTH, VP]
    tma.async_copy_global_to_shared(d_ends, at, bar, tiles.index(stage), pred=here)


@gluon.jit
def combine(
    d_ends, ends, states, initial, s_sn, s_sh, s_sk, s_sv, K, V, VP, HV, segments,
    BLOCK: gl.constexpr, WIDTH: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """ends ``[segments - 1, N * HV, WIDTH, VP + WIDTH]``, B and A, into ``[segments, N * HV, WIDTH, VP]``: the states
    before each.

    A program per head of a sequence and BLOCK columns of V, a warp for every 16 keys. d_ends describes ends as rows.
    """
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WIDTH // 16, 1], [16, BLOCK, 8])
    tiles = gl.allocate_shared_memory(gl.float32, [STAGES, WIDTH, WIDTH], SINGLE)
    state = gl.allocate_shared_memory(gl.float32, [BLOCK, WIDTH], SINGLE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    previous_is_over()
    next_may_start()
    i_nh = gl.program_id(0)
    NH = gl.num_programs(0)
    for s in gl.static_range(STAGES):
        _load(d_ends, i_nh, NH, 1 + s, segments, VP, tiles, full, s)
    key = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, STATE))[:, None]
    column = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, STATE))[None, :]
    to = states + i_nh.to(gl.int64) * WIDTH * VP + key * VP + column
    B_from = ends + i_nh.to(gl.int64) * WIDTH * (VP + WIDTH) + key * (VP + WIDTH) + column
    step = NH.to(gl.int64) * WIDTH  # from a segment to the next, in rows
    S = gl.zeros([WIDTH, BLOCK], gl.float32, layout=STATE)
    if HAS_INITIAL:
        at = initial + (i_nh // HV).to(gl.int64) * s_sn + (i_nh % HV).to(gl.int64) * s_sh + key * s_sk + column * s_sv
        S += gl.load(at, mask=(key < K) & (column < V), other=0.0).to(gl.float32)
    gl.store(to, S)
    S = gl.load(B_from)
    last = segments - 2
    B = gl.load(B_from + gl.minimum(1, last) * step * (VP + WIDTH))
    for segment in range(1, segments - 1):
        stage = (segment - 1) % STAGES
        to += step * VP
        state.permute((1, 0)).store(tf32(S))
        fence_async_shared()
        barrier()
        mbarrier.wait(full.index(stage), ((segment - 1) // STAGES) & 1)
        own = B
        B = gl.load(B_from + gl.minimum(segment + 1, last) * step * (VP + WIDTH))
        gl.store(to, S)
        S = warpgroup_mma(tiles.index(stage), state.permute((1, 0)), own)
        barrier()
        _load(d_ends, i_nh, NH, segment + STAGES, segments, VP, tiles, full, stage)
    gl.store(to + step * VP, S)
