"""Gluon: everything of a chunk that does not read the state, for all chunks and heads at once (KDA, K = 128).

With ``G_r`` the sum of a chunk's first r log2 gates, ``M = (I + A_kk)^-1 diag(beta)`` and the decayed Gram matrices of
``kdacompile.lowering.decay``, a chunk of 64 tokens leaves 256 rows of 128 bf16 behind for the scan::

    rows   0.. 64   K_gated   = k * 2^G
    rows  64..128   Q_gated   = q * 2^G * scale
    rows 128..192   K_decayed = k * 2^(G_63 - G)
    rows 192..256   M (columns 0..64) and A_qk (columns 64..128)

and ``decay = 2^(G_63)`` in fp32. A block is persistent and has two roles. Eight *row* warps load q, k and the gate, and
make everything that is one value a row and channel; four *gram* warps make the [64, 64] matrices and invert.

Exponents. The Gram matrices need 2^(G_i - G_j), i >= j, as a product of a row's factor and a column's. Inside a half
of 32 tokens, with ``D`` the sum of gates from its start, that is 2^(D_i + s) times 2^(-D_j - s): where every gate is at
least -s / 16 both exponents lie in [-s, s], and s <= 122 keeps fp32 and bf16 finite. The shift is a constant: a
reference point among the tokens would let later gates change the rounding of earlier outputs. Between the halves the
column factor is 2^(D_31 - D_j) <= 1, and the 2^s that the row's factor brings is divided out of the product, exactly.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

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

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7

LOG2E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)  # tiles of q, k and g under way or in use

# Token rows: warp w holds tokens 8 w .. 8 w + 7, a thread all eight of them in four columns, so that the running sum of
# gates stays in the thread and a row's norm in the warp.
ROWS = gl.constexpr(gl.BlockedLayout([1, 8, 4], [1, 1, 32], [8, 1, 1], [2, 1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [8, 1], [1, 0]))
CHANNELS = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, ROWS.value)))
TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SQUARE, 2))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE4 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    # exp2 proper wraps this in a rescue of subnormal results; here they may flush to zero.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def _sigmoid2(x):
    """sigmoid(x / log2 e)"""
    return _reciprocal(1.0 + _exp2(-x))


@gluon.jit
def _pinned(x):
    """x, opaque: masks made from it are computed where they are used, not kept in registers across the loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _tile(c, HV, chunks):
    """Batch entry, chunk of the run, value head; heads vary fastest: blocks side by side share DRAM pages."""
    return c // (HV * chunks), (c // HV) % chunks, c % HV


