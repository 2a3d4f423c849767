"""The loads of a program's ports as Triton functions that emitted kernels call."""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .decays import exp

# exp() of this is exactly 0, and 64 of them still fit fp16's range of sums; a stronger log gate is the same gate.
LOG_FLOOR: tl.constexpr = tl.constexpr(-512.0)


@triton.jit
def l2norm_vector(x, eps):
    """x * rsqrt(sum(x * x) + eps)."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp x), linear where exp x would swallow the 1."""
    return tl.where(x > 20.0, x, tl.log(1.0 + exp(tl.minimum(x, 20.0))))


@triton.jit
def log_gate(x, rate, FN: tl.constexpr, gate_scale):
    """The log decay that x (dt_bias added) stands for; ``rate`` is exp(A_log)."""
    if FN == "softplus":
        x = -rate * softplus(x)
    elif FN == "sigmoid":
        x = gate_scale * sigmoid(rate * x)
    elif FN == "logsigmoid":
        x = gate_scale * (tl.minimum(x, 0.0) - tl.log(1.0 + exp(-tl.abs(x))))
    elif FN == "factor":
        x = tl.log(x)
    else:
        tl.static_assert(FN == "log")
    return tl.where(x < LOG_FLOOR, LOG_FLOOR, x)


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
