"""Split-KV on the device: requests of different lengths cut into work items of equal size, and their results merged.

A work item is a row of a table: request (-1: none), first block, block after its last, slot of its partial result (-1:
it is the whole request, and its program writes the result). No length is read on the host.

CHAINED kernels (from Hopper on) are launched while the one before still runs, and wait where they need its results.
"""

# pyright: basic, reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEVELS: tl.constexpr = tl.constexpr(16)  # of sizes that items are ordered by
MANY: tl.constexpr = tl.constexpr(8)  # partial results that are merged at once where there are that many


@triton.jit
def schedule(
    lengths, items, B, WIDTH, WORKERS, ITEMS,
    BP: tl.constexpr, PP: tl.constexpr, WP: tl.constexpr, LOG_B: tl.constexpr, BLOCK: tl.constexpr,
    OVERHEAD: tl.constexpr, PARTIAL: tl.constexpr, SHORT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program. lengths ``[B]``; items ``[ITEMS + B, 4]``: the table, then the plan: of each request that is cut its
    first slot, the number of its parts and which it is; the first row's last number is how many are.

    Four cuts are weighed: *whole*, where only requests longer than a worker's share are cut (evenly), *even*, where
    every request is cut into as many parts as there are workers for it, *rest*, where every worker has as many whole
    requests and those left over are cut for all of them, and *ranges*, where the requests in a row are cut into shares
    of equal work, however a request lies across them. The first leaves the fewest partial results, the second the
    shortest parts, the last the last round full, with two partial results a worker.
    """
    if CHAINED:
        gdc_launch_dependents()
    b = tl.arange(0, BP)
    real = b < B
    length = tl.minimum(tl.maximum(tl.load(lengths + b, mask=real, other=0).to(tl.int32), 0), WIDTH)
    blocks = (length + BLOCK - 1) // BLOCK
    total = tl.sum(blocks, 0)
    # whole; a little more than a share is not worth a cut
    share = tl.maximum((total + WORKERS - 1) // WORKERS, 1)
    parts = tl.where(real, tl.maximum((blocks - OVERHEAD - PARTIAL + share - 1) // share, 1), 0)
    cost = _cost(blocks, parts, total, WORKERS, OVERHEAD, PARTIAL)
    even = (blocks.to(tl.int64) * WORKERS // tl.maximum(total, 1)).to(tl.int32)
    even = tl.where(real, tl.maximum(even, 1), 0)
    even_cost = _cost(blocks, even, total, WORKERS, OVERHEAD, PARTIAL)
    if even_cost < cost:
        parts = even
        cost = even_cost
    rounds, over = B // WORKERS, B % WORKERS
    longest = tl.max(blocks, 0)
    pieces = tl.minimum(WORKERS // tl.maximum(over, 1), longest // SHORT)
    piece = (longest + pieces - 1) // tl.maximum(pieces, 1)
    rest_cost = rounds * (longest + OVERHEAD) + piece + OVERHEAD + PARTIAL
    if (rounds > 0) & (over > 0) & (pieces > 1) & (rest_cost < cost):
        parts = tl.where(real, tl.where(b < B - over, 1, pieces), 0)
        cost = rest_cost
    step = tl.maximum((blocks + parts - 1) // tl.maximum(parts, 1), 1)
    parts = tl.where(real, tl.maximum((blocks + step - 1) // step, 1), 0)  # none of them empty
    offset = tl.zeros([BP], tl.int32)
    worker = tl.full([BP], -1, tl.int32)
    # ranges: request b lies at [start, start + OVERHEAD + blocks) and is cut at multiples of the share
    work = tl.where(real, blocks + OVERHEAD, 0)
    start = tl.cumsum(work, 0) - work + OVERHEAD
    range_share = (tl.sum(work, 0) + WORKERS - 1) // WORKERS
    if range_share + OVERHEAD + 2 * PARTIAL < cost:
        first = (start + OVERHEAD + range_share - 1) // range_share  # no cut closer to an end than OVERHEAD blocks
        last = (start + blocks - OVERHEAD) // range_share
        parts = tl.where(real, tl.maximum(last - first + 1, 0) + 1, 0)
        worker = first - 1
        offset = worker * range_share - start
        step = tl.full([BP], 0, tl.int32) + range_share
    slot = tl.cumsum(parts, 0) - parts
    is_cut = (parts > 1).to(tl.int32)
    plan = items + (ITEMS + tl.cumsum(is_cut, 0) - is_cut) * 4
    tl.store(plan, slot, mask=parts > 1)
    tl.store(plan + 1, parts, mask=parts > 1)
    tl.store(plan + 2, b, mask=parts > 1)
    tl.store(items + ITEMS * 4 + 3, tl.sum(is_cut, 0))
    _items(items, slot, parts, offset, step, blocks, worker, B, WORKERS, ITEMS, PP, WP, LOG_B)


@triton.jit
def _cost(blocks, parts, total, WORKERS, OVERHEAD: tl.constexpr, PARTIAL: tl.constexpr):
    """Of requests cut evenly, in blocks of a worker's time."""
    step = tl.maximum((blocks + parts - 1) // tl.maximum(parts, 1), 1)
    count = tl.sum(parts, 0)
    rounds = (count + WORKERS - 1) // WORKERS
    cost = tl.maximum(rounds * (total // count + OVERHEAD), tl.max(step, 0) + OVERHEAD)
    return cost + tl.where(tl.max(parts, 0) > 1, PARTIAL, 0)


@triton.jit
def _items(
    items, slot, parts, offset, step, blocks, worker, B, WORKERS, ITEMS,
    PP: tl.constexpr, WP: tl.constexpr, LOG_B: tl.constexpr,
):  # fmt: skip
    """The table of items, the longest first: a long item that starts last would keep all others waiting."""
    item = tl.arange(0, PP)
    count = tl.sum(parts, 0)
    real = item < count
    request = tl.zeros([PP], tl.int32)
    for level in tl.static_range(LOG_B):  # the last request whose first slot is not beyond this item
        further = request + (1 << (LOG_B - 1 - level))
        there = tl.gather(slot, tl.minimum(further, B - 1), 0)
        request = tl.where((further < B) & (there <= item), further, request)
    part = item - tl.gather(slot, request, 0)
    parts = tl.gather(parts, request, 0)
    offset = tl.gather(offset, request, 0)
    step = tl.gather(step, request, 0)
    blocks = tl.gather(blocks, request, 0)
    low = tl.where(part == 0, 0, tl.minimum(offset + part * step, blocks))
    high = tl.where(part == parts - 1, blocks, tl.minimum(offset + (part + 1) * step, blocks))
    place = item
    size = tl.where(real, high - low, 0)
    shortest = tl.min(tl.where(real, size, 0x7FFFFFFF), 0)
    if (count > WORKERS) & (tl.max(size, 0) > shortest):  # else all start at once, or none is longer
        place = _by_size(size, real, item, PP)
    if WP > 0:
        first = tl.gather(worker, request, 0)
        place = _by_worker(items + (ITEMS + B) * 4, first, part, place, real, item, WORKERS, WP)
    row = items + place * 4
    inside = place < ITEMS
    tl.store(row, tl.where(real, request, -1), mask=inside)
    tl.store(row + 1, low, mask=inside)
    tl.store(row + 2, high, mask=inside)
    tl.store(row + 3, tl.where(parts > 1, item, -1), mask=inside)


@triton.jit
def _by_worker(starts, first, part, rank, real, item, WORKERS, WP: tl.constexpr):
    """The place of each item where those of a worker lie together, and the first of each worker.

    ``first``: the worker of a request's first part, the next have the others; -1: by rank, there and back.
    """
    turn = rank // WORKERS
    worker = rank % WORKERS
    worker = tl.where(turn % 2 == 0, worker, WORKERS - 1 - worker)
    worker = tl.where(first >= 0, tl.minimum(first + part, WORKERS - 1), worker)
    worker = tl.where(real, worker, WORKERS)
    counts = tl.histogram(worker, WP)
    before = tl.cumsum(counts, 0) - counts
    w = tl.arange(0, WP)
    tl.store(starts + w, before, mask=w <= WORKERS)
    return tl.where(real & (first < 0), tl.gather(before, worker, 0) + turn, item)


@triton.jit
def _by_size(size, real, item, PP: tl.constexpr):
    """The place of each item when they are ordered by size, in levels; places without an item keep theirs."""
    level = LEVELS - 1 - size * (LEVELS - 1) // tl.maximum(tl.max(size, 0), 1)
    level = tl.where(real, level, LEVELS - 1)
    same = (tl.arange(0, LEVELS)[:, None] == level[None, :]).to(tl.int32)
    counts = tl.sum(same, 1)
    before = tl.sum(same * (tl.cumsum(counts, 0) - counts)[:, None], 0)
    place = before + tl.sum(same * (tl.cumsum(same, 1) - same), 0)
    return tl.where(real, place, item)


@triton.jit
def combine(
    part_o, part_lse, o, lse, sinks, plan, T, H, ROWS, SPLITS,
    R: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, SCHEDULED: tl.constexpr, HAS_SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Rows of a request, BC columns at a time: ``o = sum_i exp(lse_i - lse) o_i`` and ``lse = log sum_i exp lse_i``.

    Grid: programs that share the rows, blocks of columns, requests (SCHEDULED: 1, programs share the rows of all that
    are cut). part_o ``[slots, ROWS, R]`` and part_lse ``[slots, ROWS]``, fp32; row ``t * H + h``. A partial result
    whose lse is -inf was not written.
    """
    if CHAINED:
        gdc_wait()
    rows = ROWS
    if SCHEDULED:
        rows = ROWS * tl.load(plan + 3)
    for work in range(tl.program_id(0), rows, tl.num_programs(0)):
        request = tl.program_id(2)
        first, parts, row = request * SPLITS, SPLITS, work
        if SCHEDULED:
            own = plan + work // ROWS * 4
            first, parts, request = tl.load(own), tl.load(own + 1), tl.load(own + 2)
            row = work % ROWS
        request, first = tl.cast(request, tl.int64), tl.cast(first, tl.int64)
        if SCHEDULED and BS < MANY and parts > BS:
            _combine_row(
                part_o, part_lse, o, lse, sinks, request, first, parts, row, T, H, ROWS, R, BC, MANY, HAS_SINKS
            )
        else:
            _combine_row(part_o, part_lse, o, lse, sinks, request, first, parts, row, T, H, ROWS, R, BC, BS, HAS_SINKS)


@triton.jit
def _combine_row(
    part_o, part_lse, o, lse, sinks, request, first, parts, row, T, H, ROWS,
    R: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([BC], tl.float32)
    for start in range(0, parts, BS):
        part = start + tl.arange(0, BS)
        at = (first + part) * ROWS + row
        x = tl.load(part_lse + at, mask=part < parts, other=float("-inf"))
        written = (x > float("-inf"))[:, None] & (columns < R)[None, :]
        values = tl.load(part_o + at[:, None] * R + columns[None, :], mask=written, other=0.0)
        larger = tl.maximum(m, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(x - base)
        alpha = tl.exp(m - base)
        total = total * alpha + tl.sum(weights, 0)
        acc = acc * alpha + tl.sum(values * weights[:, None], 0)
        m = larger
    result = tl.where(total > 0, m + tl.log(total), float("inf"))
    factor = tl.where(total > 0, 1.0 / total, 0.0)
    if HAS_SINKS:
        factor *= 1.0 / (1.0 + tl.exp(tl.load(sinks + row % H).to(tl.float32) - result))
    tl.store(o + (request * ROWS + row) * R + columns, (acc * factor).to(o.dtype.element_ty), mask=columns < R)
    if tl.program_id(1) == 0:
        tl.store(lse + request * ROWS + (row % H) * T + row // H, result)
