"""Triton helpers of a gate per channel, and the kernel in front of the products that needs such gates token by token,
on Vec alone: ``sub_chunks``. It also takes one gate a token, where Cube does the rest without Vec. As in ``macros.py``
their text is copied into the modules that use them.

A pair of tokens in different sub-chunks of R belongs to one *level*: it lies in neighbouring blocks of N = R << level
tokens. Its decay is that since the later block began times that until the earlier one ends. Half of a chunk's tokens
are in a later block of a level and half in an earlier one; a *level* buffer has C / 2 rows a level, block by block.
"""

# ruff: noqa: ANN001, ANN201
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportUntypedFunctionDecorator=false

import triton
import triton.language as tl

from .macros import (
    block_at,
    floor_gate,
    gates_at,
    inverse_of_blocks,
    row_rates,
    sigmoid,
    tile_at,
    tokens_at,
    vector_at,
)


@triton.jit
def gate_parameters(A_log_ptr, dt_bias_ptr, head, HV: tl.constexpr, K: tl.constexpr):
    """What a gate function has of a head: its rate and its bias. Kernels with another function than "log" bring this
    and the next by themselves (``Fused.functions``)."""
    return 0.0, 0.0


@triton.jit
def log_gate(x, rate, bias, gate_scale, rows, N: tl.constexpr):
    """[N, BK]: the log decays that ``x`` stands for; of more tokens than one, those past ``rows`` are 0."""
    return floor_gate(x)


