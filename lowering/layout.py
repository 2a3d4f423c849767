"""Between the caller's tensors and tiles: chunking, padding, grouped heads and packed sequences.

Every per-step tile of a program lives in one *flat* tensor ``[steps * lanes, rows, cols]``, steps outermost, so that
work free of the carry is one batched call over all of it and a scan step is a contiguous slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .errors import ArgumentError


@dataclass(frozen=True)
class Layout:
    """How tokens are cut into steps.

    ``segments`` are the step ranges of the sequences; ``positions`` is where tokens go if packed sequences leave gaps.
    """

    batch: int
    length: int
    heads: int
    chunk: int
    steps: int
    segments: tuple[tuple[int, int], ...]
    positions: Tensor | None = None

    @property
    def lanes(self) -> int:
        return self.batch * self.heads


def dense_layout(batch: int, length: int, heads: int, chunk: int) -> Layout:
    """One sequence per batch entry, all of the same length."""
    steps = -(-length // chunk)
    return Layout(batch, length, heads, chunk, steps, ((0, steps),))


def sequence_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    """The bounds of packed sequences, checked."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("cu_seqlens must be a vector of int32 or int64 with at least one entry")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(end < start for start, end in pairwise(bounds)):
        raise ArgumentError(f"cu_seqlens must rise from 0 to the number of tokens ({length}), got {bounds}")
    return bounds


def packed_layout(cu_seqlens: Tensor, length: int, heads: int, chunk: int) -> Layout:
    """Sequences back to back in one batch entry; each starts on a chunk of its own."""
    bounds = sequence_bounds(cu_seqlens, length)
    lengths = [end - start for start, end in pairwise(bounds)]
    counts = [-(-n // chunk) for n in lengths]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    segments = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    steps = ends[-1] if ends else 0
    if all(n % chunk == 0 for n in lengths[:-1]):
        return Layout(1, length, heads, chunk, steps, segments)  # no gaps between sequences
    device = cu_seqlens.device
    shift = torch.tensor([lo * chunk - start for (lo, _), start in zip(segments, bounds, strict=False)], device=device)
    shift = shift.repeat_interleave(torch.tensor(lengths, device=device), output_size=length)
    return Layout(1, length, heads, chunk, steps, segments, torch.arange(length, device=device) + shift)


def tokens_to_tiles(x: Tensor, layout: Layout, *, fill: float, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, D]`` to ``[steps * lanes, chunk, D]``."""
    if layout.positions is not None:
        padded = x.new_full((1, layout.steps * layout.chunk, *x.shape[2:]), fill)
        x = padded.index_copy(1, layout.positions, x)
    x = x.to(dtype)
    missing = layout.steps * layout.chunk - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing), value=fill)
    tiles = x.unflatten(1, (layout.steps, layout.chunk)).permute(1, 0, 3, 2, 4)
    if x.shape[2] != layout.heads:
        tiles = tiles.repeat_interleave(layout.heads // x.shape[2], dim=2)
    return tiles.reshape(layout.steps * layout.lanes, layout.chunk, x.shape[3]).contiguous()


def tiles_to_tokens(tiles: Tensor, layout: Layout) -> Tensor:
    """``[steps * lanes, chunk, D]`` back to a contiguous ``[B, T, H, D]``, in memory without the padding."""
    steps = tiles.view(layout.steps, layout.batch, layout.heads, layout.chunk, tiles.shape[-1]).permute(1, 0, 3, 2, 4)
    x = steps.reshape(layout.batch, layout.steps * layout.chunk, layout.heads, tiles.shape[-1])
    if layout.positions is not None:
        return x.index_select(1, layout.positions)
    whole = x.shape[1] == layout.length
    return x.contiguous() if whole else x[:, : layout.length].clone(memory_format=torch.contiguous_format)
