"""The adjoint of the pairs of tokens of a chunk, with a gate per channel, by blocks of 16 tokens.

Sums of log gates are made inside of 16 tokens, one warp's tile, and over the blocks of a chunk: what decays a token to
an end of the chunk is its decay to an end of its block, times that of the blocks behind. Between blocks a pair's decay
is a row factor times a column factor in the same way, by doubling (``decays.py``): no exponent is above 0.

The pairs inside of a block share factors, ``exp(D_i + SHIFT) exp(-D_j - SHIFT)``, D the sum of log gates from the
block's start (one from its middle would let later gates change how earlier gradients round), and a log gate below
LIMIT counts as LIMIT there: 2e-4 of an undecayed term, a tenth of what rounding to bf16 makes of it. Their gradient is
that of the clamped gate.

The gradient of a log gate sums what spans it: of every pair ``x_i dx_i`` from the row on, less ``x_j dx_j`` from the
column on. Both are of the very same products: the operands enter as they were rounded, so what cancels in exact
arithmetic cancels here to fp32.
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


@triton.jit
def leave_sums(tile, g, d, C: tl.constexpr, KP: tl.constexpr):
    """The sums of log gates of the blocks, where ``leave_factors`` finds them."""
    _, _, _, whole_at = factors_at(tile, d, C, KP)
    tl.store(whole_at, tl.sum(in_blocks(g), 1))


@triton.jit
def leave_factors(tile, total, C: tl.constexpr, KP: tl.constexpr):
    """``factors_between`` and the decay of the state, of all channels at once: of the few rows of a block of channels
    they took most of its barriers."""
    d = tl.arange(0, KP)[None, :]
    lead_at, tail_at, middle_at, whole_at = factors_at(tile, d, C, KP)
    tl.debug_barrier()  # the sums of all channels are there
    sums = tl.load(whole_at)
    lead, tail, middle, whole = factors_between(sums, C)
    tl.store(total + d, exp(tl.sum(sums, 0)[None, :]))
    tl.store(lead_at, lead)
    tl.store(tail_at, tail)
    tl.store(middle_at, middle)
    tl.debug_barrier()  # and have been read
    tl.store(whole_at, whole)


# ---- the adjoint


@triton.jit
def load_inside(tile, C: tl.constexpr):
    """Of a tile [C, C] the pairs inside of blocks."""
    n, i, j = pair_index(C)
    return tl.load(tile + n * (16 * C + 16) + i * C + j)


@triton.jit
def inside_adjoint(dp, dl, q, k, decay, grow, C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr):
    """Gradients of q and k through the pairs of different tokens inside of blocks, and what is summed for the gates."""
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
    return to_q * decay, dk + to_cols * grow, spread - cols.to(tl.float32) * to_cols


@triton.jit
def halves_adjoint(
    dq, dk, spread, dp_tile, dl_tile, q, k, decay,
    HALF: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Add those of the pairs between the halves of 2 HALF tokens, in which a token is a row or a column, never both:
    one product has the rows' gradients in second halves and the columns' in first ones."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    second = (i // HALF) % 2 == 1
    pairs = (i // HALF) == (j // HALF ^ 1)
    x = (tl.where(second, q, k) * decay).to(DT)
    to_x = tl.dot(tl.load(dp_tile + i * C + j, mask=pairs, other=0.0), x)
    terms = x.to(tl.float32) * to_x
    dq += tl.where(second, to_x * decay, 0.0)
    to_k = tl.where(second, 0.0, to_x)
    if DELTA:
        x = (k * decay).to(DT)
        to_x = tl.dot(tl.load(dl_tile + i * C + j, mask=pairs, other=0.0), x)
        terms += x.to(tl.float32) * to_x
        to_k += to_x
    return dq, dk + to_k * decay, spread + tl.where(second, terms, -terms)


@triton.jit
def leave_masks(masks, C: tl.constexpr, DT: tl.constexpr):
    """The masks of ``blocks_adjoint`` as numbers, [C, C] and [16, 16]: there they are read in one piece, where they
    would be made one by one by every block of channels."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    tl.store(masks + i * C + j, zero_or_one(j >= i, DT))
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(masks + C * C + i * 16 + j, zero_or_one(j >= i, DT))


@triton.jit
def over_tokens(masks, x, DT: tl.constexpr):
    """To every token, the rows of x [C, K] from it on, x as two numbers."""
    C: tl.constexpr = x.shape[0]
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    mask, high = tl.load(masks + i * C + j), x.to(DT)
    return tl.dot(mask, (x - high.to(tl.float32)).to(DT), tl.dot(mask, high))


@triton.jit
def over_rows(masks, x, DT: tl.constexpr):
    """The same inside of blocks."""
    C: tl.constexpr = x.shape[0]
    n, i, j = pair_index(C)
    mask, high = tl.load(masks + C * C + n * 0 + i * 16 + j), x.to(DT)
    sums = tl.dot(mask, in_blocks(high))
    return to_tokens(tl.dot(mask, in_blocks((x - high.to(tl.float32)).to(DT)), sums))


@triton.jit
def blocks_adjoint(
    to_q, to_row, to_column, dtotal, own, lead, tail, middle, whole, dp_inside, dl_inside, dp_tile, dl_tile, masks,
    q, k, g, C: tl.constexpr, DELTA: tl.constexpr, BOUNDED: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and the log gates through all products of a chunk; without BOUNDED those of gates through pairs
    inside of blocks apart, which hold where a gate is above LIMIT.

    ``to_q``, ``to_row`` and ``to_column``: those of q and k decayed from the chunk's start, and of k decayed to its
    end; ``dtotal`` that of the logarithm of the state's decay, ``own`` of the diagonal of P; ``lead``, ``tail``,
    ``middle`` and ``whole`` are ``factors_between``.
    """
    starts, ends, rows, columns = block_decays(g, C, BOUNDED, whole)
    dq, dk, spread = inside_adjoint(dp_inside, dl_inside, q, k, rows, columns, C, DELTA, DT)
    inside = spread
    if not BOUNDED:
        inside, spread = over_rows(masks, spread, DT), tl.zeros_like(q)
    dq, dk = dq + own * k, dk + own * q
    if C == 64:
        decay = halves_decay(starts, ends, middle, 32, C)
        dq, dk, spread = halves_adjoint(dq, dk, spread, dp_tile, dl_tile, q, k, decay, 32, C, DELTA, DT)
    if C > 16:
        decay = halves_decay(starts, ends, middle, 16, C)
        dq, dk, spread = halves_adjoint(dq, dk, spread, dp_tile, dl_tile, q, k, decay, 16, C, DELTA, DT)
    starts, ends = by_block(starts, lead), by_block(ends, tail)
    to_q, to_column = to_q * starts, to_column * ends
    dq, dk = dq + to_q, dk + to_column
    spread += q * to_q
    if DELTA:
        to_row *= starts
        dk += to_row
        spread += k * to_row
    columns = k * to_column
    dg = over_tokens(masks, spread - columns, DT) + (dtotal + tl.sum(columns, 0)[None, :])
    return dq, dk, dg, inside
