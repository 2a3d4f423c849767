"""The loads of a program's ports as Triton functions that emitted kernels call."""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .activations import sigmoid as sigmoid  # emitted kernels import it from here
from .gates import source
from .load import load_source

_generated = load_source("gates", source())
LOG_FLOOR, log_gate, gate_slopes = _generated.LOG_FLOOR, _generated.log_gate, _generated.gate_slopes


@triton.jit
def l2norm_vector(x, eps):
    """x * rsqrt(sum(x * x) + eps)."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def locate_chunk(cu_seqlens, chunk_offsets, chunk, N, T):
    """Packed sequences: which one a chunk belongs to, where its tokens start and end (clamped into [0, T])."""
    sequence = 0
    for first in range(0, N, 128):
        i = first + tl.arange(0, 128)
        ends = tl.load(chunk_offsets + 1 + i, mask=i < N, other=2147483647)
        sequence += tl.sum((ends <= chunk).to(tl.int32), 0)
    sequence = tl.minimum(sequence, N - 1)
    start = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), T)
    return sequence, start, end


@triton.jit
def chunk_offsets_kernel(cu_seqlens, chunk_offsets, N, C: tl.constexpr):
    """chunk_offsets[n] = chunks of the sequences before n; one program."""
    total = 0
    tl.store(chunk_offsets, total)
    for first in range(0, N, 128):
        i = first + tl.arange(0, 128)
        start = tl.load(cu_seqlens + i, mask=i < N, other=0).to(tl.int32)
        end = tl.load(cu_seqlens + i + 1, mask=i < N, other=0).to(tl.int32)
        ends = total + tl.cumsum((tl.maximum(end - start, 0) + C - 1) // C, 0)
        tl.store(chunk_offsets + 1 + i, ends, mask=i < N)
        total = tl.max(ends, 0)
