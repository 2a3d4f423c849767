"""Gluon: a chunk of 64 tokens in blocks of 16, with a gate per channel, for the kernels of the backward pass.

Between two blocks every decay is a product of numbers that are at most 1: from a column to the end of its block, over
the blocks in between, and from the start of a row's block to the row. So a sum over the tokens of earlier blocks is
one accumulator that is scaled by a block's decay before the next block is added, and every product has 16 columns.
Inside a block a decay is ``2^(D_i + SHIFT) 2^(-D_j - SHIFT)``, D the sum of gates from the block's start: a reference
among the tokens would let later gates change how earlier gradients round. There, and there only, a log2 gate below
LIMIT counts as LIMIT, so that both factors stay in range: 2e-4 of an undecayed term.

Products are synchronous (``mma_v2``), eight warps in four rows and two columns: a warp's rows are a block's, and what
belongs to one block only is a batch of four products that no warp does in vain.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .common import barrier, exp2, pinned

LIMIT = gl.constexpr(-12.4)  # 16 of these and SHIFT leave factors from 2^-99 to 2^99: in range of bf16 with a key
SHIFT = gl.constexpr(99.0)

FLAT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 2], [16, 8]))  # [64, columns]
BATCH = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 2], [1, 16, 8]))  # [4, 16, columns], the same elements
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
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))  # how [64, PART] meets memory: 16 bytes a thread
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # and [64, 128]
TOKEN = gl.constexpr(gl.SliceLayout(1, WIDE.value))
PARTED = gl.constexpr(
    gl.BlockedLayout([1, 1, 8], [4, 2, 4], [1, 8, 1], [2, 0, 1])
)  # and [4, 64, PART], the same elements
SLIM = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # and [rows, 64]


@gluon.jit
def tiles_apart(COUNT: gl.constexpr):
    """Tiles of shared memory apart: stores into one wait for nobody who reads another."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(gl.bfloat16, [64, PART], NARROW),)  # noqa: RUF005
    return tiles


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
    """[4, 16, 16] to sum a block's tokens by: up to a token ("until"), behind it ("after") or from it on ("from")."""
    i = pinned(gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT4))))[None, :, None]
    j = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT4)))[None, None, :]
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT4)))[:, None, None]
    i = i + 0 * (b + j)
    j = j + 0 * i
    if WHAT == "until":
        mask = gl.where(j <= i, 1.0, 0.0)
    elif WHAT == "after":
        mask = gl.where(j > i, 1.0, 0.0)
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
def block_totals(g, totals):
    """A line for every block: the decay over it."""
    totals.store(gl.convert_layout(exp2(gl.sum(by_block(g), 1)), gl.BlockedLayout([1, 1], [1, 32], [4, 2], [1, 0])))


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
def over_gates(spread, ended, rest, later_t, work):
    """Gradients of log gates: ``spread`` of the tokens from a gate on, ``ended`` (bf16) of those before it, ``rest``.

    rest: [1, 1, PART]; later_t: 1 from the diagonal on; work: three tiles that nobody reads any more behind a barrier.
    """
    barrier()
    put_split(work[0], work[1], spread)
    work[2].store(ended)
    dg = flat(
        by_block(gl.zeros([64, PART], gl.float32, layout=FLAT) - widened(ended)) + rest
    )  # its own is not before it
    for at in gl.static_range(0, 64, 16):
        later = later_t.slice(at, 16, 1).load(LEFT)
        dg = mma_v2(later, work[0].slice(at, 16, 0).load(RIGHT), dg)
        dg = mma_v2(later, work[1].slice(at, 16, 0).load(RIGHT), dg)
        until = later_t.slice(at, 16, 0).permute((1, 0)).load(LEFT)
        dg = mma_v2(until, work[2].slice(at, 16, 0).load(RIGHT), dg)
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
def times(left, right, acc, DEPTH: gl.constexpr):
    """acc + left right of tiles in shared memory, a few columns of the left one at a time."""
    for at in gl.static_range(0, DEPTH, 32):
        acc = mma_v2(left.slice(at, 32, 1).load(LEFT), right.slice(at, 32, 0).load(RIGHT), acc)
    return acc


@gluon.jit
def fetch(to, base, step, left, LAYOUT: gl.constexpr):
    """Begin to copy a tile's rows from memory, ``step`` elements apart; zeros from row ``left`` on."""
    ROWS: gl.constexpr = to.shape[0]
    COLUMNS: gl.constexpr = to.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(to, base + i * step + j, mask=(i < left) & (j >= 0))


@gluon.jit
def leave(base, step, tile, left):
    """The first ``left`` rows of a tile in shared memory, 64 columns wide, to memory."""
    ROWS: gl.constexpr = tile.shape[0]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SLIM))[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, SLIM))[None, :]
    gl.store(base + i * step + j, tile.load(SLIM).to(base.dtype.element_ty), mask=(i < left) & (j >= 0))


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
def load_tile(base, st, sd, left):
    """A tile [64, 128] of a tensor's tokens; zeros from row ``left`` on."""
    i = gl.arange(0, 64, layout=TOKEN)[:, None]
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    return gl.load(base + i * st + d * sd, mask=i < left, other=0.0)


@gluon.jit
def put_parts(tiles, x):
    """A tile [64, 128] as PARTS tiles of PART channels."""
    x = gl.permute(gl.reshape(x, [64, PARTS, PART]), (1, 0, 2))
    tiles._reinterpret(tiles.dtype, [PARTS, 64, PART], NARROW4).store(x)


@gluon.jit
def parts_of(tiles):
    """What ``put_parts`` was given."""
    x = tiles._reinterpret(tiles.dtype, [PARTS, 64, PART], NARROW4).load(PARTED)
    return gl.convert_layout(gl.reshape(gl.permute(x, (1, 0, 2)), [64, 128]), WIDE)


@gluon.jit
def part_of(tiles, part):
    x = tiles.index(part).load(FLAT)
    if tiles.dtype == gl.bfloat16:
        x = widened(x)
    return x.to(gl.float32)
