"""The kernel of gradients with a gate per channel that stands behind the products, on Vec alone: ``sums``, and its
helpers. As in ``macros.py`` their text is copied into the modules that use them; what a *level* is says
``macros_channel.py``.
"""

# ruff: noqa: ANN001, ANN201
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportUntypedFunctionDecorator=false

import triton
import triton.language as tl

from .macros import floor_gate, part_at, row_products, tile_at, tokens_at
from .macros_channel import gate_total


@triton.jit
def log_gate_total(
    g_ptr, token, head, rows, column, low, high, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr
):
    """``gate_total`` of gates that are logarithms."""
    return gate_total(g_ptr, 0.0, 0.0, 0.0, token, head, rows, column, low, high, 0, HV, K, BK, R, True)


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
            since = log_gate_total(g_ptr, start, head, length, column, low, n, HV, K, BK, R)[None, :]
            x = tl.load(tile_at(GQ_ptr, scaled, column, R, K, BK))
            GQ += before * since * x
            gates += (q * before * since).to(io).to(tl.float32) * x
            if DELTA:
                x = tl.load(tile_at(GK_rows_ptr, scaled, column, R, K, BK))
                GK_rows += before * since * x
                gates += (k * before * since).to(io).to(tl.float32) * x
        else:
            end = low + (1 << level)
            until = log_gate_total(g_ptr, start, head, length, column, n + 1, end, HV, K, BK, R)[None, :]
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
            since = log_gate_total(g_ptr, start, head, length, column, 0, n, HV, K, BK, R)[None, :]
            until = log_gate_total(g_ptr, start, head, length, column, n + 1, N, HV, K, BK, R)[None, :]
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
