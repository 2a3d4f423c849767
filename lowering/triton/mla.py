"""Decoding over a latent cache: the rows (queries times heads) of a request against one run of its tokens, a work item.

Absorbed MLA: the latent is key and value, and rope, shared by all heads, is a second part of the key. With a tile of
BM rows, block by block of BN tokens, everything but the operands of products in fp32::

    s = scale (q c^T + q_rope r^T) + mask      m' = max(m, rowmax s)      p = exp(s - m')
    l = l exp(m - m') + rowsum p               acc = acc exp(m - m') + p c

A row of a tile is ``t * H + h``. Tokens past a request's length are neither read nor multiplied, and of the page table
only entries of pages that the request owns are read.
"""

# pyright: basic, reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _page_of(table, token, length, BN: tl.constexpr, PAGE: tl.constexpr):
    """The page of a block's tokens: one where blocks lie within pages, else one for each token."""
    if PAGE % BN == 0:
        page = tl.load(table + token // PAGE)
    else:
        tokens = token + tl.arange(0, BN)
        page = tl.load(table + tokens // PAGE, mask=tokens < length, other=0)
    return page.to(tl.int64)


@triton.jit
def _load_rows(
    x, page, token, length, x_sp,
    STEP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A block of the cache ``[BN, NP]``, columns from N on zero; so is what lies past the length in the LAST block.

    STEP: elements from one token to the next, a constant so that addresses are one base and constants.
    """
    tokens = token + tl.arange(0, BN)
    columns = tl.arange(0, NP)
    if PAGE % BN == 0:
        first = token if PAGE == 0 else token % PAGE
        at = x + (page * x_sp + tl.cast(first, tl.int64) * STEP)
        at = at + (tl.arange(0, BN) * STEP)[:, None] + columns[None, :]
    else:
        at = x + (page * x_sp + (tokens % PAGE) * STEP)[:, None] + columns[None, :]
    if LAST:
        values = tl.load(at, mask=(tokens < length)[:, None] & (columns < N)[None, :], other=0.0)
    elif N < NP:
        values = tl.load(at, mask=(columns < N)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
def _scores(
    m, total, q, q_rope, c, r, token, seen, mask, mask_ss, rows, ROWS, scale,
    BN: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p, ``exp(m - m')``, m' and l of a block. ``seen``: how many tokens each row may see, looked at where EDGE."""
    s = tl.dot(q, tl.trans(c), input_precision=PRECISION) * scale
    if D > 0:
        s += tl.dot(q_rope, tl.trans(r), input_precision=PRECISION) * scale
    tokens = token + tl.arange(0, BN)
    visible = tokens[None, :] < seen[:, None]
    if MASK != "":
        at = mask[:, None] + tokens.to(tl.int64)[None, :] * mask_ss
        read = visible & (rows < ROWS)[:, None]
        if MASK == "bool":
            visible = tl.load(at, mask=read, other=0) != 0
        else:
            s += tl.load(at, mask=read, other=0.0).to(tl.float32)
    if EDGE or MASK != "":
        s = tl.where(visible, s, float("-inf"))
    larger = tl.maximum(m, tl.max(s, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2((s - base[:, None]) * LOG2E)
    alpha = tl.exp2((m - base) * LOG2E)
    total = total * alpha + tl.sum(p, 1)
    return p.to(c.dtype), alpha, larger, total


@triton.jit
def _block(
    acc, m, total, q, q_rope, c, r, token, seen, mask, mask_ss, rows, ROWS, scale,
    BN: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """One block of tokens.

    Where a product feeds another, the compiler gives all warps rows of the first one, and with more warps than 64 rows
    have for wgmma it has half of them repeat the others' scores. APART: behind a branch, always taken, it does not see
    the second product and gives the two warp groups half of the tokens each.
    """
    if APART:
        p, alpha, larger = tl.zeros([q.shape[0], BN], c.dtype), tl.zeros([q.shape[0]], tl.float32), m
        if token >= 0:
            p, alpha, larger, total = _scores(
                m, total, q, q_rope, c, r, token, seen, mask, mask_ss, rows, ROWS, scale, BN, D, MASK, EDGE, PRECISION
            )
    else:
        p, alpha, larger, total = _scores(
            m, total, q, q_rope, c, r, token, seen, mask, mask_ss, rows, ROWS, scale, BN, D, MASK, EDGE, PRECISION
        )
    acc = tl.dot(p, c, acc * alpha[:, None], input_precision=PRECISION)
    return acc, larger, total


@triton.jit
def _blocks(
    acc, m, total, page, q, q_rope, latent, c_sp, rope, r_sp, table, low, high, end, length, seen, mask, mask_ss,
    rows, ROWS, scale, C_STEP: tl.constexpr, R_STEP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    LAST: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """The blocks from low to high; ``page`` is that of the first, and afterwards that of the next before ``end``."""
    for token in tl.range(low, high, BN, num_stages=STAGES):
        c = _load_rows(latent, page, token, length, c_sp, C_STEP, R, RP, BN, PAGE, LAST)
        r = c
        if D > 0:
            r = _load_rows(rope, page, token, length, r_sp, R_STEP, D, DP, BN, PAGE, LAST)
        if PAGE > 0:  # a block ahead of its rows, or the loads could not run ahead
            following = token + BN
            page = _page_of(table, tl.where(following < end, following, token), length, BN, PAGE)
        acc, m, total = _block(
            acc, m, total, q, q_rope, c, r, token, seen, mask, mask_ss, rows, ROWS, scale, BN, D, MASK, CAUSAL or LAST,
            PRECISION, APART,
        )  # fmt: skip
    return acc, m, total, page


@triton.jit
def attend(
    q, q_sb, q_st, q_sh, q_rope, qr_sb, qr_st, qr_sh, latent, c_sp, rope, r_sp, table, table_sb, lengths,
    mask, mask_sb, mask_sh, mask_st, mask_ss, sinks, items, o, lse, part_o, part_lse, scale, T, H, ROWS, WIDTH, SPLITS,
    C_STEP: tl.constexpr, R_STEP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_SINKS: tl.constexpr, SCHEDULED: tl.constexpr,
    PARTIAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BM rows, items. D = 0: no rope; PAGE = 0: no pages, else latent and rope are ``[P, PAGE, ..]``.

    items: the table of ``mla_split``, if SCHEDULED; else program i takes part ``i % SPLITS`` of request
    ``i // SPLITS``. Results go to o ``[B, T, H, R]`` and lse ``[B, H, T]``, or to slots of part_o ``[.., ROWS, R]`` and
    part_lse ``[.., ROWS]`` if PARTIAL (and SCHEDULED says so for this item).
    """
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(1)
    if SCHEDULED:
        request = tl.load(items + item * 4)
        if request < 0:
            return
    else:
        request = item // SPLITS
    length = WIDTH
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + request).to(tl.int32), 0), WIDTH)
    blocks = (length + BLOCK - 1) // BLOCK
    slot = item
    if SCHEDULED:
        low = tl.load(items + item * 4 + 1) * BLOCK
        high = tl.minimum(tl.load(items + item * 4 + 2), blocks) * BLOCK
        slot = tl.load(items + item * 4 + 3)
    else:
        each = (blocks + SPLITS - 1) // SPLITS
        low = (item % SPLITS) * each * BLOCK
        high = low + each * BLOCK
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    t, h = rows // H, rows % H
    seen = tl.zeros([BM], tl.int32) + length
    if CAUSAL:
        seen = length - T + t + 1
        last = tl.minimum(tl.program_id(0) * BM + BM - 1, ROWS - 1) // H
        high = tl.minimum(high, length - T + last + 1)
    high = tl.minimum(high, length)

    batch = request.to(tl.int64)
    inside = (rows < ROWS)[:, None]
    columns, rope_columns = tl.arange(0, RP), tl.arange(0, DP)
    at = q + batch * q_sb + t[:, None].to(tl.int64) * q_st + h[:, None].to(tl.int64) * q_sh
    x = tl.load(at + columns[None, :], mask=inside & (columns < R)[None, :], other=0.0)
    x_rope = x
    if D > 0:
        at = q_rope + batch * qr_sb + t[:, None].to(tl.int64) * qr_st + h[:, None].to(tl.int64) * qr_sh
        x_rope = tl.load(at + rope_columns[None, :], mask=inside & (rope_columns < D)[None, :], other=0.0)
    if MASK != "":
        mask += batch * mask_sb + h.to(tl.int64) * mask_sh + t.to(tl.int64) * mask_st
    table += batch * table_sb

    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, RP], tl.float32)
    page = batch
    if PAGE > 0:
        page = tl.zeros([BN], tl.int64) if PAGE % BN else batch * 0
        if low < high:
            page = _page_of(table, low, length, BN, PAGE)
    whole = low + tl.maximum(high - low, 0) // BN * BN
    acc, m, total, page = _blocks(
        acc, m, total, page, x, x_rope, latent, c_sp, rope, r_sp, table, low, whole, high, length, seen, mask, mask_ss,
        rows, ROWS, scale, C_STEP, R_STEP, R, RP, D, DP, BN, PAGE, MASK, CAUSAL, False, STAGES, PRECISION,
        APART,
    )  # fmt: skip
    acc, m, total, page = _blocks(
        acc, m, total, page, x, x_rope, latent, c_sp, rope, r_sp, table, whole, high, high, length, seen, mask, mask_ss,
        rows, ROWS, scale, C_STEP, R_STEP, R, RP, D, DP, BN, PAGE, MASK, CAUSAL, True, STAGES, PRECISION,
        APART,
    )  # fmt: skip

    sums = m + tl.log(total)
    factor = tl.where(total > 0, 1.0 / total, 0.0)
    out = inside & (columns < R)[None, :]
    if PARTIAL:
        to = slot.to(tl.int64) * ROWS + rows
        kept = (rows < ROWS) & (slot >= 0)
        tl.store(part_lse + to, tl.where(total > 0, sums, float("-inf")), mask=kept)
        written = out & (kept & (total > 0))[:, None]
        tl.store(part_o + to[:, None] * R + columns[None, :], acc * factor[:, None], mask=written)
        out = out & (slot < 0)
    if SCHEDULED or not PARTIAL:
        sums = tl.where(total > 0, sums, float("inf"))
        if HAS_SINKS:
            sink = tl.load(sinks + h, mask=rows < ROWS, other=0.0).to(tl.float32)
            factor *= 1.0 / (1.0 + tl.exp(sink - sums))
        to = batch * ROWS + rows
        tl.store(o + to[:, None] * R + columns[None, :], (acc * factor[:, None]).to(o.dtype.element_ty), mask=out)
        kept = rows < ROWS
        if PARTIAL:
            kept = kept & (slot < 0)
        tl.store(lse + batch * ROWS + h * T + t, sums, mask=kept)
