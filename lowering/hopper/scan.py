"""Gluon: the state of every head through a run of chunks, and their outputs (K = V = 128, C = 64).

A block owns BV columns of V of one value head and keeps that part of the state, transposed, fp32, in registers. With
the rows that :mod:`.prepare` left behind, every chunk is::

    R      = V - K_gated S             V_new = M R
    O      = Q_gated S + A_qk V_new    S     = diag(decay) S + K_decayed^T V_new

All five products have S^T, R^T or V_new^T as the operand in registers: what one leaves in an accumulator is already in
place as the next one's operand. One warp loads STAGES chunks ahead; o leaves through shared memory, a chunk late.
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

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TILE4 = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


@gluon.jit
def _load_warp(
    d_buffer, d_v, i_b, i_h, i_v, lane, first, chunks, chunk_rows, values, full, empty,
    BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for n in range(chunks):
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), ((n // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, (256 * 128 + 64 * BV) * 2)
        tma.async_copy_global_to_shared(d_buffer, [(lane * chunks + n) * 256, 0], bar, chunk_rows.index(stage))
        to = values.index(stage)._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
        tma.async_copy_global_to_shared(d_v, [i_b, (first + n) * 64, i_h, i_v * BV], bar, to)


@gluon.jit
def _state_warps(
    d_o, decay, initial, s_sn, s_sh, s_sk, s_sv, final, HV, i_b, i_h, i_v, lane, first, chunks,
    chunk_rows, values, out, decays, full, empty, BV: gl.constexpr, STAGES: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = BV // 16
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    LEFT_TOKENS: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_KEYS: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    column = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    keys = gl.arange(0, 128, layout=gl.SliceLayout(0, KEYS))[None, :]
    columns = (i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, KEYS)))[:, None]
    decay += lane.to(gl.int64) * chunks * 128
    if HAS_INITIAL:
        initial += i_b.to(gl.int64) * s_sn + i_h.to(gl.int64) * s_sh
        S = gl.load(initial + keys * s_sk + columns * s_sv).to(gl.float32)
    else:
        S = gl.zeros([BV, 128], gl.float32, layout=KEYS)
    zero = gl.zeros([BV, 64], gl.float32, layout=TOKENS)
    S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
    o16 = zero.to(gl.bfloat16)
    decays.index(0).store(gl.load(decay + column))
    out4 = out._reinterpret(gl.bfloat16, [1, 64, 1, BV], TILE4)
    for n in range(chunks):
        stage = n % STAGES
        tile = chunk_rows.index(stage)
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        KS = warpgroup_mma(S16, tile.slice(0, 64, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        next_decay = gl.load(decay + gl.minimum(n + 1, chunks - 1) * 128 + column)
        o = warpgroup_mma(S16, tile.slice(64, 64, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        tma.store_wait(0)
        barrier()
        if n > 0:
            mbarrier.arrive(empty.index((n - 1) % STAGES), count=1)
        out.permute((1, 0)).store(o16)
        S = S * decays.index(n & 1).load(gl.SliceLayout(0, KEYS))[None, :]
        v = values.index(stage).permute((1, 0)).load(TOKENS).to(gl.float32)
        fence_async_shared()
        barrier()
        if n > 0:
            tma.async_copy_shared_to_global(d_o, [i_b, (first + n - 1) * 64, i_h, i_v * BV], out4)
        KS = warpgroup_mma_wait(1, [KS])
        R = gl.convert_layout((v - KS).to(gl.bfloat16), LEFT_TOKENS)
        square = tile.slice(192, 64, 0)
        V_new = warpgroup_mma(R, square.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        V_new, o = warpgroup_mma_wait(0, [V_new, o])
        V16 = V_new.to(gl.bfloat16)
        S = warpgroup_mma(gl.convert_layout(V16, LEFT_KEYS), tile.slice(128, 64, 0), S, is_async=True)
        A_qk = square.slice(64, 64, 1).permute((1, 0))
        o = warpgroup_mma(gl.convert_layout(V16, LEFT_TOKENS), A_qk, o, is_async=True)
        decays.index((n + 1) & 1).store(next_decay)
        S = warpgroup_mma_wait(1, [S])
        S16 = gl.convert_layout(S.to(gl.bfloat16), LEFT_TOKENS)
        o = warpgroup_mma_wait(0, [o])
        o16 = o.to(gl.bfloat16)
    tma.store_wait(0)
    barrier()
    out.permute((1, 0)).store(o16)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(d_o, [i_b, (first + chunks - 1) * 64, i_h, i_v * BV], out4)
    gl.store(final + lane.to(gl.int64) * (128 * 128) + keys * 128 + columns, S)
    tma.store_wait(0)


@gluon.jit
def scan(
    d_buffer, d_v, decay, d_o, initial, s_sn, s_sh, s_sk, s_sv, final, HV, first, chunks,
    BV: gl.constexpr, STAGES: gl.constexpr, HAS_INITIAL: gl.constexpr,
):  # fmt: skip
    """Chunks ``first .. first + chunks``; grid (128 / BV, B * HV). d_v, d_o: ``[B, T, HV, 128]``, blocks of BV columns.

    initial: fp32 ``[B, HV, K, V]`` with its strides; final: the same, contiguous. They may be one tensor.
    """
    i_v = gl.program_id(0)
    lane = gl.program_id(1)
    i_b = lane // HV
    i_h = lane % HV
    chunk_rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 256, 128], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BV], TILE)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, BV], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    barrier()
    # The tuples are written in place: as variables they would turn their constants into run-time values.
    gl.warp_specialize(
        [
            (_state_warps, (
                d_o, decay, initial, s_sn, s_sh, s_sk, s_sv, final, HV, i_b, i_h, i_v, lane, first, chunks,
                chunk_rows, values, out, decays, full, empty, BV, STAGES, HAS_INITIAL,
            )),
            (_load_warp, (
                d_buffer, d_v, i_b, i_h, i_v, lane, first, chunks, chunk_rows, values, full, empty, BV, STAGES,
            )),
        ],
        [1], [24],
    )  # fmt: skip