@gluon.jit
def _load_tile(c, total, HV, GROUP, chunks, first, d_q, d_k, d_g, inputs, full, stage):
    here = c < total
    i_b, i_n, i_h = _tile(c, HV, chunks)
    token = (first + i_n) * 64
    bar = full.index(stage)
    mbarrier.expect(bar, 3 * 64 * 128 * 2, pred=here)
    for j in gl.static_range(3):
        to = inputs.index(3 * stage + j)._reinterpret(gl.bfloat16, [1, 64, 1, 128], TILE4)
        if j == 0:
            tma.async_copy_global_to_shared(d_g, [i_b, token, i_h, 0], bar, to, pred=here)
        elif j == 1:
            tma.async_copy_global_to_shared(d_k, [i_b, token, i_h // GROUP, 0], bar, to, pred=here)
        else:
            tma.async_copy_global_to_shared(d_q, [i_b, token, i_h // GROUP, 0], bar, to, pred=here)


@gluon.jit
def _rows_of(tile):
    return gl.convert_layout(gl.reshape(tile.load(FLAT), [8, 8, 128]), ROWS).to(gl.float32)


@gluon.jit
def _put(tile, x):
    tile.store(gl.reshape(x.to(gl.bfloat16), [64, 128]))


@gluon.jit
def _sum_before(sums, group, LINE: gl.constexpr):
    """Of each warp's tokens the gates before them in their half, and the sums of the two halves."""
    s0 = gl.expand_dims(sums.slice(0, 1, 0).load(LINE), 1)
    s1 = s0 + gl.expand_dims(sums.slice(1, 1, 0).load(LINE), 1)
    s2 = s1 + gl.expand_dims(sums.slice(2, 1, 0).load(LINE), 1)
    s3 = s2 + gl.expand_dims(sums.slice(3, 1, 0).load(LINE), 1)
    s4 = gl.expand_dims(sums.slice(4, 1, 0).load(LINE), 1)
    s5 = s4 + gl.expand_dims(sums.slice(5, 1, 0).load(LINE), 1)
    s6 = s5 + gl.expand_dims(sums.slice(6, 1, 0).load(LINE), 1)
    s7 = s6 + gl.expand_dims(sums.slice(7, 1, 0).load(LINE), 1)
    low = group < 4
    place = group & 3
    early = gl.where(place < 1, 0.0, gl.where(low, s0, s4))
    late = gl.where(place < 3, gl.where(low, s1, s5), gl.where(low, s2, s6))
    return gl.where(place < 2, early, late), s3, s7


@gluon.jit
def _fetch(
    c, T, HV, first, chunks, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, place, column,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr,
):  # fmt: skip
    """A tile's first token and place among the chunks, and what it needs besides q, k and g; beta is 0 beyond T."""
    i_b, i_n, i_h = _tile(c, HV, chunks)
    token = (first + i_n) * 64
    rate = 0.0
    if HAS_A:
        rate = gl.load(A_log + i_h).to(gl.float32)
    bias = gl.zeros([128], gl.float32, layout=CHANNELS)
    if HAS_DT:
        bias = gl.load(dt_bias + i_h * 128 + column).to(gl.float32)
    b = gl.full([64], 1.0, gl.float32, layout=TOKENS)
    if HAS_BETA:
        at = beta + i_b.to(gl.int64) * beta_sb + i_h.to(gl.int64) * beta_sh + (token + place).to(gl.int64) * beta_st
        b = gl.load(at, mask=token + place < T, other=0.0).to(gl.float32)
    return token, ((i_b * HV + i_h) * chunks + i_n).to(gl.int64), rate, bias, b


@gluon.jit
def _row_warps(
    d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, decay,
    T, HV, GROUP, first, chunks, total, scale, eps, bound, shift, unshift,
    inputs, rows, columns, betas, sums, full, ready, free,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
):  # fmt: skip
    LINE: gl.constexpr = gl.SliceLayout(1, ROWS)
    group = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    column = gl.arange(0, 128, layout=CHANNELS)
    place = gl.arange(0, 64, layout=TOKENS)
    to = (group.to(gl.int64) * 8 + row.to(gl.int64)) * 128 + column[None, None, :].to(gl.int64)
    low = group < 4
    step = gl.num_programs(0)
    for s in gl.static_range(STAGES):
        c = gl.program_id(0) + s * step
        _load_tile(c, total, HV, GROUP, chunks, first, d_q, d_k, d_g, inputs, full, s)
    it = 0
    for c in range(gl.program_id(0), total, step):
        token, chunk, raw_rate, raw_bias, raw_beta = _fetch(
            c, T, HV, first, chunks, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, place, column,
            HAS_A, HAS_DT, HAS_BETA,
        )  # fmt: skip
        b = raw_beta
        if SIGMOID_BETA:
            b = _sigmoid2(b * LOG2E)
        betas.index(it & 1).store(gl.where(token + place < T, b, 0.0))
        rate = gl.exp2(raw_rate * LOG2E) * LOG2E
        stage = it % STAGES
        mbarrier.wait(full.index(stage), (it // STAGES) & 1)
        x = _rows_of(inputs.index(3 * stage)) * rate + (raw_bias * rate)[None, None, :]
        g = _sigmoid2(x) * gl.where(token + group * 8 + row < T, bound, 0.0)
        within = gl.associative_scan(g, 1, _add)
        sums.store(gl.sum(g, 1))
        k = _rows_of(inputs.index(3 * stage + 1))
        k_norm = gl.rsqrt(gl.sum(k * k, 2) + eps)[:, :, None]
        q = _rows_of(inputs.index(3 * stage + 2))
        q_norm = (gl.rsqrt(gl.sum(q * q, 2) + eps) * scale)[:, :, None]
        barrier()
        out = buffer + chunk * (256 * 128)
        out_decay = decay + chunk * 128
        before, half0, half1 = _sum_before(sums, group, LINE)
        D = within + (before + shift)
        decay0 = _exp2(half0)
        decay1 = _exp2(half1)
        start = gl.where(low, 1.0, decay0)
        gl.store(out_decay + column[None, None, :], decay0 * decay1)
        up = _exp2(D)
        # q and k are read again: registers hold neither of them beside the gates.
        q = _rows_of(inputs.index(3 * stage + 2)) * q_norm * up
        mbarrier.wait(free, (it & 1) ^ 1)
        _put(rows.slice(64, 64, 0), q)
        gl.store(out + 64 * 128 + to, (q * unshift * start).to(gl.bfloat16))
        k = _rows_of(inputs.index(3 * stage + 1)) * k_norm
        k_up = k * up
        _put(rows.slice(0, 64, 0), k_up)
        gl.store(out + to, (k_up * unshift * start).to(gl.bfloat16))
        k_down = k * _reciprocal(up)
        _put(columns.index(0), k_down)
        k_end = k_down * _exp2(gl.where(low, half0, half1) + shift)
        _put(columns.index(1), k_end)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready, count=1)
        then = c + STAGES * step
        _load_tile(then, total, HV, GROUP, chunks, first, d_q, d_k, d_g, inputs, full, stage)
        gl.store(out + 128 * 128 + to, (k_end * gl.where(low, decay1, 1.0)).to(gl.bfloat16))
        it += 1


@gluon.jit
def _gram(x, columns):
    """x [64, 128] times every column's factor: inside the halves [64, 64], across them [64, 32]."""
    same = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    cross = gl.zeros([64, 32], gl.float32, layout=HALF)
    same = warpgroup_mma(x, columns.index(0).permute((1, 0)), same, use_acc=False, is_async=True)
    first = columns.index(1).slice(0, 32, 0)
    cross = warpgroup_mma(x, first.permute((1, 0)), cross, use_acc=False, is_async=True)
    return same, cross


@gluon.jit
def _select(same, cross, i, j, unshift):
    """The Gram matrix where i >= j; by selection, since above the diagonal ``same`` may be infinite."""
    cross = cross * unshift
    cross = gl.reshape(gl.permute(gl.join(cross, cross), (0, 2, 1)), [64, 64])
    return gl.where(((i >> 5) == 0) | (j >= 32), same, gl.convert_layout(cross, SQUARE))


@gluon.jit
def _invert(A, a, z, i, j, tile_n, tile_x, tile_p):
    """(I + A)^-1 for A [64, 64] strictly lower triangular, in registers and as ``a`` (fp16) in shared memory.

    Blocks of 4, 16, 64 in turn: with X the inverse of the diagonal blocks and N = X L, L the rest of the next size,
    N^4 = 0 and (I + N)^-1 X = (I + N^2) (X - N X). Products with A instead of L, masked, need no tile of their own.
    """
    same4 = (i >> 2) == (j >> 2)
    same16 = (i >> 4) == (j >> 4)
    n = gl.where(same4, A, 0.0)
    n2 = gl.where(same4, warpgroup_mma(gl.convert_layout(n.to(gl.float16), LEFT), a, z, use_acc=False), 0.0)
    n3 = gl.where(same4, warpgroup_mma(gl.convert_layout(n2.to(gl.float16), LEFT), a, z, use_acc=False), 0.0)
    x = gl.where(i == j, 1.0, 0.0) - n + n2 - n3
    for level in gl.static_range(2):
        x16 = x.to(gl.float16)
        n = warpgroup_mma(gl.convert_layout(x16, LEFT), a, z, use_acc=False, is_async=True)
        tile_x.store(x16)
        n = warpgroup_mma_wait(0, [n])
        if level == 0:
            n = gl.where(same16, gl.where(same4, 0.0, n), 0.0)
        else:
            n = gl.where(same16, 0.0, n)
        n16 = n.to(gl.float16)
        tile_n.store(n16)
        fence_async_shared()
        barrier()
        left = gl.convert_layout(n16, LEFT)
        nx = warpgroup_mma(left, tile_x, z, use_acc=False, is_async=True)
        nn = warpgroup_mma(left, tile_n, z, use_acc=False, is_async=True)
        nx = warpgroup_mma_wait(1, [nx])
        p = x - nx
        tile_p.store(p.to(gl.float16))
        nn = warpgroup_mma_wait(0, [nn])
        fence_async_shared()
        barrier()
        x = warpgroup_mma(gl.convert_layout(nn.to(gl.float16), LEFT), tile_p, p)
    return x


@gluon.jit
def _gram_warps(d_out, HV, chunks, total, unshift, rows, columns, betas, tiles, ready, free):
    a = tiles.index(0)
    m_out = tiles.index(4)._reinterpret(gl.bfloat16, [64, 64], TILE)
    qk_out = tiles.index(5)._reinterpret(gl.bfloat16, [64, 64], TILE)
    z = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    i0 = gl.arange(0, 64, layout=gl.SliceLayout(1, SQUARE))
    j0 = gl.arange(0, 64, layout=gl.SliceLayout(0, SQUARE))
    it = 0
    for c in range(gl.program_id(0), total, gl.num_programs(0)):
        i_b, i_n, i_h = _tile(c, HV, chunks)
        row = ((i_b * HV + i_h) * chunks + i_n) * 256 + 192
        i = _pinned(i0)[:, None]
        j = j0[None, :]
        mbarrier.wait(ready, it & 1)
        k_same, k_cross = _gram(rows.slice(0, 64, 0), columns)
        q_same, q_cross = _gram(rows.slice(64, 64, 0), columns)
        beta_i = betas.index(it & 1).load(gl.SliceLayout(1, SQUARE))
        beta_j = betas.index(it & 1).load(gl.SliceLayout(0, SQUARE))
        tma.store_wait(0)
        barrier()
        k_same, k_cross = warpgroup_mma_wait(2, [k_same, k_cross])
        A = gl.where(i > j, _select(k_same, k_cross, i, j, unshift) * beta_i[:, None], 0.0)
        a.store(A.to(gl.float16))
        q_same, q_cross = warpgroup_mma_wait(0, [q_same, q_cross])
        qk = gl.where(i >= j, _select(q_same, q_cross, i, j, unshift), 0.0)
        qk_out.store(qk.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        tma.async_copy_shared_to_global(d_out, [row, 64], qk_out)
        x = _invert(A, a, z, i, j, tiles.index(1), tiles.index(2), tiles.index(3))
        m_out.store((x * beta_j[None, :]).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(d_out, [row, 0], m_out)
        it += 1
    tma.store_wait(0)


@gluon.jit
def prepare(
    d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, d_out, decay,
    T, HV, GROUP, first, chunks, total, scale, eps, bound, shift, unshift,
    HAS_A: gl.constexpr, HAS_DT: gl.constexpr, HAS_BETA: gl.constexpr, SIGMOID_BETA: gl.constexpr,
    GRAM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Chunks ``first .. first + chunks`` of every batch entry and value head: ``total`` tiles, strided over blocks.

    d_q, d_k, d_g: ``[B, T, heads, 128]``, blocks ``[1, 64, 1, 128]``. bound: lower bound on a gate, in powers of two.
    shift: at least 16 * -bound, an integer; unshift = 2^-shift.
    """
    inputs = gl.allocate_shared_memory(gl.bfloat16, [3 * STAGES, 64, 128], TILE)
    rows = gl.allocate_shared_memory(gl.bfloat16, [128, 128], TILE)
    columns = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    tiles = gl.allocate_shared_memory(gl.float16, [6, 64, 64], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [8, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    betas = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    barrier()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_row_warps, (
                d_q, d_k, d_g, A_log, dt_bias, beta, beta_sb, beta_st, beta_sh, buffer, decay,
                T, HV, GROUP, first, chunks, total, scale, eps, bound, shift, unshift,
                inputs, rows, columns, betas, sums, full, ready, free, HAS_A, HAS_DT, HAS_BETA, SIGMOID_BETA,
            )),
            (_gram_warps, (d_out, HV, chunks, total, unshift, rows, columns, betas, tiles, ready, free)),
        ],
        [4], [GRAM_REGISTERS],
    )  # fmt: skip
