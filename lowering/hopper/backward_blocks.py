"""Gluon: a chunk of 64 tokens in blocks of 16, with a gate per channel, for the kernels of the backward pass.

Between two blocks every decay is a product of numbers that are at most 1: from a column to the end of its block, over
the blocks in between, and from the start of a row's block to the row. So a sum over the tokens of earlier blocks is
one accumulator that is scaled by a block's decay before the next block is added, and every product has 16 columns.
Inside a block a decay is ``2^(D_i + SHIFT) 2^(-D_j - SHIFT)``, D the sum of gates from the block's start: a reference
among the tokens would let later gates change how earlier gradients round. There, and there only, a log2 gate below
LIMIT counts as LIMIT, so that both factors stay in range: 2e-4 of an undecayed term.

Four warps, two blocks of threads to a multiprocessor. What belongs to one block of tokens, or is scaled between blocks,
is a synchronous product (``mma_v2``): a warp's rows are a block's, so no warp does any in vain. Products of whole tiles
are asynchronous (``warpgroup_mma``), their operands in shared memory; a thread has the same elements of both's results.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from .common import barrier, exp2, pinned

LIMIT = gl.constexpr(-12.4)  # 16 of these and SHIFT leave factors from 2^-99 to 2^99: in range of bf16 with a key
SHIFT = gl.constexpr(99.0)

FLAT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # [64, columns]
BATCH = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # [4, 16, columns], the same elements
LEFT = gl.constexpr(gl.DotOperandLayout(0, FLAT, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, FLAT, 2))
LEFT4 = gl.constexpr(gl.DotOperandLayout(0, BATCH, 2))
RIGHT4 = gl.constexpr(gl.DotOperandLayout(1, BATCH, 2))
PART = gl.constexpr(32)  # channels at a time
PARTS = gl.constexpr(4)
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # rows of 64 or more, 16 bits each
NARROW = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # rows of PART
NARROW4 = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))
DIAGONAL = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # rows of 16
DIAGONAL4 = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ACROSS = gl.constexpr(gl.SliceLayout(0, FLAT.value))
DOWN = gl.constexpr(gl.SliceLayout(1, FLAT.value))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # how [64, PART] meets memory: 16 bytes a thread
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # and [64, 128]
TOKEN = gl.constexpr(gl.SliceLayout(1, WIDE.value))
SLIM = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # and [rows, 64]


@gluon.jit
def tiles_apart(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Tiles of shared memory apart: stores into one wait for nobody who reads another."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(gl.bfloat16, [1, 64, PART], LAYOUT),)  # noqa: RUF005
    return tiles


@gluon.jit
def tiles_at(tiles, at, COUNT: gl.constexpr):
    """Those of ``tiles_apart``; ``at``: 0, unknown to the compiler where it is not to keep addresses over a loop."""
    found = ()
    for n in gl.static_range(COUNT):
        found = found + (tiles[n].index(at),)  # noqa: RUF005
    return found


@gluon.jit
def by_block(x):
    """[64, columns] as [4, 16, columns], nothing moved."""
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.convert_layout(gl.reshape(x, [4, 16, COLUMNS]), BATCH)


@gluon.jit
def flat(x):
    COLUMNS: gl.constexpr = x.shape[2]
    return gl.convert_layout(gl.reshape(x, [64, COLUMNS]), FLAT)


@gluon.jit
def right_by_block(tile):
    """The blocks of a tile [64, columns] in shared memory, each as a right operand."""
    COLUMNS: gl.constexpr = tile.shape[1]
    return tile._reinterpret(tile.dtype, [4, 16, COLUMNS], NARROW4).load(RIGHT4)


@gluon.jit
def inside_mask(WHAT: gl.constexpr, DT: gl.constexpr):
    """[4, 16, 16] to sum a block's tokens by: "until" a token, "after" it, "from" it on, or "before" it."""
    i = pinned(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT4))))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT4)))[None, None, :]
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT4)))[:, None, None]
    i = i + 0 * (b + j)
    j = j + 0 * i
    if WHAT == "until":
        mask = gl.where(j <= i, 1.0, 0.0)
    elif WHAT == "after":
        mask = gl.where(j > i, 1.0, 0.0)
    elif WHAT == "before":
        mask = gl.where(j < i, 1.0, 0.0)
    else:
        mask = gl.where(j >= i, 1.0, 0.0)
    return mask.to(DT)


@gluon.jit
def inside_sums(mask, high, low):
    """[64, columns]: the sums by ``mask`` of rows that are ``high`` + ``low``, in shared memory."""
    COLUMNS: gl.constexpr = high.shape[1]
    sums = gl.zeros([4, 16, COLUMNS], gl.float32, layout=BATCH)
    sums = mma_v2(mask, right_by_block(high), sums)
    sums = mma_v2(mask, right_by_block(low), sums)
    return flat(sums)


