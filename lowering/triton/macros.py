"""The macro-ops of a tile program and the loads of its ports, as Triton functions that emitted kernels call.

Decays: as in ``lowering/decay.py`` a decay between two tokens is the exponential of a *sum of log gates*, never of a
difference of cumulative sums, so no gate however strong overflows or swallows its mild neighbours. The sums are matrix
products with 0/1 matrices: exact in their zeros, causal bit for bit, and on tensor cores.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

# exp() of this is exactly 0, and 64 of them still fit fp16's range of sums; a stronger log gate is the same gate.
LOG_FLOOR: tl.constexpr = tl.constexpr(-512.0)


# ---- loads


@triton.jit
def l2norm_vector(x, eps):
    """x * rsqrt(sum(x * x) + eps)."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp x), linear where exp x would swallow the 1."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_gate(x, rate, FN: tl.constexpr, gate_scale):
    """The log decay that x (dt_bias added) stands for; ``rate`` is exp(A_log)."""
    if FN == "softplus":
        x = -rate * softplus(x)
    elif FN == "sigmoid":
        x = gate_scale * sigmoid(rate * x)
    elif FN == "logsigmoid":
        x = gate_scale * (tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x))))
    elif FN == "factor":
        x = tl.log(x)
    return tl.where(x < LOG_FLOOR, LOG_FLOOR, x)


@triton.jit
def locate_chunk(cu_seqlens, chunk_offsets, chunk, N, T):
    """Packed sequences: which one a chunk belongs to, where its tokens start and end (clamped into [0, T])."""
    sequence = 0
    for first in range(0, N, 128):
        i = first + tl.arange(0, 128)
        ends = tl.load(chunk_offsets + 1 + i, mask=i < N, other=2147483647)
        sequence += tl.sum((ends <= chunk).to(tl.int32), 0)
    sequence = tl.minimum(sequence, N - 1)
    start = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), T)
    return sequence, start, end


@triton.jit
def chunk_offsets_kernel(cu_seqlens, chunk_offsets, N, C: tl.constexpr):
    """chunk_offsets[n] = chunks of the sequences before n; one program."""
    total = 0
    tl.store(chunk_offsets, total)
    for first in range(0, N, 128):
        i = first + tl.arange(0, 128)
        start = tl.load(cu_seqlens + i, mask=i < N, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + i + 1, mask=i < N, other=0).to(tl.int32)
        ends = total + tl.cumsum((tl.maximum(end - start, 0) + C - 1) // C, 0)
        tl.store(chunk_offsets + 1 + i, ends, mask=i < N)
        total = tl.max(ends, 0)


# ---- decays


@triton.jit
def sum_columns(C: tl.constexpr, DT: tl.constexpr):
    """The row of g that each column of a 0/1 matrix picks: g is split in two where operands are 16-bit."""
    if DT == tl.float32:
        columns = tl.arange(0, C)[None, :]
    else:
        columns = tl.arange(0, 2 * C)[None, :] >> 1
    return columns


@triton.jit
def masked_sum(mask, g, DT: tl.constexpr):
    """Row i: the sum of the rows of ``g`` that ``mask[i]`` selects; the mask's columns are ``sum_columns``.

    On fp16 tensor cores with g in two fp16 parts (22 bits), one under the other, where the operands are 16-bit; else
    fp32 accurate.
    """
    if DT == tl.float32:
        sums = tl.dot(mask.to(tl.float32), g, input_precision="tf32x3")
    else:  # not an early return: what follows one is compiled too
        high = g.to(tl.float16)
        low = (g - high.to(tl.float32)).to(tl.float16)
        parts = tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (2 * g.shape[0], g.shape[1]))
        sums = tl.dot(mask.to(tl.float16), parts)
    return sums


@triton.jit
def prefix_decay(g, C: tl.constexpr, DT: tl.constexpr):
    """exp(g_0 + ... + g_i)."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if g.shape[1] == 1:
        sums = tl.sum(tl.where(j <= i, tl.trans(g), 0.0), 1)[:, None]
    else:
        sums = masked_sum(sum_columns(C, DT) <= i, g, DT)
    return tl.exp(sums)


@triton.jit
def suffix_decay(g, C: tl.constexpr, DT: tl.constexpr):
    """exp(g_{i+1} + ... + g_{C-1})."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if g.shape[1] == 1:
        sums = tl.sum(tl.where(j > i, tl.trans(g), 0.0), 1)[:, None]
    else:
        sums = masked_sum(sum_columns(C, DT) > i, g, DT)
    return tl.exp(sums)


@triton.jit
def total_decay(g):
    """exp(g_0 + ... + g_{C-1}), one row."""
    return tl.exp(tl.sum(g, 0))[None, :]


