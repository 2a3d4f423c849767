"""What the kernels of the backward pass load, and what of it is differentiated where it is loaded.

The gradient of a factor is that of its logarithm divided by it, so that a factor counts as at least FACTOR_FLOOR: one
of 0 has a gradient, too. What that lets through, 1e-12 of the state, does not show in fp32.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .macros import gate_slopes, locate_chunk

FACTOR_FLOOR: tl.constexpr = tl.constexpr(1e-12)


@triton.jit
def chunk_place(chunk, cu_seqlens, chunk_offsets, N, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Of a chunk: its batch entry, its first token, and where its sequence ends."""
    if PACKED:
        sequence, start, end = locate_chunk(cu_seqlens, chunk_offsets, chunk, N, T)
        first = start + (chunk - tl.load(chunk_offsets + sequence)) * C
        batch = chunk * 0
    else:
        chunks = (T + C - 1) // C
        batch = chunk // chunks
        first = (chunk - batch * chunks) * C
        end = first * 0 + T
    return batch, first, end


@triton.jit
def load_rows(base, t, live, st, d, sd, width):
    """A tile [C, columns] of a tensor's tokens; zeros where there is no token or column."""
    return tl.load(base + t * st + d * sd, mask=live & (d < width), other=0.0)


@triton.jit
def gate_floor(x, FN: tl.constexpr):
    """A factor not below its floor; other gates as they are."""
    if FN == "factor":
        x = tl.where(x < FACTOR_FLOOR, FACTOR_FLOOR, x)
    return x


@triton.jit
def gate_gradient(x, rate, dlog, FN: tl.constexpr, gate_scale):
    """The gradients of x and of A_log from that of the log gate; 0 of a saturated gate, whatever its slope."""
    by_x, by_rate = gate_slopes(gate_floor(x, FN), rate, FN, gate_scale)
    dx = tl.where(dlog == 0.0, 0.0, dlog * by_x)
    if FN == "sigmoid":  # by_rate is x by_x: with a chain of its own, in another layout, all of it were computed twice
        drate = x * dx
    else:
        drate = tl.where(dlog == 0.0, 0.0, dlog * by_rate)
    return dx, drate
