"""Where the chunks of packed sequences are, computed on the device: no length is read on the host."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ..triton.macros import locate_chunk


@triton.jit
def chunk_places(cu_seqlens, chunk_offsets, places, N, T, C: tl.constexpr):
    """places ``[1 + slots, 2]``: first the number of chunks, then of each its first token and its sequence's end.

    A program per slot, those beyond the last chunk are at the end of everything; chunk_offsets ``[N + 1]``: the number
    of chunks before each sequence.
    """
    slot = tl.program_id(0)
    count = tl.load(chunk_offsets + N)
    if slot == 0:
        tl.store(places, count)
    first = tl.zeros([], tl.int64) + T
    last = first
    if slot < count:
        sequence, start, last = locate_chunk(cu_seqlens, chunk_offsets, slot, N, T)
        first = start + (slot - tl.load(chunk_offsets + sequence)) * C
    tl.store(places + 2 * (1 + slot), first.to(tl.int32))
    tl.store(places + 2 * (1 + slot) + 1, last.to(tl.int32))
