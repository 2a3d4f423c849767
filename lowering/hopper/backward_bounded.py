"""Gluon: what some channels of a chunk give where log gates per channel have a bound, in the kernels of the backward.

Then 16 tokens of the strongest gate there can be stay in range, and one product takes the pairs inside of blocks with
those between them (see ``backward_blocks.py``). Rows are decayed from the start of their block, and columns grow with
their distance from it: ``2^(D_i + ANCHOR) 2^(-D_j - ANCHOR)``. A sum over columns goes block by block: what it has is
decayed over a block before the next one is added, and rows of that block are left as they are. Sums over rows go
backwards. What the states give, ``dO S^T``, ``Z S^T`` and ``V' dS'^T``, is where sums begin.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .backward_blocks import (
    FLAT,
    LEFT,
    PART,
    RIGHT,
    halves,
    line_of,
    narrow,
    near_start,
    over_block,
    over_chunk,
    over_gates,
    put_split,
    ready,
    scaled,
    widened,
)
from .common import barrier

ANCHOR = gl.constexpr(58.0)  # 16 log2 gates above -7.25 leave factors from 2^-58 to 2^58
UP = gl.constexpr(2.0**58)
DOWN_TO = gl.constexpr(2.0**-58)


@gluon.jit
def grams(p0, p1, p2, p3, l0, l1, l2, l3, q, k, g, rows, lines, DELTA: gl.constexpr):
    """Add what some channels give to the columns of P and L; k decayed to the chunk's end.

    rows: of nine tiles the first and the fifth are left with q and k decayed from the chunk's start, 2^58 times too
    much. Those between have them decayed from the starts of later blocks, the last one has k grown.
    """
    high, low = halves(rows)
    barrier()
    put_split(high, low, g)
    near, back = near_start(high, low, ANCHOR)
    q *= near
    k_back = k * back
    k *= near
    barrier()
    rows[8].store(narrow(k_back))
    rows[3].store(narrow(q))
    if DELTA:
        rows[7].store(narrow(k))
    for at in gl.static_range(2, -1, -1):
        decay = over_block(lines, at, "after")
        q = scaled(q, decay)
        rows[at].store(narrow(q))
        if DELTA:
            k = scaled(k, decay)
            rows[4 + at].store(narrow(k))
    ready()
    columns = rows[8]
    columns0 = columns.slice(0, 16, 0).permute((1, 0))
    columns1 = columns.slice(16, 16, 0).permute((1, 0))
    columns2 = columns.slice(32, 16, 0).permute((1, 0))
    columns3 = columns.slice(48, 16, 0).permute((1, 0))
    p0 = warpgroup_mma(rows[0], columns0, p0, is_async=True)
    p1 = warpgroup_mma(rows[1], columns1, p1, is_async=True)
    p2 = warpgroup_mma(rows[2], columns2, p2, is_async=True)
    p3 = warpgroup_mma(rows[3], columns3, p3, is_async=True)
    if DELTA:
        l0 = warpgroup_mma(rows[4], columns0, l0, is_async=True)
        l1 = warpgroup_mma(rows[5], columns1, l1, is_async=True)
        l2 = warpgroup_mma(rows[6], columns2, l2, is_async=True)
        l3 = warpgroup_mma(rows[7], columns3, l3, is_async=True)
    until = over_block(lines, 0, "until") * over_block(lines, 1, "until")
    ended = scaled(k_back, until * over_block(lines, 2, "until") * (line_of(lines, 3) * UP))
    if DELTA:
        p0, p1, p2, p3, l0, l1, l2, l3 = warpgroup_mma_wait(0, [p0, p1, p2, p3, l0, l1, l2, l3])
    else:
        p0, p1, p2, p3 = warpgroup_mma_wait(0, [p0, p1, p2, p3])
    return p0, p1, p2, p3, l0, l1, l2, l3, ended


@gluon.jit
def lowered(x):
    """bf16 times 2^-58, two at a time."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 c; mov.b32 c, 0x22802280; mul.rn.bf16x2 $0, $1, c;}", "=r,r", [x], gl.bfloat16, True, 2
    )


@gluon.jit
def pairs_and_states(
    high, low, q, k, to_q, to_start, to_end, met, b, scale, dp_t, dl_t, lines, work, DELTA: gl.constexpr
):  # fmt: skip
    """dq, dk, and the gradients of the log gates; ``met``: the rows of S * dS' [1, 1, PART]."""
    near, back = near_start(high, low, ANCHOR)
    q_near = narrow(q * near)
    k_near = narrow(k * near)
    k_back = narrow(k * back)
    barrier()
    work[0].store(q_near)
    work[1].store(k_near)
    work[2].store(k_back)
    to_q = to_q * (scale * DOWN_TO)
    to_start = to_start * (b * -DOWN_TO)
    for at in gl.static_range(4):
        columns = work[2].slice(16 * at, 16, 0).load(RIGHT)
        to_q = mma_v2(dp_t.slice(16 * at, 16, 1).load(LEFT), columns, to_q)
        if DELTA:
            to_start = mma_v2(dl_t.slice(16 * at, 16, 1).load(LEFT), columns, to_start)
        if at < 3:
            decay = over_block(lines, at, "after")
            to_q = scaled(to_q, decay)
            if DELTA:
                to_start = scaled(to_start, decay)
    until = line_of(lines, 3) * UP
    pairs = gl.zeros([64, PART], gl.float32, layout=FLAT)
    for at in gl.static_range(3, -1, -1):
        if at < 3:
            decay = over_block(lines, at, "until")
            pairs = scaled(pairs, decay)
            until = until * decay
        rows = work[0].slice(16 * at, 16, 0).load(RIGHT)
        pairs = mma_v2(dp_t.slice(16 * at, 16, 0).permute((1, 0)).load(LEFT), rows, pairs)
        if DELTA:
            rows = work[1].slice(16 * at, 16, 0).load(RIGHT)
            pairs = mma_v2(dl_t.slice(16 * at, 16, 0).permute((1, 0)).load(LEFT), rows, pairs)
    to_end = scaled(to_end, until)
    columns = widened(k_back)
    spread = widened(q_near) * to_q - columns * pairs
    if DELTA:
        spread += widened(k_near) * to_start
    dg = over_gates(spread, narrow(columns * to_end), met * over_chunk(lines), work)
    dk = back * (pairs + to_end)
    if DELTA:
        dk += near * to_start
    return near * to_q, dk, dg
