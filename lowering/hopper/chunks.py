"""Gluon: what the scans share: which chunks are a block's own, the state before them, and how outputs leave."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .common import await_tiles, barrier

LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def locate_chunks(cu_seqlens, chunk_offsets, T, HV, first, chunks, length, segment, PACKED: gl.constexpr):
    """Of a block's chunks: sequence, value head, batch entry, the first one's tile, the tiles from one to the next, how
    many there are, the first one's first token, and the end of the sequence."""
    i_nh = gl.program_id(1)
    i_n = i_nh // HV
    i_h = i_nh % HV
    if PACKED:
        offset = gl.load(chunk_offsets + i_n)
        begin = gl.maximum(offset, first)
        count = gl.maximum(gl.minimum(gl.load(chunk_offsets + i_n + 1), first + chunks) - begin, 0)
        step = HV
        tile = (begin - first) * HV + i_h
        token = gl.maximum(gl.load(cu_seqlens + i_n), 0).to(gl.int32) + (begin - offset) * 64
        end = gl.minimum(gl.load(cu_seqlens + i_n + 1), T).to(gl.int32)
        i_b = i_n * 0
    else:
        begin = segment * length
        count = gl.minimum(length, chunks - begin)
        step = gl.num_programs(1)
        tile = begin * step + i_nh
        token = (first + begin) * 64
        end = T
        i_b = i_n
    return i_n, i_h, i_b, tile, step, count, token, end


@gluon.jit
def await_known(flags, n, known, count, step):
    if n >= known:
        known = await_tiles(flags, n, count, step)
    return known


@gluon.jit
def first_state(
    initial, s_ss, s_sn, s_sh, s_sk, s_sv, K, V, VP, i_n, i_h, segment, keys, columns,
    HAS_INITIAL: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = keys.type.layout
    S = gl.zeros([columns.shape[0], keys.shape[1]], gl.float32, layout=KEYS)
    if HAS_INITIAL:
        initial += i_n.to(gl.int64) * s_sn + i_h.to(gl.int64) * s_sh + segment.to(gl.int64) * s_ss
        given = (keys < K) & (columns < V)
        if not OUTPUT:
            given = given & (segment == 0)
        S = gl.load(initial + keys * s_sk + columns * s_sv, mask=given, other=0.0).to(gl.float32)
    if not OUTPUT:
        S = gl.where(keys == columns - VP, 1.0, S)
    return S


@gluon.jit
def keep_outputs(out, o16):
    """Outputs [BV, 64] into ``out``, once what was there has left."""
    tma.store_wait(0)
    barrier()
    out.permute((1, 0)).store(o16)


@gluon.jit
def leave_last(
    d_o, o_rows, out, out4, TOKENS: gl.constexpr, i_b, i_h, i_v, token, end, V, HV, some, BV: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Store the outputs of the last chunk, which are in ``out``; its first token is ``token``, if there is ``some``."""
    fence_async_shared()
    barrier()
    if PACKED:
        # The copy engine would write over the first tokens of the next sequence.
        if some & (end - token >= 64):
            tma.async_copy_shared_to_global(d_o, [i_b, token, i_h, i_v * BV], out4)
        else:
            o16 = out.permute((1, 0)).load(TOKENS)
            place = gl.arange(0, 64, layout=gl.SliceLayout(0, TOKENS))[None, :]
            value = i_v * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, TOKENS))[:, None]
            at = (token + place).to(gl.int64) * HV + i_h
            gl.store(o_rows + at * V + value, o16, mask=(token + place < end) & (value < V) & some)
    else:
        tma.async_copy_shared_to_global(d_o, [i_b, token, i_h, i_v * BV], out4)
    tma.store_wait(0)


@gluon.jit
def clear_beyond(k_rows, left, WARPS: gl.constexpr):
    """Zeros in the rows of the next sequence: what meets them in a product is zero, but they may be infinite or NaN."""
    ACROSS: gl.constexpr = k_rows.shape[1] // 8  # threads
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    if left < 64:
        k_rows.store(gl.where(row < left, k_rows.load(ROWS), 0.0))
        fence_async_shared()
        barrier()