@gluon.jit
def row_parts(x):
    """[64, columns] as [64, 8]: sums of what a thread holds of a row."""
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.sum(gl.reshape(gl.sum(gl.reshape(x, [64, COLUMNS // 16, 16]), 1), [64, 8, 2]), 2)


@gluon.jit
def narrow(x):
    """fp32 as bf16, two at a time: what is converted one by one takes four times as long."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2)


@gluon.jit
def widened(x):
    """bf16 as fp32, two at a time."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], gl.float32, True, 2
    )


@gluon.jit
def put_split(high, low, x):
    """x in two parts of the dtype of two tiles."""
    if high.dtype == gl.bfloat16:
        h = narrow(x)
        low.store(narrow(x - widened(h)))
    else:
        h = x.to(high.dtype)
        low.store((x - h.to(gl.float32)).to(low.dtype))
    high.store(h)


@gluon.jit
def halves(work):
    """Two of the tiles of ``tiles_apart`` for ``put_split``, in fp16."""
    high = work[0]._reinterpret(gl.float16, [64, PART], NARROW)
    return high, work[1]._reinterpret(gl.float16, [64, PART], NARROW)


@gluon.jit
def near_start(high, low, ANCHOR: gl.constexpr):
    """2^(D + ANCHOR) and 2^-(D + ANCHOR), D the sums from a block's start of log2 gates, ``high`` + ``low``."""
    within = inside_sums(inside_mask("until", gl.float16), high, low) + ANCHOR
    return exp2(within), exp2(-within)


@gluon.jit
def block_totals(g, totals):
    """A line for every block: the decay over it."""
    totals.store(gl.convert_layout(exp2(gl.sum(by_block(g), 1)), gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])))


@gluon.jit
def line_of(lines, at: gl.constexpr):
    """[1, 1, PART]: the decay over block ``at``."""
    return lines.slice(at, 1, 0).load(gl.SliceLayout(1, BATCH))[:, None, :]


@gluon.jit
def over_block(lines, at: gl.constexpr, WHICH: gl.constexpr):
    """[4, 1, PART]: the decay over block ``at`` for the rows of the blocks "after" it, "before" it, or "until" it."""
    block = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, BATCH)))[:, None, None]
    if WHICH == "after":
        decays = block > at
    elif WHICH == "before":
        decays = block < at
    else:
        decays = block <= at
    return gl.where(decays, line_of(lines, at), 1.0)


@gluon.jit
def over_chunk(lines):
    """[1, 1, PART]: the decay over all blocks."""
    return (line_of(lines, 0) * line_of(lines, 1)) * (line_of(lines, 2) * line_of(lines, 3))


@gluon.jit
def scaled(x, by):
    """[64, PART] times a factor of each block's rows [4, 1, PART]."""
    return flat(by_block(x) * by)


@gluon.jit
def _kept(x):
    """x, opaque: equal registers would be copied for every product."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.bfloat16, False, 2)


@gluon.jit
def over_gates(spread, ended, rest, work):
    """Gradients of log gates: ``spread`` of the tokens from a gate on, ``ended`` (bf16) of those before it, ``rest``.

    rest: [1, 1, PART]; work: three tiles that nobody reads any more behind a barrier.
    """
    barrier()
    put_split(work[0], work[1], spread)
    work[2].store(ended)
    block = gl.arange(0, 64, layout=gl.SliceLayout(1, LEFT))[:, None] >> 4
    block = block + 0 * gl.arange(0, 16, layout=gl.SliceLayout(0, LEFT))[None, :]
    dg = gl.zeros([4, 16, PART], gl.float32, layout=BATCH) + rest
    own = inside_mask("from", gl.bfloat16)
    dg = mma_v2(own, right_by_block(work[0]), dg)
    dg = mma_v2(own, right_by_block(work[1]), dg)
    dg = flat(mma_v2(inside_mask("before", gl.bfloat16), right_by_block(work[2]), dg))
    for at in gl.static_range(4):
        before = _kept(gl.where(block < at, 1.0, 0.0).to(gl.bfloat16))
        after = _kept(gl.where(block > at, 1.0, 0.0).to(gl.bfloat16))
        if at > 0:
            dg = mma_v2(before, work[0].slice(16 * at, 16, 0).load(RIGHT), dg)
            dg = mma_v2(before, work[1].slice(16 * at, 16, 0).load(RIGHT), dg)
        if at < 3:
            dg = mma_v2(after, work[2].slice(16 * at, 16, 0).load(RIGHT), dg)
    return dg


@gluon.jit
def put_square(square, diagonal, x, i, j):
    """x [64, 64] into two tiles: ``square`` without the blocks on the diagonal, and those, 16 columns wide."""
    own = (i >> 4) == (j >> 4)
    square.store(gl.where(own, 0.0, x).to(gl.bfloat16))
    diagonal.store(gl.sum(gl.reshape(gl.where(own, x, 0.0), [64, 4, 16]), 1).to(gl.bfloat16))


@gluon.jit
def diagonal_blocks(diagonal, TURNED: gl.constexpr):
    """Four left operands [4, 16, 16] of what ``put_square`` left, or of its transpose."""
    blocks = diagonal._reinterpret(gl.bfloat16, [4, 16, 16], DIAGONAL4)
    if TURNED:
        blocks = blocks.permute((0, 2, 1))
    return blocks.load(LEFT4)


@gluon.jit
def product(left, right, acc, DEPTH: gl.constexpr):
    """acc + left right^T of two tiles [64, DEPTH] in shared memory, a few columns at a time."""
    for at in gl.static_range(0, DEPTH, 32):
        acc = mma_v2(left.slice(at, 32, 1).load(LEFT), right.slice(at, 32, 1).permute((1, 0)).load(RIGHT), acc)
    return acc


@gluon.jit
def begun(left, right, LAYOUT: gl.constexpr):
    """left right, two tiles in shared memory, under way."""
    ROWS: gl.constexpr = left.shape[0]
    COLUMNS: gl.constexpr = right.shape[1]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout=LAYOUT)
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def ready():
    """What threads have stored or copied can be met by products behind this."""
    fence_async_shared()
    barrier()


@gluon.jit
def fetch(to, base, step, left, LAYOUT: gl.constexpr):
    """Begin to copy a tile's rows from memory, ``step`` elements apart; zeros from row ``left`` on."""
    ROWS: gl.constexpr = to.shape[0]
    COLUMNS: gl.constexpr = to.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, base + i * step + j, mask=(i < left) & (j >= 0))


