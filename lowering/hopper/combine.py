"""The state of a segmented scan, carried from segment to segment (see :mod:`.scan`)."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine(
    ends, states, initial, s_sn, s_sh, s_sk, s_sv, K, V, VP, HV, lanes, segments,
    BLOCK: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """ends ``[segments - 1, lanes, 128, VP + 128]`` into states ``[segments, lanes, 128, VP]``: those before each.

    A program per lane and BLOCK columns of V. The state is held transposed, as the narrow left operand of the products.
    """
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = VP + 128
    column = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    key = tl.arange(0, 128)[None, :]
    row = tl.arange(0, 128)[:, None]
    end = ends + lane * 128 * width
    state = states + lane * 128 * VP
    S = tl.zeros([BLOCK, 128], tl.float32)
    if HAS_INITIAL:
        at = initial + (lane // HV) * s_sn + (lane % HV) * s_sh + key * s_sk + column * s_sv
        S += tl.load(at, mask=(key < K) & (column < V), other=0.0).to(tl.float32)
    tl.store(state + key * VP + column, S)
    S = tl.load(end + key * width + column)
    for segment in range(1, segments - 1):
        tl.store(state + segment.to(tl.int64) * lanes * (128 * VP) + key * VP + column, S)
        here = end + segment.to(tl.int64) * lanes * (128 * width)
        A = tl.load(here + key * width + VP + row)  # transposed
        S = tl.dot(S, A, tl.load(here + key * width + column), input_precision="bf16x3")
    tl.store(state + (segments - 1).to(tl.int64) * lanes * (128 * VP) + key * VP + column, S)