@triton.jit
def gates_of(
    g_ptr, rate, bias, gate_scale, token, head, rows, column, tokens, HV: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[N, BK]: log gates of N tokens, ``WIDE`` of a tensor that has one a channel; else all channels have the same."""
    if WIDE:
        g = tl.load(tokens_at(g_ptr, token, head, rows, column, HV, N, K, BK), boundary_check=(0,))
    else:
        g = tl.load(gates_at(g_ptr, token, head, rows, tokens, N), boundary_check=(0,))
        g = tl.broadcast_to(g[:, None], (N, BK))
    return log_gate(g, rate, bias, gate_scale, rows, N)


@triton.jit
def gate_total(
    g_ptr, rate, bias, gate_scale, token, head, rows, column, low, high, tokens, HV: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[BK]: exp of the sum of the gates of the sub-chunks low, ..., high - 1."""
    total = tl.zeros([BK], tl.float32)
    for n in range(low, high):
        g = gates_of(
            g_ptr, rate, bias, gate_scale, token + n * R, head, rows - n * R, column, tokens, HV, R, K, BK, WIDE
        )
        total += tl.sum(g, 0)
    return tl.exp(total)


# ---- products of a level, on Cube


@triton.jit
def level_at(ptr, at, level, pair, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, LEVELS: tl.constexpr):
    """N rows of a level buffer: those of a pair of blocks."""
    base = ptr + at.to(tl.int64) * (C * LEVELS // 2 * K)
    row = level * (C // 2) + pair * N
    return tl.make_block_ptr(base, (C * LEVELS // 2, K), (K, 1), (row, 0), (N, K), (1, 0))


@triton.jit
def gram_block(
    gram_ptr, rows_ptr, cols_ptr, at, level, pair, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    x = tl.load(level_at(rows_ptr, at, level, pair, C, K, N, LEVELS))
    y = tl.load(level_at(cols_ptr, at, level, pair, C, K, N, LEVELS))
    product = tl.dot(x, tl.trans(y), input_precision="ieee").to(gram_ptr.dtype.element_ty)
    tl.store(block_at(gram_ptr, at, (2 * pair + 1) * N, 2 * pair * N, C, N), product)


@triton.jit
def gram_below(
    gram_ptr, rows_ptr, cols_ptr, at, C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr
):
    """What is below the diagonal blocks of a chunk's decay-weighted Gram matrix, where they lie: a product for every
    pair of neighbours of a level."""
    for level in tl.static_range(LEVELS):
        for pair in tl.static_range(C // (2 * (R << level))):
            gram_block(gram_ptr, rows_ptr, cols_ptr, at, level, pair, C, K, R << level, LEVELS)


@triton.jit
def round_pair(m_ptr, io_ptr, at, low, C: tl.constexpr, N: tl.constexpr):
    left = tl.load(block_at(m_ptr, at, low + N, low + N, C, N))
    below = tl.load(block_at(m_ptr, at, low + N, low, C, N))
    left = tl.dot(left, below, input_precision="ieee")
    x = tl.load(block_at(m_ptr, at, low, low, C, N))
    result = tl.dot(left, x, input_precision="ieee")
    if 2 * N < C:
        left = tl.load(block_at(m_ptr, at, low + N, low, C, N))
        right = tl.dot(left, x, input_precision="ieee")
        tl.store(block_at(m_ptr, at, low + N, low, C, N), result)  # in the place of ``below``
        left = tl.load(block_at(m_ptr, at, low + N, low + N, C, N))
        result = tl.dot(left, right, input_precision="ieee")
    result = result.to(io_ptr.dtype.element_ty)
    tl.store(block_at(io_ptr, at, low + N, low, C, N), result)


@triton.jit
def join_rounded(m_ptr, io_ptr, at, C: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr):
    """``join_blocks`` that leaves what is below the diagonal blocks in the inputs' dtype. A block that is joined
    further is made twice, as (y l) x and as y (l x): of one product Cube stores one result, Vec would cast the other.
    """
    for level in tl.static_range(LEVELS):
        for pair in tl.static_range(C // (2 * (R << level))):
            round_pair(m_ptr, io_ptr, at, 2 * pair * (R << level), C, R << level)


@triton.jit
def pairs_block(
    out_ptr, weights_ptr, scaled_ptr, at, level, pair, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    LEVELS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    weights = tl.load(block_at(weights_ptr, at, (2 * pair + 1) * N, 2 * pair * N, C, N))
    y = tl.load(level_at(scaled_ptr, at, level, pair, C, K, N, LEVELS))
    if TURNED:
        product = tl.dot(tl.trans(weights), y, input_precision="ieee")
    else:
        product = tl.dot(weights, y, input_precision="ieee")
    tl.store(level_at(out_ptr, at, level, pair, C, K, N, LEVELS), product)


@triton.jit
def pairs_below(
    out_ptr, weights_ptr, scaled_ptr, at, C: tl.constexpr, K: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Level by level, the weights below the diagonal blocks by the scaled tokens of the earlier block, for those of the
    later one; or ``TURNED``, the other way round."""
    for level in tl.static_range(LEVELS):
        for pair in tl.static_range(C // (2 * (R << level))):
            pairs_block(out_ptr, weights_ptr, scaled_ptr, at, level, pair, C, K, R << level, LEVELS, TURNED)


# ---- in front of the products


@triton.jit
def load_rows(
    ptr, token, head, rows, l2norm_eps, HEADS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr
):
    """[R, K]: queries or keys, ``NORM`` divided by their norms."""
    x = tl.load(tokens_at(ptr, token, head, rows, 0, HEADS, R, K, K), boundary_check=(0,)).to(tl.float32)
    if NORM:
        x = x * row_rates(x, l2norm_eps)[:, None]
    return x


@triton.jit
def walk_rows(
    q_ptr, k_ptr, g_ptr, rate, bias, gate_scale, token, group, head, rows, tokens, scale, l2norm_eps, H: tl.constexpr,
    HV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Walk the R tokens from ``token`` and keep, for every token j up to row i, forward[j] = decay(i, j), and
    before[i] = decay(i, start): products of single gates, so that the diagonal blocks are exact for any gate.

    Returns the keys, before, forward to the last row, and the Gram matrices [R, R] of queries and keys with keys.
    """
    row = tl.arange(0, R).to(tl.float32)
    k = load_rows(k_ptr, token, group, rows, l2norm_eps, H, R, K, NORM)
    before = tl.full([R, K], 1.0, tl.float32)
    forward = tl.full([R, K], 1.0, tl.float32)
    A_qk = tl.zeros([R, R], tl.float32)
    A_kk = tl.zeros([R, R], tl.float32)
    for i in range(tl.minimum(rows, R)):
        here = i.to(tl.float32)
        g_i = gates_of(g_ptr, rate, bias, gate_scale, token + i, head, rows - i, 0, tokens, HV, 1, K, K, WIDE)
        q_i = tl.load(tokens_at(q_ptr, token + i, group, rows - i, 0, H, 1, K, K), boundary_check=(0,))
        alpha = tl.exp(g_i)
        forward = forward * tl.where(row[:, None] < here, alpha, 1.0)
        before = before * tl.where(row[:, None] < here, 1.0, alpha)
        kept = forward * k
        qk = tl.where(row <= here, tl.sum(kept * (q_i.to(tl.float32) * scale), 1), 0.0)
        A_qk = tl.where(row[:, None] == here, qk[None, :], A_qk)
        if DELTA:
            k_i = tl.load(tokens_at(k_ptr, token + i, group, rows - i, 0, H, 1, K, K), boundary_check=(0,))
            kk = tl.where(row < here, tl.sum(kept * k_i.to(tl.float32), 1), 0.0)
            A_kk = tl.where(row[:, None] == here, kk[None, :], A_kk)
    if NORM:  # of the rows; the columns are k's
        A_qk = A_qk * row_rates(load_rows(q_ptr, token, group, rows, l2norm_eps, H, R, K, False), l2norm_eps)[:, None]
        A_kk = A_kk * row_rates(load_rows(k_ptr, token, group, rows, l2norm_eps, H, R, K, False), l2norm_eps)[:, None]
    return k, before, forward, A_qk, A_kk


@triton.jit
def diagonal_at(ptr, at, n, C: tl.constexpr, R: tl.constexpr):
    base = ptr + at.to(tl.int64) * (C * C)
    return tl.make_block_ptr(base, (C, C), (C, 1), (n * R, n * R), (R, R), (1, 0))


@triton.jit
def store_diagonal(ptr, at, n, x, C: tl.constexpr, R: tl.constexpr):
    """A diagonal block of a tile, and zeros to its right."""
    tl.store(diagonal_at(ptr, at, n, C, R), x)
    for m in range(n + 1, C // R):
        tl.store(block_at(ptr, at, n * R, m * R, C, R), tl.zeros([R, R], tl.float32).to(ptr.dtype.element_ty))


@triton.jit
def store_inverse(
    M_inverted_ptr, M_rounded_ptr, beta_ptr, A_kk, at, n, token, head, rows, tokens, C: tl.constexpr, R: tl.constexpr,
    BETA: tl.constexpr, JOINED: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """The inverse of a diagonal block, times beta by columns where it is ``JOINED``."""
    if BETA:
        beta = tl.load(gates_at(beta_ptr, token, head, rows, tokens, R), boundary_check=(0,))
        if SIGMOID:
            beta = sigmoid(beta)
        A_kk = A_kk * beta[:, None]
    M = inverse_of_blocks(A_kk, 0.0, R, R)
    if JOINED:
        if BETA:
            M = M * beta[None, :]
        store_diagonal(M_rounded_ptr, at, n, M.to(M_rounded_ptr.dtype.element_ty), C, R)
        store_diagonal(M_inverted_ptr, at, n, M, C, R)
    else:
        tl.store(diagonal_at(M_inverted_ptr, at, n, C, R), M)


@triton.jit(do_not_specialize=["tokens", "tasks"])
def sub_chunks(
    q_ptr,
    k_ptr,
    g_ptr,
    Q_gated_io_ptr,
    K_gated_neg_io_ptr,
    K_decayed_io_ptr,
    decay_ptr,
    A_qk_diagonal_ptr,
    A_kk_diagonal_ptr,
    A_qk_rows_ptr,
    A_kk_rows_ptr,
    k_cols_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    M_inverted_ptr,
    M_rounded_ptr,
    chunks,
    scale,
    gate_scale,
    l2norm_eps,
    tokens,
    tasks,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
    BETA: tl.constexpr,
    INVERTED: tl.constexpr,
    JOINED: tl.constexpr,
    WIDE: tl.constexpr,
    NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Everything of R tokens that needs their gates one by one, for all sub-chunks in parallel: diagonal blocks, tokens
    scaled for products with the state, and the rows and columns of every level. ``INVERTED``: also the inverses of the
    diagonal blocks that the triangular inverse begins with, times ``BETA`` where there is one. ``JOINED``: all for Cube
    alone: the inverses' columns times beta, the keys' rows negated, and what Cube puts its products beside. ``NORM``,
    ``SIGMOID``: queries and keys are normalised first, and beta is the sigmoid of what is given."""
    core = tl.program_id(0)
    cores = tl.num_programs(0)
    N: tl.constexpr = C // R
    io = Q_gated_io_ptr.dtype.element_ty
    for task in range(core, tasks, cores):
        n = task % N
        at = task // N
        head = at % HV
        group = head // (HV // H)
        start = tl.load(chunks + 2 * (at // HV))
        length = tl.load(chunks + 2 * (at // HV) + 1)
        token = start + n * R
        rows = length - n * R
        rate, bias = gate_parameters(A_log_ptr, dt_bias_ptr, head, HV, K)
        k, before, forward, A_qk, A_kk = walk_rows(
            q_ptr, k_ptr, g_ptr, rate, bias, gate_scale, token, group, head, rows, tokens, scale, l2norm_eps, H, HV, K,
            R, DELTA, WIDE, NORM,
        )  # fmt: skip
        if JOINED:
            store_diagonal(A_qk_diagonal_ptr, at, n, A_qk.to(io), C, R)
        else:
            tl.store(diagonal_at(A_qk_diagonal_ptr, at, n, C, R), A_qk)
            if DELTA:
                tl.store(diagonal_at(A_kk_diagonal_ptr, at, n, C, R), A_kk)
        if INVERTED:
            store_inverse(
                M_inverted_ptr,
                M_rounded_ptr,
                beta_ptr,
                A_kk,
                at,
                n,
                token,
                head,
                rows,
                tokens,
                C,
                R,
                BETA,
                JOINED,
                SIGMOID,
            )
        q = load_rows(q_ptr, token, group, rows, l2norm_eps, H, R, K, NORM) * scale
        q = q * before
        before = k * before
        forward = k * forward
        for level in tl.static_range(LEVELS):
            low = (n >> level) << level
            since = gate_total(g_ptr, rate, bias, gate_scale, start, head, length, 0, low, n, tokens, HV, K, K, R, WIDE)
            end = low + (1 << level)
            until = gate_total(
                g_ptr, rate, bias, gate_scale, start, head, length, 0, n + 1, end, tokens, HV, K, K, R, WIDE
            )
            scaled = (at * LEVELS + level) * (N // 2) + ((n >> (level + 1)) << level) + n - low
            if (n >> level) % 2 == 1:
                tl.store(tile_at(A_qk_rows_ptr, scaled, 0, R, K, K), (q * since[None, :]).to(io))
                if DELTA:
                    if JOINED:
                        since = -since
                    tl.store(tile_at(A_kk_rows_ptr, scaled, 0, R, K, K), (before * since[None, :]).to(io))
            else:
                tl.store(tile_at(k_cols_ptr, scaled, 0, R, K, K), (forward * until[None, :]).to(io))
        since = gate_total(g_ptr, rate, bias, gate_scale, start, head, length, 0, 0, n, tokens, HV, K, K, R, WIDE)
        until = gate_total(g_ptr, rate, bias, gate_scale, start, head, length, 0, n + 1, N, tokens, HV, K, K, R, WIDE)
        tl.store(tile_at(Q_gated_io_ptr, at * N + n, 0, R, K, K), (q * since[None, :]).to(io))
        tl.store(tile_at(K_decayed_io_ptr, at * N + n, 0, R, K, K), (forward * until[None, :]).to(io))
        if DELTA:
            tl.store(tile_at(K_gated_neg_io_ptr, at * N + n, 0, R, K, K), (before * since[None, :] * -1.0).to(io))
        if n == 0:
            whole = gate_total(g_ptr, rate, bias, gate_scale, start, head, length, 0, 0, N, tokens, HV, K, K, R, WIDE)
            tl.store(vector_at(decay_ptr, at, K), whole)
