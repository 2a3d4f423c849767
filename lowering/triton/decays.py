"""The decays of a tile program, and the Gram matrices they scale, as Triton functions that emitted kernels call.

As in ``lowering/decay.py`` a decay between two tokens is the exponential of a *sum of log gates*, never of a difference
of cumulative sums over the chunk, so no gate however strong overflows or swallows its mild neighbours. The sums are
matrix products with matrices of 0, 1 and -1: exact in their zeros, causal bit for bit, and on tensor cores.

BLOCK: tokens of a block whose log gates are known to be bounded, so that ``exp(-sum)`` over half of it is finite. With
``D_i`` the sum from a block's middle to token i (negative in front of it), any decay inside the block is
``exp(D_i) exp(-D_j)``, and all that reaches out of it is that times one number a channel. BLOCK = 1: no bound is known.
BLOCK = 0: none is known, but keys are normalised and their products are rounded to bf16. Inside of 16 tokens a log gate
below LIMIT then counts as LIMIT in the products of two of them (6e-5 of an undecayed term, a sixtieth of the rounding).
What several of these functions compute of the same gate is computed once, by the compiler's elimination of common
subexpressions.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LIMIT: tl.constexpr = tl.constexpr(-9.7)  # exp of eight of it is 2e-34: in range, and its inverse times a key as well


@triton.jit
def exp(x):
    """A product and one instruction of the special function unit; results below 1e-38 are 0."""
    return tl.exp2(x * LOG2E)


# ---- sums of log gates


@triton.jit
def masked_sum(mask, g, DT: tl.constexpr):
    """Row i: the sum of the rows of ``g``, each times ``mask[i, j]`` in {-1, 0, 1}.

    On fp16 tensor cores with g in two fp16 parts (22 bits), where the operands are 16-bit; else fp32 accurate.
    """
    if DT == tl.float32:
        sums = tl.dot(mask.to(tl.float32), g, input_precision="tf32x3")
    else:  # not an early return: what follows one is compiled too
        high = g.to(tl.float16)
        low = (g - high.to(tl.float32)).to(tl.float16)
        selected = mask.to(tl.float16)
        sums = tl.dot(selected, low, tl.dot(selected, high))
    return sums


@triton.jit
def centred_sums(g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr):
    """D: the sum from the middle of a token's block to the token, negative in front of the middle."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    middle = i // BLOCK * BLOCK + (BLOCK // 2 - 1)
    mask = tl.where((j > middle) & (j <= i), 1.0, 0.0) - tl.where((j > i) & (j <= middle), 1.0, 0.0)
    return masked_sum(mask, g, DT)


