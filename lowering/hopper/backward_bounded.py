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

from .backward_blocks import (
    FLAT,
    LEFT,
    NARROW,
    PART,
    RIGHT,
    inside_mask,
    inside_sums,
    line_of,
    narrow,
    over_block,
    over_chunk,
    over_gates,
    product,
    put_split,
    scaled,
    widened,
)
from .common import barrier, exp2

ANCHOR = gl.constexpr(58.0)  # 16 log2 gates above -7.25 leave factors from 2^-58 to 2^58
UP = gl.constexpr(2.0**58)
DOWN_TO = gl.constexpr(2.0**-58)


@gluon.jit
def grams(p0, p1, p2, p3, l0, l1, l2, l3, q, k, g, rows, lines, DELTA: gl.constexpr):
    """Add what some channels give to the columns of P and L; k decayed to the chunk's end.

    rows: of nine tiles the first and the fifth are left with q and k decayed from the chunk's start, 2^58 times too
    much. Those between have them decayed from the starts of later blocks, the last one has k grown.
    """
    high = rows[0]._reinterpret(gl.float16, [64, PART], NARROW)
    low = rows[1]._reinterpret(gl.float16, [64, PART], NARROW)
    barrier()
    put_split(high, low, g)
    within = inside_sums(inside_mask("until", gl.float16), high, low) + ANCHOR
    near = exp2(within)
    q *= near
    k_back = k * exp2(-within)
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
    barrier()
    columns = rows[8]
    p0 = product(rows[0], columns.slice(0, 16, 0), p0, PART)
    p1 = product(rows[1], columns.slice(16, 16, 0), p1, PART)
    p2 = product(rows[2], columns.slice(32, 16, 0), p2, PART)
    p3 = product(rows[3], columns.slice(48, 16, 0), p3, PART)
    if DELTA:
        l0 = product(rows[4], columns.slice(0, 16, 0), l0, PART)
        l1 = product(rows[5], columns.slice(16, 16, 0), l1, PART)
        l2 = product(rows[6], columns.slice(32, 16, 0), l2, PART)
        l3 = product(rows[7], columns.slice(48, 16, 0), l3, PART)
    until = over_block(lines, 0, "until") * over_block(lines, 1, "until")
    return (
        p0,
        p1,
        p2,
        p3,
        l0,
        l1,
        l2,
        l3,
        scaled(k_back, until * over_block(lines, 2, "until") * (line_of(lines, 3) * UP)),
    )


@gluon.jit
def lowered(x):
    """bf16 times 2^-58, two at a time."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 c; mov.b32 c, 0x22802280; mul.rn.bf16x2 $0, $1, c;}", "=r,r", [x], gl.bfloat16, True, 2
    )


@gluon.jit
def pairs_and_states(
    q, k, g, to_q, to_start, to_end, met, b, scale, dp_t, dl_t, later_t, lines, work, DELTA: gl.constexpr
):  # fmt: skip
    """dq, dk, and the gradients of the log gates; ``met``: the rows of S * dS' [1, 1, PART]."""
    high = work[0]._reinterpret(gl.float16, [64, PART], NARROW)
    low = work[1]._reinterpret(gl.float16, [64, PART], NARROW)
    put_split(high, low, g)
    within = inside_sums(inside_mask("until", gl.float16), high, low) + ANCHOR
    near = exp2(within)
    back = exp2(-within)
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
    dg = over_gates(spread, narrow(columns * to_end), met * over_chunk(lines), later_t, work)
    dk = back * (pairs + to_end)
    if DELTA:
        dk += near * to_start
    return near * to_q, dk, dg
