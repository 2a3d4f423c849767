"""Gluon: what of a chunk does not read the state, where the gate is one number a token and head (gated delta rule).

The gate, the norms of q and k and the scale are then numbers of a token, and the scan takes q and k as they are. With
``G_r`` the sum of a chunk's first r log2 gates, a chunk of 64 tokens leaves behind::

    M and A_qk                                           8192 bf16, see :mod:`.prepare`
    |k|^-1 2^G, scale |q|^-1 2^G, |k|^-1 2^(G_63 - G), 2^(G_63)   4 rows of 64 fp32

with ``M = (I + A_kk)^-1 diag(beta)``. The decays between two tokens, 2^(G_i - G_j), are one [64, 64] matrix for all
channels: it multiplies the plain Gram matrices, its exponents are never positive, and gates need no bound. The norms
stand on the diagonals of k k^T and q q^T. A block is three groups of four warps, each with tiles of its own: a tile is
a chain of products that depend on each other.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    ACROSS,
    DOWN,
    SEQUENCE,
    SQUARE,
    TILE,
    TILE4,
    add,
    announce,
    barrier,
    exp2,
    fetch,
    given_beta,
    given_rate,
    locate,
    log2_gate,
    magnitude,
    next_may_start,
    nth_tile,
    over,
    pinned,
    squares_rows,
    stores_done,
    tile_count,
    tiles_of,
)
from .inverse import first_steep, keep_steep, leave_inverse, unknown_zero

GROUPS = gl.constexpr(3)


@gluon.jit
def _load_tile(c, total, T, HV, GROUP, batch, first, places, d_q, d_k, q_tile, k_tile, full, PACKED: gl.constexpr):
    here = c < total
    i_b, token, _, i_h = locate(gl.minimum(c, total - 1), T, HV, batch, first, places, PACKED)
    at = [i_b, token, i_h // GROUP, 0]
    WIDTH: gl.constexpr = k_tile.shape[1]
    mbarrier.expect(full, 2 * 64 * WIDTH * 2, pred=here)
    k_to = k_tile._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
    tma.async_copy_global_to_shared(d_k, at, full, k_to, pred=here)
    q_to = q_tile._reinterpret(gl.bfloat16, [1, 64, 1, WIDTH], TILE4)
    tma.async_copy_global_to_shared(d_q, at, full, q_to, pred=here)


@gluon.jit
def _fetch(
    c, total, T, HV, batch, first, places, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, place,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, PACKED: gl.constexpr, FN: gl.constexpr,
):  # fmt: skip
    """What a tile needs besides q and k: first token, end of its sequence, A_log, beta, g and dt_bias as given."""
    i_b, start, end, i_h, A, b = fetch(
        gl.minimum(c, total - 1), T, HV, batch, first, places, A_log, beta, beta_sb, beta_st, beta_sh, place,
        HAS_A, HAS_BETA, PACKED,
    )  # fmt: skip
    token = start + place
    x = token
    if FN != "none":
        at = g + i_b.to(gl.int64) * g_sb + i_h.to(gl.int64) * g_sh + token.to(gl.int64) * g_st
        x = gl.load(at, mask=token < end, other=0.0)
    bias = i_h
    if HAS_DT:
        bias = gl.load(dt_bias + i_h)
    return start, end, A, b, x, bias


@gluon.jit
def squares_of(gram, same):
    """The squared norms of what a Gram matrix is of, from its diagonal."""
    return gl.sum(gl.where(same, gram, 0.0), 1)


@gluon.jit
def _group(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, d_out, factors, announced,
    T, HV, GROUP, batch, first, begin, total, rounds, early, scale, eps, gate_scale,
    inputs, tiles, lines, fulls, WHICH: gl.constexpr,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr,
):  # fmt: skip
    GATED: gl.constexpr = FN != "none"
    APART: gl.constexpr = HAS_BETA and not SIGMOID_BETA
    CHECKED: gl.constexpr = RAW or APART
    WIDTH: gl.constexpr = inputs.shape[2]
    SQUARES: gl.constexpr = squares_rows(WIDTH)
    k_tile = inputs.index(2 * WHICH)
    q_tile = inputs.index(2 * WHICH + 1)
    full = fulls.index(WHICH)
    sums = lines.index(3 * WHICH)
    betas = lines.index(3 * WHICH + 1)
    norms = lines.index(3 * WHICH + 2)
    qk_out = tiles.index(5 * WHICH + 4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=DOWN)
    j0 = gl.arange(0, 64, layout=ACROSS)
    place = gl.arange(0, 64, layout=SEQUENCE)
    worker = gl.program_id(0) * GROUPS + WHICH
    workers = gl.num_programs(0) * GROUPS
    early *= GROUPS
    total = tiles_of(total, HV, first, places, PACKED)
    count = tile_count(begin, total, worker, workers, rounds, early)
    c0 = nth_tile(0, begin, total, worker, workers, rounds, early)
    _load_tile(c0, total, T, HV, GROUP, batch, first, places, d_q, d_k, q_tile, k_tile, full, PACKED)
    start, end, A_log_h, b, x, bias = _fetch(
        c0, total, T, HV, batch, first, places, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh,
        place, HAS_A, HAS_DT, HAS_BETA, PACKED, FN,
    )  # fmt: skip
    last = begin
    for n in range(count):
        c = nth_tile(n, begin, total, worker, workers, rounds, early)
        then = nth_tile(n + 1, begin, total, worker, workers, rounds, early)
        mbarrier.wait(full, n & 1)
        keys = k_tile.permute((1, 0))
        if not RAW:
            qq = warpgroup_mma(q_tile, q_tile.permute((1, 0)), z, use_acc=False, is_async=True)
        kk = warpgroup_mma(k_tile, keys, z, use_acc=False, is_async=True)
        if GATED:
            gate = x.to(gl.float32)
            if HAS_DT:
                gate += bias.to(gl.float32)
            valid = start + place < end
            log2 = gl.where(valid, log2_gate(gate, given_rate(A_log_h, HAS_A), gate_scale, FN), 0.0)
            sums.store(gl.associative_scan(log2, 0, add))
        betas.store(given_beta(b, start + place, end, SIGMOID_BETA))
        tokens_left = end - start
        start, end, A_log_h, b, x, bias = _fetch(
            then, total, T, HV, batch, first, places, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st,
            beta_sh, place, HAS_A, HAS_DT, HAS_BETA, PACKED, FN,
        )  # fmt: skip
        i = pinned(i0)[:, None]
        j = j0[None, :]
        zero = unknown_zero(n)
        if RAW:
            q_norm = gl.full([64], 1.0, gl.float32, layout=DOWN) * scale
        else:
            qq = warpgroup_mma_wait(1, [qq])
            q_norm = gl.rsqrt(squares_of(qq, i == j) + eps) * scale
        qk = warpgroup_mma(q_tile, keys, z, use_acc=False, is_async=True)
        kk = warpgroup_mma_wait(1, [kk])
        k_square = squares_of(kk, i == j)
        if RAW:
            k_norm = gl.full([64], 1.0, gl.float32, layout=DOWN)
            norms.store(k_square)
        else:
            k_norm = gl.rsqrt(k_square + eps)
            if APART:  # never 0: the scan divides by the last one of a chunk
                k_norm = gl.where(i0 < tokens_left, gl.maximum(k_norm, 2.0**-100), 1.0)
            norms.store(k_norm)
        qk = warpgroup_mma_wait(0, [qk])
        stores_done(READY)
        barrier()
        if READY:
            announce(announced + last, n > 0)
        _load_tile(then, total, T, HV, GROUP, batch, first, places, d_q, d_k, q_tile, k_tile, full, PACKED)
        beta_i = betas.load(DOWN)
        up = gl.full([64], 1.0, gl.float32, layout=DOWN)
        down = up
        over_all = up
        seen = i >= j
        if PACKED:  # the next sequence may be anything
            seen = seen & (i < tokens_left)
        decays = 1.0
        if GATED:
            G_i = sums.load(DOWN)
            whole = sums.slice(63, 1).load(DOWN)
            decays = gl.where(seen, exp2(G_i[:, None] - sums.load(ACROSS)[None, :]), 0.0)
            up = exp2(G_i)
            down = exp2(whole - G_i)
            over_all = gl.zeros([64], gl.float32, layout=DOWN) + exp2(whole)
        steep = 64
        if RAW:  # see ``factors_of``
            A = kk * decays * (magnitude(k_square) * beta_i)[:, None] * over(magnitude(norms.load(ACROSS)))[None, :]
        else:
            decays = norms.load(ACROSS)[None, :] * decays
            A = kk * decays * (k_norm * beta_i)[:, None]
        if CHECKED:
            square = gl.full([64], 1.0, gl.float32, layout=SEQUENCE)
            if RAW:
                square = norms.load(SEQUENCE)
            steep = first_steep(square, betas.load(SEQUENCE))
        A = gl.where(seen & (i > j), A, 0.0)
        tiles.index(5 * WHICH).store(A.to(gl.float16))
        qk_out.store(gl.where(seen, qk * decays * q_norm[:, None], 0.0).to(gl.bfloat16))
        at = factors + c.to(gl.int64) * 256 + i0
        gl.store(at, k_norm * up)
        gl.store(at + 64, q_norm * up)
        gl.store(at + 128, k_norm * down)
        if APART:
            gl.store(at + 192, beta_i)
        else:
            gl.store(at + 192, over_all)
        if CHECKED:
            keep_steep(A, i, steep, tiles, 5 * WHICH)
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(d_out, [(c + 1) * SQUARES - 64, WIDTH - 64], qk_out)
        leave_inverse(z, i, j, betas, norms, steep, tiles, zero, d_out, c * SQUARES, CHECKED, RAW, APART, 5 * WHICH)
        last = c
    stores_done(READY)
    if READY:
        barrier()
        announce(announced + last, count > 0)


@gluon.jit(do_not_specialize=["T", "first", "batch", "begin", "total", "rounds", "early"])  # they change between runs
def prepare_scalar(
    d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, d_out, factors, announced,
    T, HV, GROUP, batch, first, begin, total, rounds, early, scale, eps, gate_scale,
    FN: gl.constexpr, HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    PACKED: gl.constexpr, READY: gl.constexpr, RAW: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """As :func:`.prepare.prepare`; g ``[B, T, HV]`` with its strides, before the gate function FN; "none": no gate."""
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUPS, 64, WIDTH], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [5 * GROUPS, 64, 64], TILE)
    lines = gl.allocate_shared_memory(gl.float32, [3 * GROUPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(GROUPS):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    next_may_start()
    gl.warp_specialize(
        [
            (_group, (
                d_q, d_k, g, g_sb, g_st, g_sh, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, places, d_out, factors,
                announced, T, HV, GROUP, batch, first, begin, total, rounds, early, scale, eps, gate_scale,
                inputs, tiles, lines, full, which, FN, HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA, PACKED, READY, RAW,
            ))
            for which in (0, 1, 2)
        ],
        [4, 4], [168, 168],
    )  # fmt: skip