@triton.jit
def sums_in_blocks(g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr):
    """The same from the block's start, so that no later gate changes how a token's factors round, brought to the same
    range: of 16 gates of -8.6 or of 32 of -5."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return masked_sum((j <= i) & (i // BLOCK == j // BLOCK), g, DT) + (68.8 if BLOCK == 16 else 80.0)


@triton.jit
def half_sums(g, C: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of the halves of every block, [2 C / BLOCK, K]."""
    return tl.sum(tl.reshape(g, [2 * C // BLOCK, BLOCK // 2, g.shape[1]]), 1)


@triton.jit
def sum_of_halves(halves, first, last):
    """The sum of the halves from ``first`` on, before ``last``: one row."""
    half = tl.arange(0, halves.shape[0])[:, None]
    return tl.sum(tl.where((half >= first) & (half < last), halves, 0.0), 0)[None, :]


@triton.jit
def level_sums(level, C: tl.constexpr):
    """Blocks of b = 2^level: the 0/1 matrix of the sums that pairs of halves of a block of 2b need.

    A token of a second half needs the sum from its half's start to itself, one of a first half the sum from the next
    token to its half's end: row factor times column factor is the decay between the two, both exponents <= 0.
    Row i selects the columns j with 0 <= j - first < width, one unsigned comparison.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    start = (i >> level) << level
    second = ((i >> level) & 1) == 1
    first = tl.where(second, start, i + 1)
    width = tl.where(second, i + 1 - start, start + (1 << level) - first)
    return (j - first).to(tl.uint32, bitcast=True) < width.to(tl.uint32, bitcast=True)


@triton.jit
def level_pairs(level, C: tl.constexpr):
    """The pairs (i, j) of that level: i in the second half of a block of 2b, j in its first half."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    first = (i >> (level + 1)) << (level + 1)
    width = tl.where(((i >> level) & 1) == 1, 1 << level, 0)
    return (j - first).to(tl.uint32, bitcast=True) < width.to(tl.uint32, bitcast=True)


# ---- decays to the ends of a chunk


@triton.jit
def prefix_decay(g, C: tl.constexpr):
    """exp(g_0 + ... + g_i) of a gate per token [C, 1]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return exp(tl.sum(tl.where(j <= i, tl.trans(g), 0.0), 1)[:, None])


@triton.jit
def suffix_decay(g, C: tl.constexpr):
    """exp(g_{i+1} + ... + g_{C-1}) of a gate per token [C, 1]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return exp(tl.sum(tl.where(j > i, tl.trans(g), 0.0), 1)[:, None])


@triton.jit
def total_decay(g, C: tl.constexpr, BLOCK: tl.constexpr):
    """exp(g_0 + ... + g_{C-1}), one row."""
    if BLOCK <= 1:
        decay = exp(tl.sum(g, 0)[None, :])
    else:
        decay = exp(sum_of_halves(half_sums(g, C, BLOCK), 0, 2 * C // BLOCK))
    return decay


@triton.jit
def decayed_from_start(x, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr):
    """x_i exp(g_0 + ... + g_i), with a gate per channel."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if BLOCK <= 1:
        x *= exp(masked_sum(j <= i, g, DT))
    else:
        halves = half_sums(g, C, BLOCK)
        scaled = x * exp(centred_sums(g, C, BLOCK, DT))
        x = scaled * exp(sum_of_halves(halves, 0, 1))
        for block in tl.static_range(1, C // BLOCK):
            start, before = (
                exp(sum_of_halves(halves, 2 * block, 2 * block + 1)),
                exp(sum_of_halves(halves, 0, 2 * block)),
            )
            x = tl.where(i // BLOCK >= block, scaled * start * before, x)
    return x


@triton.jit
def decayed_to_end(x, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr):
    """x_i exp(g_{i+1} + ... + g_{C-1}), with a gate per channel."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if BLOCK <= 1:
        x *= exp(masked_sum(j > i, g, DT))
    else:
        halves = half_sums(g, C, BLOCK)
        x = decayed_onwards(x * exp(-centred_sums(g, C, BLOCK, DT)), halves, C // BLOCK - 1, C, BLOCK)
        x *= exp(sum_of_halves(halves, 2 * (C // BLOCK) - 1, 2 * (C // BLOCK)))
    return x


@triton.jit
def decayed_onwards(x, halves, to: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of x scaled to the middles of their blocks, scaled on to the middle of block ``to``; later ones as they are.

    In two steps, to the end of a block and from there on (as in ``decayed_from_start``): what is scaled may be as large
    as the bound allows and both factors as small, so that their product would be 0 where all three together are not.
    """
    i = tl.arange(0, C)[:, None]
    for block in tl.static_range(1, to + 1):
        end = exp(sum_of_halves(halves, 2 * block - 1, 2 * block))
        middle = exp(sum_of_halves(halves, 2 * block, 2 * block + 1))
        x = tl.where(i // BLOCK < block, x * end * middle, x)
    return x


@triton.jit
def token_decays(g, C: tl.constexpr, DT: tl.constexpr):
    """[C, C]: exp(g_{j+1} + ... + g_i) for a gate per token [C, 1]; finite everywhere."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return exp(masked_sum(j <= i, tl.where(i > j, g, 0.0), DT))


# ---- Gram matrices with a gate per channel: sum_d x_i k_j exp(g_{j+1} + ... + g_i)


@triton.jit
def add_level(a_qk, a_kk, q, k, g, level, C: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs of a level, see ``level_sums``."""
    decay = exp(masked_sum(level_sums(level, C), g, DT))
    pairs = level_pairs(level, C)
    k_decayed = (k * decay).to(DT)
    cols = tl.trans(k_decayed)
    a_qk += tl.where(pairs, tl.dot((q * decay).to(DT), cols, input_precision=PRECISION), 0.0)
    a_kk += tl.where(pairs, tl.dot(k_decayed, cols, input_precision=PRECISION), 0.0)
    return a_qk, a_kk


@triton.jit
def diagonal(q, k, C: tl.constexpr):
    """The pairs of a token with itself, which nothing decays.

    Added behind the loop over levels: as what that loop starts from, Triton 3.6 made of it numbers that change from run
    to run (fp32 on an H200, two warps or more; right with one, and with products that are not tf32x3).
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)


@triton.jit
def channel_grams(
    a_qk, a_kk, q, k, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr,
    LOWEST: tl.constexpr = LIMIT, CAUSAL: tl.constexpr = False,
):  # fmt: skip
    """Add to A_qk and A_kk what their lower triangles need; what lies above means nothing.

    With BLOCK, the rows of one block at a time meet columns that are scaled to its middle. Else by doubling, from
    single tokens or from 16; CAUSAL: from BLOCK, too, and by ``sums_in_blocks``. Without a bound a log gate counts as
    at least LOWEST.
    """
    LEVELS: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if BLOCK == 1:
        for level in range(LEVELS):
            a_qk, a_kk = add_level(a_qk, a_kk, q, k, g, level, C, DT, PRECISION)
        a_qk += diagonal(q, k, C)
    elif BLOCK == 0 or CAUSAL:
        TOKENS: tl.constexpr = 16 if BLOCK == 0 else BLOCK
        bounded = tl.maximum(g, LOWEST) if BLOCK == 0 else g
        if CAUSAL:
            sums = sums_in_blocks(bounded, C, TOKENS, DT)
        else:
            sums = centred_sums(bounded, C, TOKENS, DT)
        same = (i // TOKENS) == (j // TOKENS)
        decay, cols = exp(sums), tl.trans((k * exp(-sums)).to(DT))
        a_qk += tl.where(same, tl.dot((q * decay).to(DT), cols, input_precision=PRECISION), 0.0)
        a_kk += tl.where(same, tl.dot((k * decay).to(DT), cols, input_precision=PRECISION), 0.0)
        for level in tl.static_range(4 if TOKENS == 16 else 5, LEVELS):
            a_qk, a_kk = add_level(a_qk, a_kk, q, k, g, level, C, DT, PRECISION)
    else:
        halves = half_sums(g, C, BLOCK)
        sums = centred_sums(g, C, BLOCK, DT)
        decay = exp(sums)
        q_rows, k_rows, cols = (q * decay).to(DT), (k * decay).to(DT), k * exp(-sums)
        for block in tl.static_range(C // BLOCK):
            own = i // BLOCK == block
            onwards = tl.trans(decayed_onwards(cols, halves, block, C, BLOCK).to(DT))
            a_qk = tl.dot(tl.where(own, q_rows, 0.0), onwards, a_qk, input_precision=PRECISION)
            a_kk = tl.dot(tl.where(own, k_rows, 0.0), onwards, a_kk, input_precision=PRECISION)
    return a_qk, a_kk


@triton.jit
def channel_gram(a_qk, q, k, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Add to A_qk alone: what A_kk would take is not read, so the compiler leaves it out."""
    if BLOCK == 1:
        for level in range(4 if C == 16 else (5 if C == 32 else 6)):
            a_qk, _ = add_level(a_qk, tl.zeros([C, C], tl.float32), q, k, g, level, C, DT, PRECISION)
        a_qk += diagonal(q, k, C)
    else:
        a_qk, _ = channel_grams(a_qk, tl.zeros([C, C], tl.float32), q, k, g, C, BLOCK, DT, PRECISION)
    return a_qk
