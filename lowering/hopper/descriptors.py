"""Tensors as Hopper's copy engine addresses them."""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from ..scratch import Scratch
from .schedules import WIDTHS


def aligned(x: Tensor) -> bool:
    """Whether the copy engine can address x: rows that lie together, everything else in steps of 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)


def addressed(x: Tensor, scratch: Scratch) -> Tensor:
    """x, or a copy of it that the copy engine can address."""
    return x if aligned(x) else scratch.copied(x)


def described(x: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor for the copy engine; the stride of a dimension of size 1 is free, and made a legal one."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [s if n > 1 else WIDTHS[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(8 * x.element_size(), x.dim()))


def line(x: Tensor, length: int) -> Any:
    """A descriptor of ``length`` numbers in a row, not swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [1], [length], NVMMASharedLayout(0, 8 * x.element_size(), 1))


@cache
def _layout(bits: int, dimensions: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(128, bits, dimensions)