@gluon.jit
def leave(base, step, tile, left, LAYOUT: gl.constexpr):
    """The first ``left`` rows of a tile in shared memory to memory."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(base + i * step + j, tile.load(LAYOUT).to(base.dtype.element_ty), mask=(i < left) & (j >= 0))


@gluon.jit
def own_chunk(first_head, HP: gl.constexpr):
    """Of a block: its number, its chunk and its head, one of HP from ``first_head`` on."""
    pid = gl.program_id(0).to(gl.int64)
    return pid, pid // HP, first_head + pid % HP


@gluon.jit
def chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, PACKED: gl.constexpr):
    """Of a chunk of 64: its batch entry, its first token, and how many are left of its sequence from there."""
    if PACKED:
        sequence = 0 * N
        after = N
        while after - sequence > 1:  # the last sequence that begins at this chunk or before
            middle = (sequence + after) // 2
            ahead = gl.load(chunk_offsets + middle) > chunk
            after = gl.where(ahead, middle, after)
            sequence = gl.where(ahead, sequence, middle)
        start = gl.maximum(gl.load(cu_seqlens + sequence).to(gl.int64), 0)
        end = gl.minimum(gl.load(cu_seqlens + sequence + 1).to(gl.int64), T)
        first = start + (chunk - gl.load(chunk_offsets + sequence)) * 64
        batch = chunk * 0
    else:
        chunks = (T + 63) // 64
        batch = chunk // chunks
        first = (chunk - batch * chunks) * 64
        end = first * 0 + T
    return batch, first, end - first


@gluon.jit
def store_rows(base, x, step, left):
    """The live rows of a tile [64, columns] to memory, rows ``step`` elements apart."""
    COLUMNS: gl.constexpr = x.shape[1]
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ROWS))[None, :]
    x = gl.convert_layout(x.to(base.dtype.element_ty), ROWS)
    gl.store(base + i * step + j, x, mask=i < left)


@gluon.jit
def load_rows(base, step, left):
    """A tile [64, 128] of a tensor's tokens; zeros from row ``left`` on."""
    i = gl.arange(0, 64, layout=TOKEN)[:, None]
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    return gl.load(base + i * step + d, mask=i < left, other=0.0)


@gluon.jit
def _through_norm(x, dy, rate):
    """Of ``y = r x``: ``r (dy - y (y . dy))``."""
    x = x.to(gl.float32)
    dy = dy.to(gl.float32)
    return rate * dy - rate * rate * rate * gl.sum(x * dy, 1)[:, None] * x


@gluon.jit
def through_norms(dq, dk, step, q, q_st, k, k_st, rates, left):
    """Over the gradients of normalised q and k those of q and k."""
    row = gl.arange(0, 64, layout=TOKEN)
    q = load_rows(q, q_st, left)
    k = load_rows(k, k_st, left)
    to_q = load_rows(dq, step, left)
    to_k = load_rows(dk, step, left)
    at = row[:, None] * step + gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    to_q = _through_norm(q, to_q, gl.load(rates + row)[:, None])
    gl.store(dq + at, to_q.to(dq.dtype.element_ty), mask=row[:, None] < left)
    to_k = _through_norm(k, to_k, gl.load(rates + 64 + row)[:, None])
    gl.store(dk + at, to_k.to(dk.dtype.element_ty), mask=row[:, None] < left)


@gluon.jit
def fetch_part(part, q_t, k_t, g_t, q_base, q_st, k_base, k_st, g_base, g_st, left):
    """Begin to copy q, k and g of some channels; nothing behind the last part."""
    left = gl.where(part < PARTS, left, 0)
    fetch(q_t, q_base + part * PART, q_st, left, ROWS)
    fetch(k_t, k_base + part * PART, k_st, left, ROWS)
    fetch(g_t, g_base + part * PART, g_st, left, ROWS)


@gluon.jit
def as_fp32(x):
    if x.dtype == gl.bfloat16:
        x = widened(x)
    return x.to(gl.float32)