@triton.jit
def level_sums(level, C: tl.constexpr, DT: tl.constexpr):
    """Blocks of b = 2^level: the 0/1 matrix of the sums that pairs of halves of a block of 2b need.

    A token of a second half needs the sum from its half's start to itself, one of a first half the sum from the next
    token to its half's end: row factor times column factor is the decay between the two, both exponents <= 0.
    Row i selects the columns j with 0 <= j - first < width, one unsigned comparison.
    """
    i, j = tl.arange(0, C)[:, None], sum_columns(C, DT)
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


@triton.jit
def channel_grams(a_qk, a_kk, q, k, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Add to A_qk (i >= j) and A_kk (i > j), with one gate per channel: sum_d x_i k_j exp(g_{j+1} + ... + g_i).

    By doubling (see ``level_sums``) from blocks of BLOCK tokens. Inside those the gates are known to be bounded so that
    exp(-(sum from the block's start)) is finite; BLOCK = 1 needs no bound.
    """
    LOG_BLOCK: tl.constexpr = 0 if BLOCK == 1 else (2 if BLOCK == 4 else (3 if BLOCK == 8 else 4))
    LOG_C: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if BLOCK == 1:
        a_qk += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    else:
        same = (i >> LOG_BLOCK) == (j >> LOG_BLOCK)
        columns = sum_columns(C, DT)
        p = masked_sum(((i >> LOG_BLOCK) == (columns >> LOG_BLOCK)) & (columns <= i), g, DT)
        rows = tl.exp(p)
        cols = tl.trans((k * tl.exp(-p)).to(DT))
        a_qk += tl.where(same & (i >= j), tl.dot((q * rows).to(DT), cols, input_precision=PRECISION), 0.0)
        a_kk += tl.where(same & (i > j), tl.dot((k * rows).to(DT), cols, input_precision=PRECISION), 0.0)
    for level in range(LOG_BLOCK, LOG_C):
        decay = tl.exp(masked_sum(level_sums(level, C, DT), g, DT))
        pairs = level_pairs(level, C)
        k_decayed = (k * decay).to(DT)
        cols = tl.trans(k_decayed)
        a_qk += tl.where(pairs, tl.dot((q * decay).to(DT), cols, input_precision=PRECISION), 0.0)
        a_kk += tl.where(pairs, tl.dot(k_decayed, cols, input_precision=PRECISION), 0.0)
    return a_qk, a_kk


@triton.jit
def channel_gram(a_qk, q, k, g, C: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr, PRECISION: tl.constexpr):
    """Add to A_qk alone."""
    LOG_BLOCK: tl.constexpr = 0 if BLOCK == 1 else (2 if BLOCK == 4 else (3 if BLOCK == 8 else 4))
    LOG_C: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if BLOCK == 1:
        a_qk += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    else:
        same = (i >> LOG_BLOCK) == (j >> LOG_BLOCK)
        columns = sum_columns(C, DT)
        p = masked_sum(((i >> LOG_BLOCK) == (columns >> LOG_BLOCK)) & (columns <= i), g, DT)
        cols = tl.trans((k * tl.exp(-p)).to(DT))
        a_qk += tl.where(same & (i >= j), tl.dot((q * tl.exp(p)).to(DT), cols, input_precision=PRECISION), 0.0)
    for level in range(LOG_BLOCK, LOG_C):
        decay = tl.exp(masked_sum(level_sums(level, C, DT), g, DT))
        pairs = level_pairs(level, C)
        cols = tl.trans((k * decay).to(DT))
        a_qk += tl.where(pairs, tl.dot((q * decay).to(DT), cols, input_precision=PRECISION), 0.0)
    return a_qk


@triton.jit
def token_decays(g, C: tl.constexpr, DT: tl.constexpr):
    """[C, C]: exp(g_{j+1} + ... + g_i) for a gate per token [C, 1]; finite everywhere."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.exp(masked_sum(sum_columns(C, DT) <= i, tl.where(i > j, g, 0.0), DT))


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + strict lower triangle of a)^-1 by doubling: the inverse of a block of 2b from those of its halves.

    [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]

    PRECISION "fp16": operands of the products in fp16, for matrices whose inverse is known to be small.
    """
    LOG_C: tl.constexpr = 4 if C == 16 else (5 if C == 32 else 6)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(((i >> 1) == (j >> 1)) & (i > j), a, 0.0)
    for level in range(1, LOG_C):
        lower = tl.where(level_pairs(level, C), a, 0.0)
        if PRECISION == "fp16":
            halves = inverse.to(tl.float16)
            inverse -= tl.dot(halves, tl.dot(lower.to(tl.float16), halves).to(tl.float16))
        else:
            product = tl.dot(lower, inverse, input_precision=PRECISION)
            inverse -= tl.dot(inverse, product, input_precision=PRECISION)
    return inverse
