"""Gluon: what a chunk computes for its gradients without any state, with a gate per channel, K = 128, bf16.

What is left is that of ``lowering/triton/backward_prepare.py``: q and k decayed to the chunk's ends, the Gram matrices
P and L, beta behind its sigmoid, the rates of the norms; SOLVED, X in place of L, which is in shared memory here. By
blocks of 16 tokens (``backward_blocks.py``): columns are decayed to the end of their block, and rows from the start of
their own. For the columns of the block before, then of the one before that, rows are decayed over one block more; at
the chunk's start they are what leaves.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .backward_blocks import (
    ACROSS,
    BATCH,
    DOWN,
    FLAT,
    LEFT4,
    LIMIT,
    LINES,
    NARROW,
    NARROW4,
    PART,
    PARTS,
    RIGHT4,
    ROWS,
    SHIFT,
    TILE,
    TOKEN,
    as_fp32,
    block_totals,
    chunk_place,
    fetch_part,
    flat,
    halves,
    inside_mask,
    inside_sums,
    load_rows,
    narrow,
    near_start,
    over_block,
    own_chunk,
    product,
    put_split,
    scaled,
    store_rows,
    tiles_apart,
    tiles_at,
    widened,
)
from .backward_bounded import grams, lowered
from .backward_early import nothing_done, outlast_the_scan
from .common import QUARTER, barrier, exp2, given_beta, given_rate, log2_gate, pinned
from .common import TILE as WHOLE
from .inverse import solved

LINE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))  # [4, PART]
OPERAND = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # rows of PART


@gluon.jit
def _rates(x, rates, eps):
    """One over the norms of q or k, for the gradients too."""
    x = widened(x)
    rate = gl.rsqrt(gl.sum(x * x, 1) + eps)
    gl.store(rates + gl.arange(0, 64, layout=TOKEN), rate)
    return gl.convert_layout(rate, DOWN)[:, None]


@gluon.jit
def _own_products(rows, columns, acc):
    """acc + each block's own 16 rows times its own 16 columns, both tiles [64, PART] in shared memory."""
    left = rows._reinterpret(gl.bfloat16, [4, 16, PART], NARROW4).load(LEFT4)
    right = columns._reinterpret(gl.bfloat16, [4, 16, PART], NARROW4).permute((0, 2, 1)).load(RIGHT4)
    return mma_v2(left, right, acc)


@gluon.jit
def _over_columns(p, recall, q, k, at: gl.constexpr, work, totals, DELTA: gl.constexpr):
    """Add products of rows, decayed from the end of block ``at``, with its columns; the rows decayed over it too."""
    barrier()
    work[0].store(narrow(q))
    work[1].store(narrow(k))
    columns = work[2].slice(16 * at, 16, 0)
    p = product(work[0], columns, p, PART)
    decay = over_block(totals, at, "after")
    q = scaled(q, decay)
    if DELTA:
        recall = product(work[1], columns, recall, PART)
        k = scaled(k, decay)
    return p, recall, q, k


@gluon.jit
def _columns(own, one, at: gl.constexpr, row, STRICT: gl.constexpr):
    """The columns of block ``at`` of a Gram matrix: ``own`` [64, 16] in its rows, ``one`` in later ones."""
    column = at * 16 + gl.arange(0, 16, layout=ACROSS)[None, :]
    if STRICT:
        below = row > column
    else:
        below = row >= column
    return gl.where(below, gl.where((row >> 4) == at, own, one), 0.0)


@gluon.jit
def _put_gram(tile, x0, x1, x2, own, STRICT: gl.constexpr, BOUNDED: gl.constexpr):
    """A Gram matrix: its columns in the rows of later blocks, and in a block's own, which are apart if not BOUNDED."""
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    if BOUNDED:
        x0, x1, x2 = gl.convert_layout(x0, FLAT), gl.convert_layout(x1, FLAT), gl.convert_layout(x2, FLAT)
        own0, own1, own2, own3 = x0, x1, x2, gl.convert_layout(own, FLAT)
    else:
        own3 = flat(own)
        own0, own1, own2 = own3, own3, own3
    tile.slice(0, 16, 1).store(_columns(own0, x0, 0, i, STRICT).to(tile.dtype))
    tile.slice(16, 16, 1).store(_columns(own1, x1, 1, i, STRICT).to(tile.dtype))
    tile.slice(32, 16, 1).store(_columns(own2, x2, 2, i, STRICT).to(tile.dtype))
    tile.slice(48, 16, 1).store(_columns(own3, own3, 3, i, STRICT).to(tile.dtype))


