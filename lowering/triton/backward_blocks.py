"""Decays of a gate per channel by blocks of 16 tokens, the pairs of tokens they scale, and the adjoint of both.

Sums of log gates are made inside of 16 tokens, one warp's tile, and over the blocks of a chunk: what decays a token to
an end of the chunk is its decay to an end of its block, times that of the blocks behind. Between blocks a pair's decay
is a row factor times a column factor in the same way, by doubling (``decays.py``): no exponent is above 0.

The pairs inside of a block share factors, ``exp(D_i + SHIFT) exp(-D_j - SHIFT)``, D the sum of log gates from the
block's start (one from its middle would let later gates change how earlier gradients round), and a log gate below
LIMIT counts as LIMIT there: 2e-4 of an undecayed term, a tenth of what rounding to bf16 makes of it. Their gradient is
that of the clamped gate. It is a difference, ``x_i dx_i - x_j dx_j``, of sums over the very same products: the operands
enter as they were rounded, so what cancels in exact arithmetic cancels here to fp32.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .configs import GATE_LIMIT
from .decays import exp

LIMIT: tl.constexpr = tl.constexpr(GATE_LIMIT)
SHIFT: tl.constexpr = tl.constexpr(68.8)  # with 16 of LIMIT factors are from 1e-30 to 1e30: in range of bf16 with a key
UNSHIFT: tl.constexpr = tl.constexpr(1.3198957943678875e-30)  # exp(-SHIFT)


# ---- blocks of 16 tokens


@triton.jit
def in_blocks(x):
    """A tile [C, K] as [C / 16, 16, K]."""
    return tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]])


@triton.jit
def to_tokens(x):
    """The same, back."""
    return tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]])


@triton.jit
def pair_index(C: tl.constexpr):
    """Block, row and column of the pairs inside of blocks, [C / 16, 16, 16] together."""
    return tl.arange(0, C // 16)[:, None, None], tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]


@triton.jit
def zero_or_one(mask, DT: tl.constexpr):
    """The mask as numbers."""
    return tl.where(mask, 1.0, 0.0).to(DT)


@triton.jit
def masked_rows(mask, x, DT: tl.constexpr, SPLIT: tl.constexpr = True):
    """Row i of each block of x [C, K]: the sum of its rows j with ``mask[:, i, j]``, x as two numbers of DT or one."""
    selected, high = zero_or_one(mask, DT), x.to(DT)
    sums = tl.dot(selected, in_blocks(high))
    if SPLIT:
        sums = tl.dot(selected, in_blocks((x - high.to(tl.float32)).to(DT)), sums)
    return to_tokens(sums)


@triton.jit
def block_decays(g, C: tl.constexpr, BOUNDED: tl.constexpr, whole):
    """exp of the sums of log gates from the start of a token's block up to it, and of those behind it to the end; the
    factors of pairs inside of blocks, of rows and of columns.

    BOUNDED: no gate is below LIMIT, so that all are of one sum; ``whole`` then: the decays of the blocks [C / 16, K].
    """
    n, i, j = pair_index(C)
    if BOUNDED:
        sums = masked_rows((j <= i) & (n >= 0), g, tl.float16) + SHIFT
        rows, columns = exp(sums), exp(-sums)
        starts, ends = rows * UNSHIFT, by_block(columns, whole)
    else:
        starts = exp(masked_rows((j <= i) & (n >= 0), g, tl.float16))
        ends = exp(masked_rows((j > i) & (n >= 0), g, tl.float16))
        sums = masked_rows((j <= i) & (n >= 0), tl.maximum(g, LIMIT), tl.float16) + SHIFT
        rows, columns = exp(sums), exp(-sums)
    return starts, ends, rows, columns


@triton.jit
def block_index(C: tl.constexpr):
    """A block and another, [C / 16, C / 16] together."""
    return tl.arange(0, C // 16)[:, None], tl.arange(0, C // 16)[None, :]


@triton.jit
def sums_where(mask, sums):
    """Row b: the sum of those rows a of ``sums`` [C / 16, K] with ``mask[b, a]``."""
    return tl.sum(tl.where(mask[:, :, None], sums[None, :, :], 0.0), 1)


@triton.jit
def by_block(x, factors):
    """x [C, K], each block times its row of ``factors`` [C / 16, K]."""
    return to_tokens(in_blocks(x) * factors[:, None, :])


@triton.jit
def reaches(HALF: tl.constexpr, C: tl.constexpr):
    """The blocks a between block b, in one half of 2 HALF tokens, and the other half."""
    b, a = block_index(C)
    second = (b * 16 // HALF) % 2 == 1
    return (b * 16 // HALF == a * 16 // HALF) & ((second & (a < b)) | ((b * 16 // HALF % 2 == 0) & (a > b)))


@triton.jit
def outside(HALF: tl.constexpr, C: tl.constexpr):
    """The tokens j of other blocks from which decays of pairs between halves of 2 HALF tokens reach over token i."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    second = (i // HALF) % 2 == 1
    return (i // HALF == j // HALF) & ((second & (j // 16 > i // 16)) | ((i // HALF % 2 == 0) & (j // 16 < i // 16)))


@triton.jit
def halves_decay(starts, ends, middle, HALF: tl.constexpr, C: tl.constexpr):
    """Of each token: the decay between it and the middle of 2 HALF tokens."""
    i = tl.arange(0, C)[:, None]
    decay = tl.where((i // HALF) % 2 == 1, starts, ends)
    if HALF > 16:
        decay = by_block(decay, middle)
    return decay


@triton.jit
def factors_between(sums, C: tl.constexpr):
    """The decays between a block and the chunk's start, its end and its middle, without the block itself, and that of
    the block, times exp(SHIFT)."""
    b, a = block_index(C)
    before, behind, among = sums_where(a < b, sums), sums_where(a > b, sums), sums_where(reaches(C // 2, C), sums)
    return exp(before), exp(behind), exp(among), exp(sums + SHIFT)


@triton.jit
def factors_at(tile, d, C: tl.constexpr, KP: tl.constexpr):
    """Where they lie, ``[4, C / 16, KP]``: of the channels d [1, BK]."""
    at, size = tile + tl.arange(0, C // 16)[:, None] * KP + d, (C // 16) * KP
    return at, at + size, at + 2 * size, at + 3 * size


@triton.jit
def load_factors(tile, d, C: tl.constexpr, KP: tl.constexpr):
    lead, tail, middle, whole = factors_at(tile, d, C, KP)
    return tl.load(lead), tl.load(tail), tl.load(middle), tl.load(whole)


# ---- Gram matrices


@triton.jit
def block_grams(
    p, l, p_inside, l_inside, q, k, starts, ends, rows, columns, middle, C: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """Add ``sum_d x_i k_j decay(i, j)`` of x = q to p and of x = k to l [C, C] where i and j are of different blocks,
    and to p_inside and l_inside [C / 16, 16, 16] where of the same; elsewhere they mean nothing."""
    columns = tl.permute(in_blocks((k * columns).to(DT)), (0, 2, 1))
    p_inside = tl.dot(in_blocks((q * rows).to(DT)), columns, p_inside)
    l_inside = tl.dot(in_blocks((k * rows).to(DT)), columns, l_inside)
    HALVES: tl.constexpr = 0 if C == 16 else (1 if C == 32 else 2)
    for level in tl.static_range(HALVES):
        p, l = halves_grams(p, l, q, k, halves_decay(starts, ends, middle, 16 << level, C), 16 << level, C, DT)
    return p, l, p_inside, l_inside


@triton.jit
def halves_grams(p, l, q, k, decay, HALF: tl.constexpr, C: tl.constexpr, DT: tl.constexpr):
    """The same of pairs between the halves of 2 HALF tokens."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    second = (i // HALF) % 2 == 1
    q_rows, k_decayed = tl.where(second, q * decay, 0.0).to(DT), k * decay
    k_rows, columns = tl.where(second, k_decayed, 0.0).to(DT), tl.trans(tl.where(second, 0.0, k_decayed).to(DT))
    if 2 * HALF == C:
        p, l = tl.dot(q_rows, columns, p), tl.dot(k_rows, columns, l)
    else:
        pair = i // (2 * HALF) == j // (2 * HALF)
        p += tl.where(pair, tl.dot(q_rows, columns), 0.0)
        l += tl.where(pair, tl.dot(k_rows, columns), 0.0)
    return p, l


# ---- the adjoint


@triton.jit
def load_inside(tile, C: tl.constexpr):
    """Of a tile [C, C] the pairs inside of blocks."""
    n, i, j = pair_index(C)
    return tl.load(tile + n * (16 * C + 16) + i * C + j)


@triton.jit
def inside_adjoint(
    dp, dl, masks, q, k, decay, grow, C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr
):  # fmt: skip
    """Gradients of q, k and the log gates through the pairs of different tokens inside of blocks."""
    _, i, j = pair_index(C)
    q_rows, k_rows, cols = (q * decay).to(DT), (k * decay).to(DT), (k * grow).to(DT)
    to_q = to_tokens(tl.dot(tl.where(i > j, dp, 0.0).to(DT), in_blocks(cols)))
    to_cols = tl.dot(tl.where(i < j, dp, 0.0).to(DT), in_blocks(q_rows))
    spread = q_rows.to(tl.float32) * to_q
    dk = tl.zeros_like(q)
    if DELTA:
        to_rows = to_tokens(tl.dot(tl.where(i > j, dl, 0.0).to(DT), in_blocks(cols)))
        to_cols = tl.dot(tl.where(i < j, dl, 0.0).to(DT), in_blocks(k_rows), to_cols)
        spread += k_rows.to(tl.float32) * to_rows
        dk = to_rows * decay
    to_cols = to_tokens(to_cols)
    spread = over_rows(masks, 0, spread - cols.to(tl.float32) * to_cols, DT, True)
    return to_q * decay, dk + to_cols * grow, spread


@triton.jit
def halves_adjoint(
    to_q, to_row, to_column, dp_tile, dl_tile, q_rows, k_rows, k_columns,
    HALF: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Add those of q and k as rows, and of k as columns, before their decays: through the pairs of halves of 2 HALF."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    pair = i // (2 * HALF) == j // (2 * HALF)
    later, earlier = pair & (i // HALF > j // HALF), pair & (i // HALF < j // HALF)
    keys = tl.where((i // HALF) % 2 == 1, k_rows, k_columns).to(DT)
    to_q = tl.dot(tl.load(dp_tile + i * C + j, mask=later, other=0.0), keys, to_q)
    to_column = tl.dot(tl.load(dp_tile + i * C + j, mask=earlier, other=0.0), q_rows.to(DT), to_column)
    if DELTA:
        to_row = tl.dot(tl.load(dl_tile + i * C + j, mask=later, other=0.0), keys, to_row)
        to_column = tl.dot(tl.load(dl_tile + i * C + j, mask=earlier, other=0.0), keys, to_column)
    return to_q, to_row, to_column


@triton.jit
def leave_masks(masks, C: tl.constexpr, DT: tl.constexpr):
    """The masks of ``blocks_adjoint`` as numbers, [3, C, C] and [2, 16, 16]: there they are read in one piece, where
    they would be made one by one by every block of channels."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at = masks + i * C + j
    tl.store(at, zero_or_one(j // 16 > i // 16, DT))
    tl.store(at + C * C, zero_or_one(j // 16 < i // 16, DT))
    tl.store(at + 2 * C * C, zero_or_one(outside(32, C), DT))
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = masks + 3 * C * C + i * 16 + j
    tl.store(at, zero_or_one(j >= i, DT))
    tl.store(at + 256, zero_or_one(j < i, DT))


@triton.jit
def over_blocks(masks, kind: tl.constexpr, x, sums, DT: tl.constexpr):
    """Add, to the tokens i, those rows j of x [C, K] that the mask names."""
    C: tl.constexpr = x.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.dot(tl.load(masks + kind * C * C + i * C + j), x.to(DT), sums)


@triton.jit
def over_rows(masks, kind: tl.constexpr, x, DT: tl.constexpr, SPLIT: tl.constexpr = False):
    """The same sums inside of blocks; SPLIT: of x as two numbers."""
    C: tl.constexpr = x.shape[0]
    n, i, j = pair_index(C)
    mask, high = tl.load(masks + (3 * C * C + kind * 256) + n * 0 + i * 16 + j), x.to(DT)
    sums = tl.dot(mask, in_blocks(high))
    if SPLIT:
        sums = tl.dot(mask, in_blocks((x - high.to(tl.float32)).to(DT)), sums)
    return to_tokens(sums)


@triton.jit
def blocks_adjoint(
    to_q, to_row, to_column, dtotal, own, lead, tail, middle, whole, dp_inside, dl_inside, dp_tile, dl_tile, masks,
    q, k, g, C: tl.constexpr, DELTA: tl.constexpr, BOUNDED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and the log gates through all products of a chunk; those of gates through pairs inside of
    blocks apart, which hold where a gate is above LIMIT.

    ``to_q``, ``to_row`` and ``to_column``: those of q and k decayed from the chunk's start, and of k decayed to its
    end; ``dtotal`` that of the logarithm of the state's decay, ``own`` of the diagonal of P; ``lead``, ``tail``,
    ``middle`` and ``whole`` are ``factors_between``.
    """
    starts, ends, rows, columns = block_decays(g, C, BOUNDED, whole)
    dq, dk, inside = inside_adjoint(dp_inside, dl_inside, masks, q, k, rows, columns, C, DELTA, DT)
    dq, dk = dq + own * k, dk + own * q
    q_rows, k_rows, k_columns = q * starts, k * starts, k * ends
    to_q, to_column = by_block(to_q, lead), by_block(to_column, tail)
    rows, columns = q_rows * to_q, k_columns * to_column
    if DELTA:
        to_row = by_block(to_row, lead)
        rows += k_rows * to_row
    dg = over_blocks(masks, 0, rows, tl.zeros_like(q) + dtotal, DT)
    dg = over_blocks(masks, 1, columns, dg, DT)
    if C == 64:
        nothing = tl.zeros_like(q)
        q_far, k_far, c_far = by_block(q_rows, middle), by_block(k_rows, middle), by_block(k_columns, middle)
        far_q, far_row, far_column = halves_adjoint(
            nothing, nothing, nothing, dp_tile, dl_tile, q_far, k_far, c_far, 32, C, DELTA, DT
        )  # fmt: skip
        spread = q_far * far_q + k_far * far_row + c_far * far_column
        dg = over_blocks(masks, 2, spread, dg, DT)
        to_q, to_column = to_q + by_block(far_q, middle), to_column + by_block(far_column, middle)
        to_row += by_block(far_row, middle)
    if C >= 32:
        to_q, to_row, to_column = halves_adjoint(
            to_q, to_row, to_column, dp_tile, dl_tile, q_rows, k_rows, k_columns, 16, C, DELTA, DT
        )  # fmt: skip
    rows, columns = q_rows * to_q, k_columns * to_column
    dq += starts * to_q
    dk += ends * to_column
    if DELTA:
        rows += k_rows * to_row
        dk += starts * to_row
    dg += over_rows(masks, 0, rows, DT) + over_rows(masks, 1, columns, DT)
    return dq, dk, dg, inside
