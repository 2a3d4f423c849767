"""The pairs of tokens of a chunk with a gate per channel where each has decays of its own, as Triton functions.

A pair's decay is the product of a row factor and a column factor, each the exponential of a masked sum of log gates
(decays.py). The adjoint of a masked sum is the sum with the mask transposed: the gradient of a log gate collects
exactly the pairs that span it, and nothing cancels. What bf16 takes instead is in ``backward_blocks.py``.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .decays import exp, level_sums, masked_sum, total_decay


@triton.jit
def turned_sum(turned, y, DT: tl.constexpr):
    """The adjoint of ``masked_sum``, from the transposed mask: row j sums the rows i of y with ``turned[j, i]``."""
    if tl.float32 == DT:
        sums = tl.dot(turned.to(tl.float32), y, input_precision="tf32x3")
    else:
        sums = tl.dot(turned.to(tl.bfloat16), y.to(tl.bfloat16))
    return sums


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
def levels_adjoint(
    to_q, to_start, to_end, dtotal, own, dp_tile, dl_tile, q, k, g,
    C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``blocks_adjoint`` of the same, by levels of pairs from single tokens on.

    Above the diagonal of a tile is its transpose: Triton 3.6 has been seen to read beyond shared memory for the product
    of a tile and of its transpose with the same operand. The levels are a loop: unrolled, their masks are all made
    first, and spilled.
    """
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    before, after = exp(masked_sum(j <= i, g, DT)), exp(masked_sum(j > i, g, DT))
    dq, to_start, dk = to_q * before, to_start * before, to_end * after
    from_start = q * dq
    if DELTA:
        from_start += k * to_start
    dg = turned_sum(j >= i, from_start, DT) + turned_sum(j < i, k * dk, DT) + dtotal * total_decay(g, C, 1)
    dq, dk = dq + own * k, dk + own * q
    if DELTA:
        dk += to_start
    for level in range(LEVELS):
        dq, dk, dg = level_adjoint(dq, dk, dg, dp_tile, dl_tile, q, k, g, level, C, DELTA, DT, PRECISION)
    return dq, dk, dg
