"""Gluon: dq and dk of a chunk with a gate per token or head, or none: 64 channels, then the other 64.

With a norm of q and k inside, their gradients are known once all channels are: what a gradient has along its row is
taken out. Without gates those of the first channels stay in registers until then; with gates, for which registers have
no room, they are left as they are and read again (``through_norms``).
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .backward_blocks import SLIM, begun, fetch, leave, narrow, ready, row_parts, widened
from .common import DOWN, SQUARE, TILE, barrier, pinned


@gluon.jit
def fetch_states(half, s_t, d_t, s_state, d_state, VALUES: gl.constexpr):
    """Begin to copy 64 of the states' channels."""
    V: gl.constexpr = s_t.shape[1]
    fetch(s_t, s_state + half * (64 * V), V, 64, VALUES)
    fetch(d_t, d_state + half * (64 * V), V, 64, VALUES)
    async_copy.commit_group()


@gluon.jit
def fetch_keys(half, q_t, k_t, q_base, q_st, k_base, k_st, left):
    fetch(q_t, q_base + half * 64, q_st, left, SLIM)
    fetch(k_t, k_base + half * 64, k_st, left, SLIM)
    async_copy.commit_group()


@gluon.jit
def _through_states(
    do_t, z_t, y_t, s_t, d_t, q_t, k_t, b, up, down, q_rate, k_rate, scale, behind, before, met,
    DELTA: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """What the states before and behind the chunk give to 64 channels of dq and dk; q and k behind the norm over q and
    k. Added, in parts: to ``behind`` and ``before`` what that gives to the gates, to ``met`` S * dS."""
    V: gl.constexpr = do_t.shape[1]
    right = s_t.permute((1, 0))
    dq = begun(do_t, right, SQUARE)
    dk = dq
    if DELTA:
        dk = begun(z_t, right, SQUARE)
    more = begun(y_t, d_t.permute((1, 0)), SQUARE)
    if L2NORM:
        q_t.store(narrow(widened(q_t.load(SQUARE)) * q_rate[:, None]))
        k_t.store(narrow(widened(k_t.load(SQUARE)) * k_rate[:, None]))
    if GATED:
        both = widened(s_t.load(VALUES)) * widened(d_t.load(VALUES))
        met += gl.sum(gl.reshape(both, [64, V // 8, 8]), 2)
    if DELTA:
        dq, dk, more = warpgroup_mma_wait(0, [dq, dk, more])
        dk = dk * (up * -b)[:, None]
    else:
        dq, more = warpgroup_mma_wait(0, [dq, more])
        dk = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    dq = dq * (up * scale)[:, None]
    more = more * (down * b)[:, None]
    if GATED:
        behind += row_parts(widened(q_t.load(SQUARE)) * dq)
        keys = widened(k_t.load(SQUARE))
        if DELTA:
            behind += row_parts(keys * dk)
        before += row_parts(keys * more)
    dk = dk + more
    ready()  # q and k behind their norms are there, and nobody reads the states any more
    return dq, dk, behind, before, met


@gluon.jit
def _through_pairs(dq, dk, q_t, k_t, p_t, l_t, DELTA: gl.constexpr):
    """What the chunk's other tokens give is added; nobody reads q and k behind this."""
    dq = warpgroup_mma(p_t, k_t, dq, is_async=True)
    dk = warpgroup_mma(p_t.permute((1, 0)), q_t, dk, is_async=True)
    if DELTA:
        dk = warpgroup_mma(l_t, k_t, dk, is_async=True)
        dk = warpgroup_mma(l_t.permute((1, 0)), k_t, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, [dq, dk])
    barrier()
    return dq, dk


@gluon.jit
def _half(
    do_t, z_t, y_t, s_t, d_t, q_t, k_t, p_t, l_t, b, up, down, q_rate, k_rate, scale, behind, before, met,
    DELTA: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """dq and dk of 64 channels, before the norm, over q and k; added as in ``_through_states``."""
    dq, dk, behind, before, met = _through_states(
        do_t, z_t, y_t, s_t, d_t, q_t, k_t, b, up, down, q_rate, k_rate, scale, behind, before, met,
        DELTA, GATED, L2NORM, VALUES,
    )  # fmt: skip
    dq, dk = _through_pairs(dq, dk, q_t, k_t, p_t, l_t, DELTA)
    q_t.store(narrow(dq))
    k_t.store(narrow(dk))
    return behind, before, met


@gluon.jit
def _normed(tile, dy, rate, along, factor):
    """Of y = r x the gradient of x over x or y in a tile, ``factor`` times which is y; ``along``: y . dy."""
    y = widened(tile.load(SQUARE)) * factor[:, None]
    tile.store(narrow((dy - y * along[:, None]) * rate[:, None]))


@gluon.jit
def held_halves(
    do_t, z_t, y_t, s_t, d_t, q_t, k_t, p_t, l_t, s_state, d_state, q_base, q_st, k_base, k_st, left, to_q, to_k, step,
    b, up, down, q_rate, k_rate, scale, none,
    DELTA: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Without gates, of normalised q and k: to rows ``step`` apart from ``to_q``, ``to_k`` on. none: zeros [64, 8]."""
    V: gl.constexpr = do_t.shape[2]
    along_q = none * 0.0
    along_k = none * 0.0
    dq = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    dk = dq
    q_first = s_t._reinterpret(gl.bfloat16, [V // 64, 64, 64], TILE).index(0)
    k_first = d_t._reinterpret(gl.bfloat16, [V // 64, 64, 64], TILE).index(0)
    first_q = narrow(dq)
    first_k = narrow(dk)
    for half in gl.static_range(2):  # a loop would take as long as what is saved
        first_q = narrow(dq)
        first_k = narrow(dk)
        async_copy.wait_group(0)
        ready()
        zero = pinned(left.to(gl.int32)) >> 30  # unknown to the compiler, see ``unknown_zero``
        at_q = q_t.index(zero)
        at_k = k_t.index(zero)
        dq, dk, _, _, _ = _through_states(
            do_t.index(zero), z_t.index(zero), y_t.index(zero), s_t.index(zero), d_t.index(zero), at_q, at_k,
            b, up, down, q_rate, k_rate, scale, none, none, none, DELTA, False, True, VALUES,
        )  # fmt: skip
        if half == 0:
            fetch_states(1, s_t.index(0), d_t.index(0), s_state, d_state, VALUES)
        else:
            fetch_keys(0, q_first, k_first, q_base, q_st, k_base, k_st, left)
        dq, dk = _through_pairs(dq, dk, at_q, at_k, p_t.index(zero), l_t.index(zero), DELTA)
        along_q += row_parts(widened(at_q.load(SQUARE)) * dq)
        along_k += row_parts(widened(at_k.load(SQUARE)) * dk)
        if half == 0:
            barrier()
            fetch_keys(1, q_t.index(0), k_t.index(0), q_base, q_st, k_base, k_st, left)
    along_q = gl.convert_layout(gl.sum(along_q, 1), DOWN)
    along_k = gl.convert_layout(gl.sum(along_k, 1), DOWN)
    one = gl.full([64], 1.0, gl.float32, layout=DOWN)
    _normed(q_t.index(0), dq, q_rate, along_q, one)
    _normed(k_t.index(0), dk, k_rate, along_k, one)
    async_copy.wait_group(0)
    barrier()
    _normed(q_first, widened(first_q), q_rate, along_q, q_rate)
    _normed(k_first, widened(first_k), k_rate, along_k, k_rate)
    barrier()
    leave(to_q, step, q_first, left, SLIM)
    leave(to_k, step, k_first, left, SLIM)
    leave(to_q + 64, step, q_t.index(0), left, SLIM)
    leave(to_k + 64, step, k_t.index(0), left, SLIM)


@gluon.jit
def written_halves(
    do_t, z_t, y_t, s_t, d_t, q_t, k_t, p_t, l_t, s_state, d_state, q_base, q_st, k_base, k_st, left, to_q, to_k, step,
    b, up, down, q_rate, k_rate, scale, behind, before, met,
    DELTA: gl.constexpr, GATED: gl.constexpr, L2NORM: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """dq and dk before the norm; ``behind``, ``before`` and ``met`` as in ``_through_states``."""
    for half in range(2):
        async_copy.wait_group(0)
        ready()
        zero = pinned(half) >> 30  # unknown to the compiler, see ``unknown_zero``
        behind, before, met = _half(
            do_t.index(zero), z_t.index(zero), y_t.index(zero), s_t.index(zero), d_t.index(zero), q_t.index(zero),
            k_t.index(zero), p_t.index(zero), l_t.index(zero), b, up, down, q_rate, k_rate, scale, behind, before,
            met, DELTA, GATED, L2NORM, VALUES,
        )  # fmt: skip
        barrier()
        if half == 0:
            fetch_states(1, s_t.index(0), d_t.index(0), s_state, d_state, VALUES)
        leave(to_q + half * 64, step, q_t.index(0), left, SLIM)
        leave(to_k + half * 64, step, k_t.index(0), left, SLIM)
        barrier()
        if half == 0:
            fetch_keys(1, q_t.index(0), k_t.index(0), q_base, q_st, k_base, k_st, left)
    return behind, before, met
