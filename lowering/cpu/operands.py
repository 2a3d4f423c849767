"""How the C kernels are told of tensors: ``struct operand`` of ``operands.c``, without the address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.bool: 4}
FIELDS = 6
"""Of an operand: its address, what an element is, and four strides."""
NOTHING = (0,) * FIELDS


def described(x: Tensor | None) -> tuple[int, ...]:
    """The fields of a tensor, room for its address first; all 0 without one."""
    return NOTHING if x is None else laid_out(x.dtype, x.stride())


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def addresses_of(operands: Iterable[Tensor | None]) -> list[int]:
    return [address(x) for x in operands]


def laid_out(dtype: torch.dtype, strides: Sequence[int]) -> tuple[int, ...]:
    return (0, KINDS[dtype], *strides, *(0,) * (4 - len(strides)))


def contiguous(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps; ``order``: the dimensions from the outermost to the innermost, as they are by default."""
    strides, step = [1] * len(shape), 1
    for at in reversed(range(len(shape)) if order is None else order):
        strides[at], step = step, step * shape[at]
    return tuple(strides)


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may lie in one place, going by the strides."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
