"""Gluon: the chain of a head's chunks where few blocks of a scan run, with a gate per channel (see :mod:`.scan`).

A chunk's products wait for each other: K S, V_new from it, and S from that. What only the outputs need runs in between:
half of Q S while R is rounded, the other half while V_new is, and A_qk V_new while S is. So the state is kept in halves
of 64 channels, and the first product of the next chunk is under way when a chunk's round of the loop ends. The bits are
those of the other order.
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

from .chunks import LINE, first_state, keep_outputs, leave_last
from .common import TILE4, barrier, previous_is_over, tf32

HERE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, HERE.value, 2))
ACROSS = gl.constexpr(gl.SliceLayout(0, HERE.value))


@gluon.jit
def _rounded(x):
    """x in bf16, and here: the compiler would move it behind a branch, where products under way have to end first."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, False, 2)


@gluon.jit
def _times(left0, left1, rows, zero):
    """S of both halves times rows [64, 128], transposed: under way."""
    x = warpgroup_mma(left0, rows.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(left1, rows.slice(64, 64, 1).permute((1, 0)), x, is_async=True)


@gluon.jit
def _leave_state(S, final, f_sk, f_rows, f_columns, VP, keys, columns, OUTPUT: gl.constexpr):
    if not OUTPUT:  # A meets the tensor cores again
        S = gl.where(columns < VP, S, tf32(S))
    gl.store(final + keys * f_sk + columns, S, mask=(keys < f_rows) & (columns < f_columns))


@gluon.jit
def channel_warps(
    d_o, o_rows, initial, s_ss, s_sn, s_sh, s_sk, s_sv, final, f_ss, f_sl, f_sk, f_rows, f_columns,
    K, V, VP, HV, i_n, i_b, i_h, i_v, segment, leaves, token, count, end,
    parts, values, lines, out, full, empty,
    STAGES: gl.constexpr, READY: gl.constexpr, HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    BEHIND: gl.constexpr = 1 if OUTPUT else 0  # what is under way after the product that is waited for
    keys = gl.arange(0, 64, layout=ACROSS)[None, :]
    columns = (i_v * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, HERE)))[:, None]
    if AHEAD:
        previous_is_over()
    S0 = first_state(
        initial, s_ss, s_sn, s_sh, s_sk, s_sv, K, V, VP, i_n, i_h, segment, keys, columns, HAS_INITIAL, OUTPUT
    )  # fmt: skip
    S1 = first_state(
        initial, s_ss, s_sn, s_sh, s_sk, s_sv, K, V, VP, i_n, i_h, segment, 64 + keys, columns, HAS_INITIAL, OUTPUT
    )  # fmt: skip
    zero = gl.zeros([64, 64], gl.float32, layout=HERE)
    left0 = gl.convert_layout(_rounded(S0), LEFT)
    left1 = gl.convert_layout(_rounded(S1), LEFT)
    out4 = out._reinterpret(gl.bfloat16, [1, 64, 1, 64], TILE4)
    mbarrier.wait(full.index(0), 0, pred=count > 0)
    KS = _times(left0, left1, parts.index(0), zero)
    for n in range(count):
        stage = n % STAGES
        q_rows = parts.index(4 * stage + 1)
        k_left = parts.index(4 * stage + 2)
        M = parts.index(4 * stage + 3).slice(0, 64, 1)
        A_qk = parts.index(4 * stage + 3).slice(64, 64, 1)
        line = lines.index(stage)._reinterpret(gl.float32, [128], LINE)
        v = values.index(stage).permute((1, 0)).load(HERE).to(gl.float32)
        KS = warpgroup_mma_wait(0, [KS])
        if OUTPUT:
            o = warpgroup_mma(left0, q_rows.slice(0, 64, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        R = gl.convert_layout((v - KS).to(gl.bfloat16), LEFT)
        V_new = warpgroup_mma(R, M.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            o = warpgroup_mma(left1, q_rows.slice(64, 64, 1).permute((1, 0)), o, is_async=True)
        S0 = S0 * line.slice(0, 64).load(ACROSS)[None, :]
        S1 = S1 * line.slice(64, 64).load(ACROSS)[None, :]
        V_new, S0, S1 = warpgroup_mma_wait(BEHIND, [V_new, S0, S1])
        V16 = gl.convert_layout(V_new.to(gl.bfloat16), LEFT)
        S0 = warpgroup_mma(V16, k_left.slice(0, 64, 1), S0, is_async=True)
        S1 = warpgroup_mma(V16, k_left.slice(64, 64, 1), S1, is_async=True)
        if OUTPUT:
            o = warpgroup_mma(V16, A_qk.permute((1, 0)), o, is_async=True)
            # Beside these products the outputs of the chunk before leave.
            fence_async_shared()
            barrier()
            if n > 0:
                tma.async_copy_shared_to_global(d_o, [i_b, token + (n - 1) * 64, i_h, i_v * 64], out4)
        mbarrier.wait(full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1, pred=n + 1 < count)
        S0, S1 = warpgroup_mma_wait(BEHIND + 1, [S0, S1])
        left0 = gl.convert_layout(_rounded(S0), LEFT)
        S1 = warpgroup_mma_wait(BEHIND, [S1])
        left1 = gl.convert_layout(_rounded(S1), LEFT)
        # Behind the last chunk it begins in vain, with what happens to be there.
        KS = _times(left0, left1, parts.index(4 * ((n + 1) % STAGES)), zero)
        if OUTPUT:
            o = warpgroup_mma_wait(2, [o])
            keep_outputs(out, _rounded(o))
        else:
            barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if OUTPUT:
        last = token + (count - 1) * 64
        leave_last(d_o, o_rows, out, out4, HERE, i_b, i_h, i_v, last, end, V, HV, count > 0, 64, False)
    warpgroup_mma_wait(0, [KS])
    if leaves:
        final += (i_n * HV + i_h).to(gl.int64) * f_sl + segment.to(gl.int64) * f_ss
        _leave_state(S0, final, f_sk, f_rows, f_columns, VP, keys, columns, OUTPUT)
        _leave_state(S1, final, f_sk, f_rows, f_columns, VP, 64 + keys, columns, OUTPUT)
    if READY:
        previous_is_over()