@gluon.jit
def _part(
    p0, p1, p2, p_own, l0, l1, l2, l_own, part, q_t, k_t, g_t, q_base, q_st, k_base, k_st, g_base, g_st,
    A_log_ptr, dt_bias_ptr, head, left, gate_scale, q_rate, k_rate, work, totals, qg_to, kg_to, kd_to,
    total_line, lines_to,
    FN: gl.constexpr, DELTA: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Add what some channels give to the columns of P and L, and leave their decayed q and k."""
    work = tiles_at(work, part >> 30, 9 if BOUNDED else 3)
    i = gl.arange(0, 64, layout=DOWN)[:, None]
    d = part * PART + gl.arange(0, PART, layout=ACROSS)[None, :]
    bias = 0.0
    if BIAS:
        bias = gl.load(dt_bias_ptr + head * 128 + d).to(gl.float32)
    rate = 1.0
    if RATE:
        rate = given_rate(gl.load(A_log_ptr + head), True)
    g = gl.where(i < left, log2_gate(as_fp32(g_t.load(FLAT)) + bias, rate, gate_scale, FN), 0.0)
    q = as_fp32(q_t.load(FLAT)) * q_rate
    k = as_fp32(k_t.load(FLAT)) * k_rate
    barrier()
    fetch_part(part + 1, q_t, k_t, g_t, q_base, q_st, k_base, k_st, g_base, g_st, left)
    async_copy.commit_group()
    block_totals(g, totals)
    at = gl.arange(0, 4, layout=gl.SliceLayout(1, LINE))[:, None]
    column = gl.arange(0, PART, layout=gl.SliceLayout(0, LINE))[None, :]
    gl.store(lines_to + at * PART + column, totals.load(LINE))
    whole = totals.slice(0, 1, 0).load(FLAT) * totals.slice(1, 1, 0).load(FLAT)
    whole *= totals.slice(2, 1, 0).load(FLAT) * totals.slice(3, 1, 0).load(FLAT)
    gl.store(total_line + d, whole)
    if BOUNDED:
        p0, p1, p2, p_own, l0, l1, l2, l_own, ended = grams(
            p0, p1, p2, p_own, l0, l1, l2, l_own, q, k, g, work, totals, DELTA
        )  # fmt: skip
        store_rows(kd_to, ended, 128, 64)
        store_rows(qg_to, lowered(work[0].load(ROWS)), 128, 64)
        if DELTA:
            store_rows(kg_to, lowered(work[4].load(ROWS)), 128, 64)
    else:
        high, low = halves(work)
        barrier()
        put_split(high, low, gl.maximum(g, LIMIT))
        near, back = near_start(high, low, SHIFT)
        barrier()
        work[0].store(narrow(q * near))
        work[1].store(narrow(k * near))
        work[2].store(narrow(k * back))
        p_own = _own_products(work[0], work[2], p_own)
        if DELTA:
            l_own = _own_products(work[1], work[2], l_own)
        barrier()
        put_split(high, low, g)
        up = exp2(inside_sums(inside_mask("until", gl.float16), high, low))
        q *= up
        ended = k * exp2(inside_sums(inside_mask("after", gl.float16), high, low))
        k *= up
        work[2].store(narrow(ended))
        ended = scaled(ended, over_block(totals, 1, "before") * over_block(totals, 2, "before"))
        store_rows(kd_to, scaled(ended, over_block(totals, 3, "before")), 128, 64)
        p2, l2, q, k = _over_columns(p2, l2, q, k, 2, work, totals, DELTA)
        p1, l1, q, k = _over_columns(p1, l1, q, k, 1, work, totals, DELTA)
        p0, l0, q, k = _over_columns(p0, l0, q, k, 0, work, totals, DELTA)
        store_rows(qg_to, q, 128, 64)
        if DELTA:
            store_rows(kg_to, k, 128, 64)
    return p0, p1, p2, p_own, l0, l1, l2, l_own


@gluon.jit(do_not_specialize=["beta_sb", "beta_st", "T", "N", "first_head"])
def prepare(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, g_ptr, g_sb, g_st, g_sh,
    beta_ptr, beta_sb, beta_st, beta_sh, A_log_ptr, dt_bias_ptr, cu_seqlens, chunk_offsets, N, T,
    gate_scale, l2norm_eps, first_head,
    qg_buffer, kg_buffer, kd_buffer, total_buffer, lines_buffer, p_buffer, a_buffer, x_buffer, beta_buffer,
    rate_buffer, done_buffer,
    HP: gl.constexpr, GROUP: gl.constexpr, FN: gl.constexpr, DELTA: gl.constexpr, BETA: gl.constexpr,
    SIGMOID: gl.constexpr, L2NORM: gl.constexpr, RATE: gl.constexpr, BIAS: gl.constexpr, PACKED: gl.constexpr,
    BOUNDED: gl.constexpr, SOLVED: gl.constexpr, EARLY: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """A block has one chunk of one head, and takes a few channels at a time. Rows of q, k and g are contiguous.

    SOLVED: (I + L diag(beta))^-1 L leaves in place of L, of keys whose norms are 1.
    """
    pid, chunk, head = own_chunk(first_head, HP)
    if EARLY != "":
        nothing_done(done_buffer, pid, T)
    runs = True
    if PACKED:
        runs = chunk < gl.load(chunk_offsets + N)
    if runs:
        batch, first, left = chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED)
        work = tiles_apart(9, OPERAND) if BOUNDED else tiles_apart(3, NARROW)
        totals = gl.allocate_shared_memory(gl.float32, [4, PART], LINES)
        row = gl.arange(0, 64, layout=TOKEN)
        q_t = gl.allocate_shared_memory(gl.bfloat16, [64, PART], NARROW)
        k_t = gl.allocate_shared_memory(gl.bfloat16, [64, PART], NARROW)
        g_t = gl.allocate_shared_memory(g_ptr.dtype.element_ty, [64, PART], NARROW)
        q_base = q_ptr + batch * q_sb + first * q_st + (head // GROUP) * q_sh
        k_base = k_ptr + batch * k_sb + first * k_st + (head // GROUP) * k_sh
        g_base = g_ptr + batch * g_sb + first * g_st + head * g_sh
        fetch_part(0, q_t, k_t, g_t, q_base, q_st, k_base, k_st, g_base, g_st, left)
        async_copy.commit_group()
        q_rate = 1.0
        k_rate = 1.0
        if L2NORM:
            q = load_rows(q_base, q_st, left)
            k = load_rows(k_base, k_st, left)
            q_rate = _rates(q, rate_buffer + pid * 128, l2norm_eps)
            k_rate = _rates(k, rate_buffer + pid * 128 + 64, l2norm_eps)
        if BETA:
            at = beta_ptr + batch * beta_sb + (first + row) * beta_st + head * beta_sh
            b = given_beta(gl.load(at, mask=row < left, other=0.0), row, left, SIGMOID)
            gl.store(beta_buffer + pid * 64 + row, b)
        zero = gl.zeros([64, 16], gl.float32, layout=QUARTER if BOUNDED else FLAT)
        none = zero
        if not BOUNDED:
            none = gl.zeros([4, 16, 16], gl.float32, layout=BATCH)
        tile = pid * (64 * 128)
        p0, p1, p2, p_own = zero, zero, zero, none
        l0, l1, l2, l_own = zero, zero, zero, none
        for part in range(PARTS):
            async_copy.wait_group(0)
            barrier()
            part = pinned(part)
            to = tile + part * PART
            p0, p1, p2, p_own, l0, l1, l2, l_own = _part(
                p0, p1, p2, p_own, l0, l1, l2, l_own, part, q_t, k_t, g_t, q_base, q_st, k_base, k_st,
                g_base, g_st, A_log_ptr, dt_bias_ptr, head, left, gate_scale, q_rate, k_rate, work, totals,
                qg_buffer + to, kg_buffer + to, kd_buffer + to,
                total_buffer + pid * 128, lines_buffer + pid * (4 * 128) + part * (4 * PART),
                FN, DELTA, RATE, BIAS, BOUNDED,
            )  # fmt: skip
        async_copy.wait_group(0)
        square = pid * (64 * 64)
        barrier()
        p_t = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        _put_gram(p_t, p0, p1, p2, p_own, False, BOUNDED)
        if DELTA:
            if SOLVED:
                tiles = gl.allocate_shared_memory(gl.float16, [4, 64, 64], WHOLE)
                l_t = tiles.index(0)
            else:
                l_t = gl.allocate_shared_memory(a_buffer.dtype.element_ty, [64, 64], TILE)
            _put_gram(l_t, l0, l1, l2, l_own, True, BOUNDED)
        barrier()
        store_rows(p_buffer + square, p_t.load(ROWS), 64, 64)
        if DELTA:
            if SOLVED:
                spare = p_t._reinterpret(gl.float16, [64, 64], WHOLE)
                x = solved(tiles, spare, beta_buffer + pid * 64, BETA, BETA and not SIGMOID)
                p_t.store(x.to(gl.bfloat16))
                barrier()
                store_rows(x_buffer + square, p_t.load(ROWS), 64, 64)
            else:
                store_rows(a_buffer + square, l_t.load(ROWS), 64, 64)
    if BESIDE:
        outlast_the_scan(pid)
