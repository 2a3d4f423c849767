"""The pairs of tokens of a chunk with a gate per channel, and their adjoint, as Triton functions.

A pair's decay is the product of a row factor and a column factor, each the exponential of a masked sum of log gates
(decays.py). The adjoint of a masked sum is the sum with the mask transposed: the gradient of a log gate collects
exactly the pairs that span it, and nothing cancels. With EXACT this holds for all pairs.

Otherwise the pairs inside of 16 tokens share factors, ``exp(D_i + SHIFT) exp(-D_j - SHIFT)``, D the sum of log gates
from the block's start (one from its middle would let later gates change how earlier gradients round), and a log gate
below LIMIT counts as LIMIT there: 2e-4 of an undecayed term, a tenth of what rounding to bf16 makes of it. Their
gradient is that of the clamped gate. It is a difference, ``x_i dx_i - x_j dx_j``, of sums over the very same
products: the operands enter as they were rounded, so what cancels in exact arithmetic cancels here to fp32.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .decays import add_level, channel_grams, exp, level_sums, masked_sum

LIMIT: tl.constexpr = tl.constexpr(-8.6)
SHIFT: tl.constexpr = tl.constexpr(68.8)  # with 16 of LIMIT factors are from 1e-30 to 1e30: in range of bf16 with a key


@triton.jit
def turned_sum(turned, y, DT: tl.constexpr, SPLIT: tl.constexpr = False):
    """The adjoint of ``masked_sum``, from the transposed mask: row j sums the rows i of y with ``turned[j, i]``.

    In bf16 the rows are rounded once, or with SPLIT go in as two parts, for sums that cancel.
    """
    if tl.float32 == DT:
        sums = tl.dot(turned.to(tl.float32), y, input_precision="tf32x3")
    else:
        selected, high = turned.to(tl.bfloat16), y.to(tl.bfloat16)
        sums = tl.dot(selected, high)
        if SPLIT:
            sums = tl.dot(selected, (y - high.to(tl.float32)).to(tl.bfloat16), sums)
    return sums


@triton.jit
def inside_mask(C: tl.constexpr, TURNED: tl.constexpr):
    """Which rows j are summed up to row i of the same 16; TURNED: transposed."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if TURNED:
        mask = ((i // 16) == (j // 16)) & (j >= i)
    else:
        mask = ((i // 16) == (j // 16)) & (j <= i)
    return mask


@triton.jit
def turned_level(level, C: tl.constexpr):
    """``level_sums`` transposed."""
    j, i = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    start = (i >> level) << level
    second = ((i >> level) & 1) == 1
    first = tl.where(second, start, i + 1)
    width = tl.where(second, i + 1 - start, start + (1 << level) - first)
    return (j - first).to(tl.uint32, bitcast=True) < width.to(tl.uint32, bitcast=True)


@triton.jit
def grams(p, l, q, k, g, C: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Add ``sum_d x_i k_j decay(i, j)`` of x = q to p and of x = k to l; the upper triangles mean nothing."""
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    if EXACT:
        p, l = channel_grams(p, l, q, k, g, C, 1, DT, PRECISION)
    else:
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        same = (i // 16) == (j // 16)
        sums = masked_sum(inside_mask(C, False), tl.maximum(g, LIMIT), DT) + SHIFT
        decay, cols = exp(sums), tl.trans((k * exp(-sums)).to(DT))
        p += tl.where(same, tl.dot((q * decay).to(DT), cols, input_precision=PRECISION), 0.0)
        l += tl.where(same, tl.dot((k * decay).to(DT), cols, input_precision=PRECISION), 0.0)
        for level in range(4, LEVELS):
            p, l = add_level(p, l, q, k, g, level, C, DT, PRECISION)
    return p, l


@triton.jit
def level_adjoint(
    dq, dk, dg, dp_tile, dl_tile, q, k, g, level,
    C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients through the pairs of a level; a token is a row there or a column, never both."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    near = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
    decay = exp(masked_sum(level_sums(level, C), g, DT))
    q_decayed, k_decayed = (q * decay).to(DT), (k * decay).to(DT)
    own = tl.load(dp_tile + i * C + j)
    to_q = tl.dot(tl.where(near & (i > j), own, 0.0).to(DT), k_decayed, input_precision=PRECISION)
    to_k = tl.dot(tl.where(near & (i < j), own, 0.0).to(DT), q_decayed, input_precision=PRECISION)
    if DELTA:
        own = tl.where(near, tl.load(dl_tile + i * C + j), 0.0).to(DT)
        to_k = tl.dot(own, k_decayed, to_k, input_precision=PRECISION)
    spread = q_decayed.to(tl.float32) * to_q + k_decayed.to(tl.float32) * to_k
    dg += turned_sum(turned_level(level, C), spread, DT)
    return dq + to_q * decay, dk + to_k * decay, dg


@triton.jit
def block_adjoint(
    dq, dk, dg, dp_tile, dl_tile, q, k, g,
    C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for the pairs of different tokens inside of 16."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    rows, columns = ((i // 16) == (j // 16)) & (i > j), ((i // 16) == (j // 16)) & (i < j)
    sums = masked_sum(inside_mask(C, False), tl.maximum(g, LIMIT), DT) + SHIFT
    decay, grow = exp(sums), exp(-sums)
    q_rows, k_rows, cols = (q * decay).to(DT), (k * decay).to(DT), (k * grow).to(DT)
    own = tl.load(dp_tile + i * C + j)
    to_q = tl.dot(tl.where(rows, own, 0.0).to(DT), cols, input_precision=PRECISION)
    to_cols = tl.dot(tl.where(columns, own, 0.0).to(DT), q_rows, input_precision=PRECISION)
    spread = q_rows.to(tl.float32) * to_q
    dq += to_q * decay
    if DELTA:
        own = tl.load(dl_tile + i * C + j)
        to_rows = tl.dot(tl.where(rows, own, 0.0).to(DT), cols, input_precision=PRECISION)
        to_cols = tl.dot(tl.where(columns, own, 0.0).to(DT), k_rows, to_cols, input_precision=PRECISION)
        spread += k_rows.to(tl.float32) * to_rows
        dk += to_rows * decay
    dk += to_cols * grow
    spread = turned_sum(inside_mask(C, True), spread - cols.to(tl.float32) * to_cols, DT, True)
    dg += tl.where(g > LIMIT, spread, 0.0)
    return dq, dk, dg


@triton.jit
def pairs_adjoint(
    dq, dk, dg, dp_tile, dl_tile, q, k, g,
    C: tl.constexpr, DELTA: tl.constexpr, EXACT: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients through ``grams`` off the diagonal, from those of p and l, which lie in memory.

    Above the diagonal of a tile is its transpose: Triton 3.6 has been seen to read beyond shared memory for the product
    of a tile and of its transpose with the same operand. The levels are a loop: unrolled, their masks are all made
    first, and spilled.
    """
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    if EXACT:
        for level in range(LEVELS):
            dq, dk, dg = level_adjoint(dq, dk, dg, dp_tile, dl_tile, q, k, g, level, C, DELTA, DT, PRECISION)
    else:
        dq, dk, dg = block_adjoint(dq, dk, dg, dp_tile, dl_tile, q, k, g, C, DELTA, DT, PRECISION)
        for level in range(4, LEVELS):
            dq, dk, dg = level_adjoint(dq, dk, dg, dp_tile, dl_tile, q, k, g, level, C, DELTA, DT, PRECISION)
    return dq, dk, dg
