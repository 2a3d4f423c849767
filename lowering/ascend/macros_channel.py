"""Triton helpers of a gate per channel, and the two kernels that need such gates token by token, on Vec alone:
``sub_chunks`` in front of the products and, for gradients, ``sums`` behind them. The first also takes one gate a token,
where Cube does the rest without Vec. As in ``macros.py`` their text is copied into the modules that use them.

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
    part_at,
    row_products,
    tile_at,
    tokens_at,
    vector_at,
)


@triton.jit
def gates_of(
    g_ptr, token, head, rows, column, tokens, HV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """[N, BK]: the gates of N tokens, ``WIDE`` of a tensor that has one a channel; else all channels have the same."""
    if WIDE:
        g = tl.load(tokens_at(g_ptr, token, head, rows, column, HV, N, K, BK), boundary_check=(0,))
    else:
        g = tl.load(gates_at(g_ptr, token, head, rows, tokens, N), boundary_check=(0,))
        g = tl.broadcast_to(g[:, None], (N, BK))
    return floor_gate(g)


@triton.jit
def gate_total(
    g_ptr, token, head, rows, column, low, high, tokens, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[BK]: exp of the sum of the gates of the sub-chunks low, ..., high - 1."""
    total = tl.zeros([BK], tl.float32)
    for n in range(low, high):
        g = gates_of(g_ptr, token + n * R, head, rows - n * R, column, tokens, HV, R, K, BK, WIDE)
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
def walk_rows(
    q_ptr, k_ptr, g_ptr, token, group, head, rows, tokens, scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, DELTA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Walk the R tokens from ``token`` and keep, for every token j up to row i, forward[j] = decay(i, j), and
    before[i] = decay(i, start): products of single gates, so that the diagonal blocks are exact for any gate.

    Returns the keys, before, forward to the last row, and the Gram matrices [R, R] of queries and keys with keys.
    """
    row = tl.arange(0, R).to(tl.float32)
    k = tl.load(tokens_at(k_ptr, token, group, rows, 0, H, R, K, K), boundary_check=(0,)).to(tl.float32)
    before = tl.full([R, K], 1.0, tl.float32)
    forward = tl.full([R, K], 1.0, tl.float32)
    A_qk = tl.zeros([R, R], tl.float32)
    A_kk = tl.zeros([R, R], tl.float32)
    for i in range(R):
        here = i.to(tl.float32)
        g_i = gates_of(g_ptr, token + i, head, rows - i, 0, tokens, HV, 1, K, K, WIDE)
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
    BETA: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """The inverse of a diagonal block, times beta by columns where it is ``JOINED``."""
    if BETA:
        beta = tl.load(gates_at(beta_ptr, token, head, rows, tokens, R), boundary_check=(0,))
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
    M_inverted_ptr,
    M_rounded_ptr,
    chunks,
    scale,
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
):
    """Everything of R tokens that needs their gates one by one, for all sub-chunks in parallel: diagonal blocks, tokens
    scaled for products with the state, and the rows and columns of every level. ``INVERTED``: also the inverses of the
    diagonal blocks that the triangular inverse begins with, times ``BETA`` where there is one. ``JOINED``: all for Cube
    alone: the inverses' columns times beta, the keys' rows negated, and what Cube puts its products beside."""
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
        k, before, forward, A_qk, A_kk = walk_rows(
            q_ptr, k_ptr, g_ptr, token, group, head, rows, tokens, scale, H, HV, K, R, DELTA, WIDE
        )
        if JOINED:
            store_diagonal(A_qk_diagonal_ptr, at, n, A_qk.to(io), C, R)
        else:
            tl.store(diagonal_at(A_qk_diagonal_ptr, at, n, C, R), A_qk)
            if DELTA:
                tl.store(diagonal_at(A_kk_diagonal_ptr, at, n, C, R), A_kk)
        if INVERTED:
            store_inverse(
                M_inverted_ptr, M_rounded_ptr, beta_ptr, A_kk, at, n, token, head, rows, tokens, C, R, BETA, JOINED
            )
        q = tl.load(tokens_at(q_ptr, token, group, rows, 0, H, R, K, K), boundary_check=(0,)).to(tl.float32) * scale
        q = q * before
        before = k * before
        forward = k * forward
        for level in tl.static_range(LEVELS):
            low = (n >> level) << level
            since = gate_total(g_ptr, start, head, length, 0, low, n, tokens, HV, K, K, R, WIDE)
            until = gate_total(g_ptr, start, head, length, 0, n + 1, low + (1 << level), tokens, HV, K, K, R, WIDE)
            scaled = (at * LEVELS + level) * (N // 2) + ((n >> (level + 1)) << level) + n - low
            if (n >> level) % 2 == 1:
                tl.store(tile_at(A_qk_rows_ptr, scaled, 0, R, K, K), (q * since[None, :]).to(io))
                if DELTA:
                    if JOINED:
                        since = -since
                    tl.store(tile_at(A_kk_rows_ptr, scaled, 0, R, K, K), (before * since[None, :]).to(io))
            else:
                tl.store(tile_at(k_cols_ptr, scaled, 0, R, K, K), (forward * until[None, :]).to(io))
        since = gate_total(g_ptr, start, head, length, 0, 0, n, tokens, HV, K, K, R, WIDE)
        until = gate_total(g_ptr, start, head, length, 0, n + 1, N, tokens, HV, K, K, R, WIDE)
        tl.store(tile_at(Q_gated_io_ptr, at * N + n, 0, R, K, K), (q * since[None, :]).to(io))
        tl.store(tile_at(K_decayed_io_ptr, at * N + n, 0, R, K, K), (forward * until[None, :]).to(io))
        if DELTA:
            tl.store(tile_at(K_gated_neg_io_ptr, at * N + n, 0, R, K, K), (before * since[None, :] * -1.0).to(io))
        if n == 0:
            tl.store(
                vector_at(decay_ptr, at, K), gate_total(g_ptr, start, head, length, 0, 0, N, tokens, HV, K, K, R, WIDE)
            )


# ---- behind the products, for gradients


@triton.jit
def walk_pairs(
    q_ptr, k_ptr, g_ptr, GP_ptr, GL_ptr, token, group, head, rows, column, at, n, scale, H: tl.constexpr,
    HV: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Walk the R tokens from ``token`` as ``walk_rows`` does, with the weights of their pairs. Returns before, forward
    to the last row, and sums over the sub-chunk's pairs: for queries, for keys as rows, and for keys as columns."""
    row = tl.arange(0, R).to(tl.float32)
    k = tl.load(tokens_at(k_ptr, token, group, rows, column, H, R, K, BK), boundary_check=(0,)).to(tl.float32)
    before = tl.full([R, BK], 1.0, tl.float32)
    forward = tl.full([R, BK], 1.0, tl.float32)
    GQ = tl.zeros([R, BK], tl.float32)
    GK_rows = tl.zeros([R, BK], tl.float32)
    GK_cols = tl.zeros([R, BK], tl.float32)
    for i in range(R):
        here = i.to(tl.float32)
        g_i = tl.load(tokens_at(g_ptr, token + i, head, rows - i, column, HV, 1, K, BK), boundary_check=(0,))
        q_i = tl.load(tokens_at(q_ptr, token + i, group, rows - i, column, H, 1, K, BK), boundary_check=(0,))
        alpha = tl.exp(floor_gate(g_i))
        forward = forward * tl.where(row[:, None] < here, alpha, 1.0)
        before = before * tl.where(row[:, None] < here, 1.0, alpha)
        weights = tl.load(part_at(GP_ptr, at, (n * R + i) * C + n * R, C * C, R)).to(tl.float32)
        kept = forward * weights[:, None]
        GQ = tl.where(row[:, None] == here, tl.sum(kept * k, 0)[None, :], GQ)
        GK_cols += kept * (q_i.to(tl.float32) * scale)
        if DELTA:
            k_i = tl.load(tokens_at(k_ptr, token + i, group, rows - i, column, H, 1, K, BK), boundary_check=(0,))
            weights = tl.load(part_at(GL_ptr, at, (n * R + i) * C + n * R, C * C, R)).to(tl.float32)
            kept = forward * weights[:, None]
            GK_rows = tl.where(row[:, None] == here, tl.sum(kept * k, 0)[None, :], GK_rows)
            GK_cols += kept * k_i.to(tl.float32)
    return before, forward, GQ, GK_rows, GK_cols


@triton.jit
def add_levels(
    GQ, GK_rows, GK_cols, gates, q, k, before, forward, g_ptr, GQ_ptr, GK_ptr, GK_rows_ptr, GK_cols_ptr, start, length,
    head, column, at, n, io: tl.constexpr, HV: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    R: tl.constexpr, LEVELS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """The sums over pairs with the products of every level, and what pairs add to the gates' gradient: both sides are
    multiplied as the products read them, so that what rows and columns have in common cancels."""
    for level in tl.static_range(LEVELS):
        low = (n >> level) << level
        scaled = (at * LEVELS + level) * (N // 2) + ((n >> (level + 1)) << level) + n - low
        if (n >> level) % 2 == 1:
            since = gate_total(g_ptr, start, head, length, column, low, n, 0, HV, K, BK, R, True)[None, :]
            x = tl.load(tile_at(GQ_ptr, scaled, column, R, K, BK))
            GQ += before * since * x
            gates += (q * before * since).to(io).to(tl.float32) * x
            if DELTA:
                x = tl.load(tile_at(GK_rows_ptr, scaled, column, R, K, BK))
                GK_rows += before * since * x
                gates += (k * before * since).to(io).to(tl.float32) * x
        else:
            end = low + (1 << level)
            until = gate_total(g_ptr, start, head, length, column, n + 1, end, 0, HV, K, BK, R, True)[None, :]
            x = tl.load(tile_at(GK_ptr, scaled, column, R, K, BK))
            if DELTA:
                x += tl.load(tile_at(GK_cols_ptr, scaled, column, R, K, BK))
            GK_cols += forward * until * x
            gates -= (k * forward * until).to(io).to(tl.float32) * x
    return GQ, GK_rows, GK_cols, gates


@triton.jit
def ends_of(K_decayed_io_ptr, GK_decayed_ptr, column, first, count, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):
    """[BK]: over ``count`` sub-chunks, what decays up to the chunk's end times its gradient."""
    total = tl.zeros([BK], tl.float32)
    for n in range(first, first + count):
        x = tl.load(tile_at(K_decayed_io_ptr, n, column, R, K, BK)).to(tl.float32)
        total += tl.sum(x * tl.load(tile_at(GK_decayed_ptr, n, column, R, K, BK)), 0)
    return total


@triton.jit
def from_each(rows, ends, R: tl.constexpr):
    """[R, BK]: sums of ``rows`` from each token on, and of ``ends`` before it."""
    row = tl.arange(0, R).to(tl.float32)[:, None]
    total = rows
    for i in range(R):
        here = i.to(tl.float32)
        later = tl.sum(tl.where(row == here, rows, 0.0), 0)[None, :]
        earlier = tl.sum(tl.where(row == here, ends, 0.0), 0)[None, :]
        total += tl.where(row < here, later, 0.0) + tl.where(row > here, earlier, 0.0)
    return total


@triton.jit(do_not_specialize=["tasks"])
def sums(
    q_ptr,
    k_ptr,
    g_ptr,
    own_ptr,
    GP_seen_io_ptr,
    GL_seen_io_ptr,
    GQ_gated_ptr,
    GK_gated_neg_ptr,
    GK_decayed_ptr,
    K_decayed_io_ptr,
    GQ_pairs_levels_ptr,
    GK_pairs_levels_ptr,
    GK_row_pairs_levels_ptr,
    GK_col_pairs_levels_ptr,
    S_io_ptr,
    GS_io_ptr,
    decay_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_g_ptr,
    chunks,
    scale,
    tasks,
    H: tl.constexpr,
    HV: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    LEVELS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """The gradients of queries, keys and gates, from the products of all levels: a task walks the sub-chunks of a chunk
    from its end, for BK channels, which do not meet."""
    core = tl.program_id(0)
    cores = tl.num_programs(0)
    N: tl.constexpr = C // R
    io = grad_q_ptr.dtype.element_ty
    for task in range(core, tasks, cores):
        column = task % (K // BK) * BK
        at = task // (K // BK)
        head = at % HV
        group = head // (HV // H)
        start = tl.load(chunks + 2 * (at // HV))
        length = tl.load(chunks + 2 * (at // HV) + 1)
        whole = row_products(S_io_ptr, GS_io_ptr, task, BK, V, BV) * tl.load(part_at(decay_ptr, at, column, K, BK))
        for turn in range(N):
            n = N - 1 - turn
            token = start + n * R
            rows = length - n * R
            before, forward, GQ, GK_rows, GK_cols = walk_pairs(
                q_ptr, k_ptr, g_ptr, GP_seen_io_ptr, GL_seen_io_ptr, token, group, head, rows, column, at, n, scale,
                H, HV, C, K, BK, R, DELTA,
            )  # fmt: skip
            q = tl.load(tokens_at(q_ptr, token, group, rows, column, H, R, K, BK), boundary_check=(0,))
            q = q.to(tl.float32) * scale
            k = tl.load(tokens_at(k_ptr, token, group, rows, column, H, R, K, BK), boundary_check=(0,)).to(tl.float32)
            gates = q * GQ + k * GK_rows - k * GK_cols
            GQ, GK_rows, GK_cols, gates = add_levels(
                GQ, GK_rows, GK_cols, gates, q, k, before, forward, g_ptr, GQ_pairs_levels_ptr, GK_pairs_levels_ptr,
                GK_row_pairs_levels_ptr, GK_col_pairs_levels_ptr, start, length, head, column, at, n, io, HV, N, K, BK,
                R, LEVELS, DELTA,
            )  # fmt: skip
            since = gate_total(g_ptr, start, head, length, column, 0, n, 0, HV, K, BK, R, True)[None, :]
            until = gate_total(g_ptr, start, head, length, column, n + 1, N, 0, HV, K, BK, R, True)[None, :]
            x = before * since * tl.load(tile_at(GQ_gated_ptr, at * N + n, column, R, K, BK))
            GQ += x
            gates += q * x
            if DELTA:
                x = before * since * tl.load(tile_at(GK_gated_neg_ptr, at * N + n, column, R, K, BK))
                GK_rows -= x
                gates -= k * x
            x = forward * until * tl.load(tile_at(GK_decayed_ptr, at * N + n, column, R, K, BK))
            own = tl.load(part_at(own_ptr, at, n * R, C, R))[:, None]
            GQ = (GQ + k * own) * scale
            GK = GK_rows + GK_cols + q * own + x
            tl.store(tokens_at(grad_q_ptr, token, head, rows, column, HV, R, K, BK), GQ.to(io), boundary_check=(0,))
            tl.store(tokens_at(grad_k_ptr, token, head, rows, column, HV, R, K, BK), GK.to(io), boundary_check=(0,))
            earlier = ends_of(K_decayed_io_ptr, GK_decayed_ptr, column, at * N, n, K, BK, R)
            total = from_each(gates, k * x, R) + (whole + earlier)[None, :]
            tl.store(tokens_at(grad_g_ptr, token, head, rows, column, HV, R, K, BK), total, boundary_check=(0,))
            whole += tl.sum(gates, 0)
