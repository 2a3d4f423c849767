"""Tiles in memory: typed, strided views of byte buffers, bounds-checked where they are accessed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes  # pyright: ignore[reportMissingImports]
import numpy as np
from numpy.typing import NDArray

from .parse import UnsupportedError


class BoundsError(IndexError):
    """An access outside its buffer."""


Bytes = NDArray[np.uint8]
Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "i1": np.dtype(np.bool_),  # bit-packed in memory
}
BOOL = DTYPES["i1"]
DYNAMIC = -(2**63)
_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+?)(?:,.*)?>$")


def memref_type(text: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Sizes (-1 where dynamic) and element type of a memref type."""
    found = _MEMREF.match(text)
    if found is None or found.group(2) not in DTYPES:
        raise UnsupportedError(f"type {text[:100]}")
    sizes = tuple(-1 if word == "?" else int(word) for word in found.group(1).split("x") if word)
    return sizes, DTYPES[found.group(2)]


def contiguous(sizes: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides: list[int] = []
    for size in reversed(sizes):
        strides.append(item)
        item *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class View:
    """A memref: nothing is read or checked before ``read`` or ``write``.

    Offset and strides are in bytes. Bit masks are packed: their strides count bits, and they lie without gaps from a
    whole byte on.
    """

    buffer: Bytes
    dtype: np.dtype[Any]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def array(self) -> Array:
        """The elements in place; raises if any lies outside the buffer."""
        if self.dtype == BOOL:
            raise UnsupportedError("a bit mask has no elements in place")
        if 0 in self.sizes:
            return np.empty(self.sizes, self.dtype)
        try:
            return np.ndarray(self.sizes, self.dtype, self.buffer, self.offset, self.strides)
        except ValueError as error:
            place = f"{self.sizes} by {self.strides} bytes from {self.offset} in a buffer of {self.buffer.size} bytes"
            raise BoundsError(f"{self.dtype}: {place}") from error

    def read(self) -> Array:
        if self.dtype != BOOL:
            return self.array
        count = math.prod(self.sizes)
        packed = self.buffer[self.offset : self.offset + -(-count // 8)]
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_).reshape(self.sizes)

    def write(self, values: Any) -> None:
        if self.dtype != BOOL:
            self.array[...] = values
            return
        packed = np.packbits(np.broadcast_to(values, self.sizes), bitorder="little")
        self.buffer[self.offset : self.offset + packed.size] = packed

    def element(self, index: list[int]) -> View:
        """One element, as a view."""
        shift = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        return View(self.buffer, self.dtype, self.offset + shift, (1,), (self.dtype.itemsize,))

    def subview(self, offsets: list[int], sizes: list[int], strides: list[int], rank: int) -> View:
        """A part of this view; dimensions of size 1 are dropped from the left down to ``rank``."""
        shift = sum(o * s for o, s in zip(offsets, self.strides, strict=True))
        if self.dtype == BOOL:
            wanted = contiguous(tuple(sizes), 1)
            gaps = any(n > 1 and a != b for n, a, b in zip(sizes, self.strides, wanted, strict=True))
            if gaps or shift % 8:
                raise UnsupportedError("part of a bit mask with gaps or inside a byte")
            shift //= 8
        start = self.offset + shift
        kept = [(n, a * b) for n, a, b in zip(sizes, strides, self.strides, strict=True)]
        for i in range(len(kept) - 1, -1, -1):
            if len(kept) > rank and kept[i][0] == 1:
                del kept[i]
        return View(self.buffer, self.dtype, start, tuple(n for n, _ in kept), tuple(s for _, s in kept))

    def collapse(self, groups: list[list[int]]) -> View:
        sizes = tuple(math.prod(self.sizes[i] for i in group) for group in groups)
        if self.dtype == BOOL:
            return replace(self, sizes=sizes, strides=contiguous(sizes, 1))
        strides: list[int] = []
        for group in groups:
            real = [i for i in group if self.sizes[i] != 1] or group[-1:]
            for i, j in pairwise(real):
                if self.strides[i] != self.sizes[j] * self.strides[j]:
                    raise UnsupportedError("collapse of dimensions that are not adjacent in memory")
            strides.append(self.strides[real[-1]])
        return replace(self, sizes=sizes, strides=tuple(strides))

    def expand(self, groups: list[list[int]], sizes: list[int]) -> View:
        strides: list[int] = []
        for group, stride in zip(groups, self.strides, strict=True):
            strides += contiguous(tuple(sizes[i] for i in group), stride)
        return replace(self, sizes=tuple(sizes), strides=tuple(strides))


def flat_view(array: Array) -> View:
    """A kernel argument."""
    return View(array.view(np.uint8), array.dtype, 0, array.shape, contiguous(array.shape, array.itemsize))
