"""Scratch memory of one execution: where uninitialised buffers come from, so that they are counted and poisoned."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Allocates uninitialised buffers; ``poison`` fills them with NaN or -1, so that a read before a write shows."""

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        self.allocated_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=device)
        if self.poison:
            buffer.fill_(float("nan") if dtype.is_floating_point else -1)
        self.allocated_bytes += buffer.numel() * buffer.element_size()
        return buffer
