"""Triton helpers of the emitted Ascend kernels. Their text is copied into every module that uses them.

Written for the rules of the target: addresses are block pointers built where they are used, row numbers are compared as
fp32 (integer comparisons run one by one), masks select, and the left operand of a product is not read again.

A *tile* buffer holds one contiguous tile ``[ROWS, WIDTH]`` per ``at``; a *token* tensor is ``[tokens, HEADS, WIDTH]``,
of which ``rows`` tokens from ``token`` on exist; a *gate* tensor is ``[HEADS, tokens]``.
"""

# ruff: noqa: ANN001, ANN201
# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportUntypedFunctionDecorator=false

import triton
import triton.language as tl

# ---- addresses


@triton.jit
def tile_at(ptr, at, column, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    base = ptr + at.to(tl.int64) * (ROWS * WIDTH)
    return tl.make_block_ptr(base, (ROWS, WIDTH), (WIDTH, 1), (0, column), (ROWS, COLS), (1, 0))


@triton.jit
def turned_at(ptr, at, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    base = ptr + at.to(tl.int64) * (ROWS * WIDTH)
    return tl.make_block_ptr(base, (WIDTH, ROWS), (1, WIDTH), (0, 0), (WIDTH, ROWS), (0, 1))


@triton.jit
def vector_at(ptr, at, N: tl.constexpr):
    return tl.make_block_ptr(ptr + at.to(tl.int64) * N, (N,), (1,), (0,), (N,), (0,))


@triton.jit
def part_at(ptr, at, column, N: tl.constexpr, PART: tl.constexpr):
    return tl.make_block_ptr(ptr + at.to(tl.int64) * N, (N,), (1,), (column,), (PART,), (0,))


@triton.jit
def tokens_at(
    ptr, token, head, rows, column, HEADS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr
):
    base = ptr + (token.to(tl.int64) * HEADS + head) * WIDTH
    return tl.make_block_ptr(base, (rows, WIDTH), (HEADS * WIDTH, 1), (0, column), (ROWS, COLS), (1, 0))


@triton.jit
def gates_at(ptr, token, head, rows, tokens, ROWS: tl.constexpr):
    base = ptr + head.to(tl.int64) * tokens + token
    return tl.make_block_ptr(base, (rows,), (1,), (0,), (ROWS,), (0,))


@triton.jit
def load_one(ptr, at, N: tl.constexpr):
    """One number, as a vector of N: a scalar would be computed on by a third unit."""
    one = tl.load(tl.make_block_ptr(ptr + at, (1,), (1,), (0,), (1,), (0,)))
    return tl.broadcast_to(one.to(tl.float32), (N,))


@triton.jit
def heads_at(ptr, row, head, HEADS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    base = ptr + (row.to(tl.int64) * HEADS + head) * WIDTH
    return tl.make_block_ptr(base, (HEADS - head, WIDTH), (WIDTH, 1), (0, 0), (TILE, WIDTH), (1, 0))


@triton.jit
def numbers_at(ptr, row, head, HEADS: tl.constexpr, TILE: tl.constexpr):
    base = ptr + row.to(tl.int64) * HEADS + head
    return tl.make_block_ptr(base, (HEADS - head,), (1,), (0,), (TILE,), (0,))


@triton.jit
def load_heads(ptr, row, head, HEADS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of heads of ``[rows, HEADS, WIDTH]``; heads that do not exist read as 0."""
    return tl.load(heads_at(ptr, row, head, HEADS, TILE, WIDTH), boundary_check=(0,))


@triton.jit
def store_heads(ptr, row, head, value, HEADS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(heads_at(ptr, row, head, HEADS, TILE, WIDTH), value, boundary_check=(0,))


@triton.jit
def load_numbers(ptr, row, head, HEADS: tl.constexpr, TILE: tl.constexpr):
    """One number a head, of ``[rows, HEADS]``."""
    return tl.load(numbers_at(ptr, row, head, HEADS, TILE), boundary_check=(0,))


@triton.jit
def store_numbers(ptr, row, head, value, HEADS: tl.constexpr, TILE: tl.constexpr):
    tl.store(numbers_at(ptr, row, head, HEADS, TILE), value, boundary_check=(0,))


@triton.jit
def load_block(ptr, page, first, rows, stride, ROW: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The ``rows`` tokens that exist, from the ``first`` of a page on; pages are ``stride`` apart and tokens ROW."""
    base = ptr + page.to(tl.int64) * stride + first * ROW
    block = tl.make_block_ptr(base, (rows, WIDTH), (ROW, 1), (0, 0), (ROWS, WIDTH), (1, 0))
    return tl.load(block, boundary_check=(0,))


# ---- softmax


@triton.jit
def lowest(N: tl.constexpr):
    """No score is lower, and it is finite: the difference of two is no NaN."""
    return tl.full([N], -3.4028234663852886e38, tl.float32)


@triton.jit
def hidden_after(rows, C: tl.constexpr):
    """[C]: 0 for the first ``rows`` tokens, and -inf for others."""
    return tl.where(tl.arange(0, C).to(tl.float32) < rows.to(tl.float32), 0.0, float("-inf"))


@triton.jit
def load_mask(ptr, at, position, width, C: tl.constexpr):
    """[C]: what is added to the scores of the tokens from ``position`` on, of a row of ``width`` that begins at ``at``;
    0 for those that do not exist."""
    base = ptr + at.to(tl.int64) + position
    return tl.load(tl.make_block_ptr(base, (width - position,), (1,), (0,), (C,), (0,)), boundary_check=(0,))


@triton.jit
def load_masks(ptr, at, position, width, stride, head, HEADS: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr):
    """[TILE, C]: the same of the heads from ``head`` on, ``stride`` apart; 0 for those that do not exist."""
    base = ptr + at.to(tl.int64) + position
    block = tl.make_block_ptr(base, (HEADS - head, width - position), (stride, 1), (0, 0), (TILE, C), (1, 0))
    return tl.load(block, boundary_check=(0, 1))


@triton.jit
def divided(acc, total):
    """acc / total by rows; 0 where nothing was added."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def log_of_sum(largest, total):
    """The logarithm of the sum of all exponentials; +inf where there were none."""
    return tl.where(total > 0.0, largest + tl.log(tl.where(total > 0.0, total, 1.0)), float("inf"))


# ---- gates


@triton.jit
def exists(rows, N: tl.constexpr):
    """[N]: which of the tokens from here on are among the ``rows`` that there are."""
    return tl.arange(0, N).to(tl.float32) < rows.to(tl.float32)


@triton.jit
def floor_gate(g):
    """exp(-110) is an exact fp32 zero: a stronger gate is the same gate, and sums of gates stay finite."""
    return tl.where(g < -110.0, -110.0, g)


@triton.jit
def after(C: tl.constexpr):
    """[C, C]: row comes after column."""
    i = tl.arange(0, C).to(tl.float32)
    return i[:, None] > i[None, :]


@triton.jit
def lower(x, C: tl.constexpr, STRICT: tl.constexpr):
    i = tl.arange(0, C).to(tl.float32)
    if STRICT:
        return tl.where(i[:, None] > i[None, :], x, 0.0)
    else:
        return tl.where(i[:, None] >= i[None, :], x, 0.0)


@triton.jit
def rest_sum(g, C: tl.constexpr):
    """Sums over the tokens after each one."""
    return tl.sum(tl.where(after(C), g[:, None], 0.0), 0)


@triton.jit
def column_sum(g, C: tl.constexpr, N: tl.constexpr):
    """The sum of all, N times: one number would be a scalar, which the compiler sends to both units."""
    return tl.sum(tl.broadcast_to(g[:, None], (C, N)), 0)


@triton.jit
def row_products(x_ptr, y_ptr, at, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """[K]: sums over V of two tiles' products, BV columns at a time."""
    total = tl.zeros([K], tl.float32)
    for column in range(0, V, BV):
        x = tl.load(tile_at(x_ptr, at, column, K, V, BV)).to(tl.float32)
        total += tl.sum(x * tl.load(tile_at(y_ptr, at, column, K, V, BV)).to(tl.float32), 1)
    return total


@triton.jit
def spread(x, C: tl.constexpr, N: tl.constexpr):
    """C times, a number that comes N times."""
    return tl.reshape(tl.broadcast_to(x[None, :], (C // N, N)), (C,))


@triton.jit
def load_number(ptr, at, HEADS: tl.constexpr, N: tl.constexpr):
    """N times, one of HEADS numbers: where Cube is in the kernel too, ``load_one`` is sent to it."""
    some = tl.load(tl.make_block_ptr(ptr + at, (HEADS - at,), (1,), (0,), (16,), (0,)), boundary_check=(0,))
    first = tl.where(tl.arange(0, 16).to(tl.float32) < 1.0, some, 0.0)
    return spread(column_sum(first, 16, 16), N, 16)


@triton.jit
def store_number(ptr, at, x, K: tl.constexpr, N: tl.constexpr):
    """K times, a number that comes N times."""
    tl.store(tile_at(ptr, at, 0, K // N, N, N), tl.broadcast_to(x[None, :], (K // N, N)))


@triton.jit
def token_decays(g, C: tl.constexpr):
    """[C, C]: exp of the sum of the gates after column's token up to row's, for row after column; 1 elsewhere.

    As differences of prefix sums, which go by elements, so that the compiler can split the rows. They are of two parts,
    so that strong gates cancel exactly: multiples of 2^-11, of which C floored gates sum to less than 2^13, and what is
    left, below 2^-12 a gate.
    """
    coarse = (g + 6144.0) - 6144.0
    large, small = tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)
    between = (large[:, None] - large[None, :]) + (small[:, None] - small[None, :])
    return tl.exp(tl.where(after(C), between, 0.0))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)). With masks: |x| and the maximum of a number that was spread are left to a scalar unit."""
    return tl.where(x > 0.0, x, 0.0) + tl.log(1.0 + tl.exp(tl.where(x > 0.0, -x, x)))


@triton.jit
def logsigmoid(x):
    return -softplus(-x)


@triton.jit
def row_rates(x, eps):
    """1 / sqrt(sum(x * x) + eps) by rows, for what is not 0."""
    squares = tl.sum(x * x, 1)
    return tl.where(squares > 0.0, 1.0 / tl.sqrt(squares + eps), 0.0)


@triton.jit
def l2norm(x, eps, K: tl.constexpr):
    """x / sqrt(sum(x * x) + eps) of a vector; the sum comes 16 times, see column_sum."""
    length = tl.sqrt(column_sum(x * x, K, 16) + eps)
    return tl.reshape(tl.reshape(x, (K // 16, 16)) / length[None, :], (K,))


# ---- matrices of a chunk


@triton.jit
def same_block(C: tl.constexpr, SIZE: tl.constexpr):
    """[C, C]: row and column are in the same block of SIZE tokens."""
    block = (tl.arange(0, C) // SIZE).to(tl.float32)
    return block[:, None] == block[None, :]


@triton.jit
def below_diagonal(C: tl.constexpr, HALF: tl.constexpr):
    """[C, C]: row in the second half, column in the first half of the same block of 2 HALF tokens."""
    half = (tl.arange(0, C) // HALF).to(tl.float32)
    pair = (tl.arange(0, C) // (2 * HALF)).to(tl.float32)
    return (half[:, None] > half[None, :]) & (pair[:, None] == pair[None, :])


@triton.jit
def block_at(ptr, at, row, column, C: tl.constexpr, N: tl.constexpr):
    """N rows and columns of a [C, C] tile."""
    base = ptr + at.to(tl.int64) * (C * C)
    return tl.make_block_ptr(base, (C, C), (C, 1), (row, column), (N, N), (1, 0))


@triton.jit
def ones_on_diagonal(C: tl.constexpr):
    i = tl.arange(0, C).to(tl.float32)
    return tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def inverse_of_blocks(a, elsewhere, C: tl.constexpr, R: tl.constexpr):
    """(I + the strict lower triangle of a)^-1 of every diagonal block of R, by forward substitution, all at once, and
    ``elsewhere`` outside these blocks."""
    N: tl.constexpr = C // R
    inside = same_block(C, R) & after(C)
    blocks = tl.sum(tl.reshape(tl.where(inside, a, 0.0), (C, N, R)), 1)
    blocks = tl.reshape(blocks, (N, R, R))
    r = tl.arange(0, R).to(tl.float32)
    m = tl.broadcast_to(tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :], (N, R, R))
    for i in range(1, R):
        here = (r == i.to(tl.float32))[None, :, None]
        row = tl.sum(tl.where(here, blocks, 0.0), 1)
        m = m - tl.where(here, tl.sum(row[:, :, None] * m, 1)[:, None, :], 0.0)
    m = tl.broadcast_to(tl.reshape(m, (C, 1, R)), (C, N, R))
    return tl.where(same_block(C, R), tl.reshape(m, (C, C)), elsewhere)


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr):
    """The same of the whole of a, by blocks twice as large, [[x, 0], [-y l x, y]], with two products a level and Vec in
    between: where units meet on chip."""
    m = inverse_of_blocks(a, 0.0, C, R)
    for level in tl.static_range(LEVELS):
        part = tl.where(below_diagonal(C, R << level), a, 0.0)
        x = tl.dot(m + 0.0, part, input_precision="ieee")
        m = m - tl.dot(x, m, input_precision="ieee")
    return m


@triton.jit
def join_pair(m_ptr, at, low, C: tl.constexpr, N: tl.constexpr):
    y = tl.load(block_at(m_ptr, at, low + N, low + N, C, N))
    below = tl.load(block_at(m_ptr, at, low + N, low, C, N))
    left = tl.dot(y, below, input_precision="ieee")
    x = tl.load(block_at(m_ptr, at, low, low, C, N))
    tl.store(block_at(m_ptr, at, low + N, low, C, N), tl.dot(left, x, input_precision="ieee"))


@triton.jit
def join_blocks(m_ptr, at, C: tl.constexpr, R: tl.constexpr, LEVELS: tl.constexpr):
    """From inverted diagonal blocks of R to those of C, in place: [[x, 0], [y l x, y]] of neighbours x and y and of
    what is below the diagonal between them, l, negated, which lies where y l x comes. All on Cube, which need not wait
    for Vec in between."""
    for level in tl.static_range(LEVELS):
        for pair in tl.static_range(C // (2 * (R << level))):
            join_pair(m_ptr, at, 2 * pair * (R << level), C, R << level)
