"""Gluon: the state of a segmented scan, carried from segment to segment (see :mod:`.scan`)."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .common import next_may_start, previous_is_over

# Warp w has the state's keys 16 w .. 16 w + 15, and of A these rows: it loads them as an operand, straight from memory.
STATE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 4))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, STATE.value, 4))


@gluon.jit
def _parts(x):
    """Two bf16 numbers, the sum of which is x but for 2^-17 of it: its upper half, and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def combine(
    ends, states, initial, s_sn, s_sh, s_sk, s_sv, K, V, VP, HV, segments,
    BLOCK: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """ends ``[segments - 1, lanes, 128, VP + 128]`` into states ``[segments, lanes, 128, VP]``: those before each.

    A program per lane and BLOCK columns of V. A step's A and B are loaded while the step before it is computed.
    """
    previous_is_over()
    next_may_start()
    lane = gl.program_id(0).to(gl.int64)
    width = VP + 128
    key = gl.arange(0, 128, layout=gl.SliceLayout(1, STATE))[:, None]
    column = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, STATE))[None, :]
    A_row = gl.arange(0, 128, layout=gl.SliceLayout(1, LEFT))[:, None]
    A_column = gl.arange(0, 128, layout=gl.SliceLayout(0, LEFT))[None, :]
    to = states + lane * 128 * VP + key * VP + column
    B_from = ends + lane * 128 * width + key * width + column
    A_from = ends + lane * 128 * width + A_row * width + VP + A_column
    step = gl.num_programs(0).to(gl.int64) * 128  # from a segment to the next, in rows
    S = gl.zeros([128, BLOCK], gl.float32, layout=STATE)
    if HAS_INITIAL:
        at = initial + (lane // HV) * s_sn + (lane % HV) * s_sh + key * s_sk + column * s_sv
        S += gl.load(at, mask=(key < K) & (column < V), other=0.0).to(gl.float32)
    gl.store(to, S)
    S = gl.load(B_from)
    zero = gl.zeros([128, BLOCK], gl.float32, layout=STATE)
    last = segments - 2
    B = gl.load(B_from + gl.minimum(1, last) * step * width)
    A = gl.load(A_from + gl.minimum(1, last) * step * width)
    for segment in range(1, segments - 1):
        to += step * VP
        gl.store(to, S)
        A_high, A_low = _parts(A)
        own = B
        after = gl.minimum(segment + 1, last) * step * width
        B = gl.load(B_from + after)
        A = gl.load(A_from + after)
        S_high, S_low = _parts(gl.convert_layout(S, RIGHT))
        # Three chains of products instead of one three times as long.
        S = mma_v2(A_high, S_high, own) + (mma_v2(A_high, S_low, zero) + mma_v2(A_low, S_high, zero))
    gl.store(to + step * VP, S)
