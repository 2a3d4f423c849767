"""What one execution asks of a device: launches, and uninitialised buffers, which are counted and poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Allocates uninitialised buffers; ``poison`` fills them with NaN or -1, so that a read before a write shows.
    ``first``: whether no call of this kind was seen before.

    What runs on a device goes through it as well: :mod:`~kdacompile.lowering.recorded` has one that remembers.
    """

    def __init__(self, *, poison: bool = False, first: bool = False) -> None:
        self.poison, self.first = poison, first
        self.allocated_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self.result(shape, dtype, device)
        if self.poison:
            buffer.fill_(float("nan") if dtype.is_floating_point else -1)
        self.allocated_bytes += buffer.numel() * buffer.element_size()
        return buffer

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that is no scratch memory: not counted, not poisoned."""
        return torch.empty(shape, dtype=dtype, device=device)

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        """A Triton kernel on its grid, to be called with every argument it has and with options of its compilation."""
        return kernel[grid]

    def apply(self, function: Callable[..., object], *args: Any) -> None:
        """A function that writes into its tensor arguments, such as ``Tensor.copy_``."""
        function(*args)

    def contiguous(self, x: Tensor) -> Tensor:
        """``x``, or a copy of it."""
        return x if x.is_contiguous() else self.copied(x)

    def copied(self, x: Tensor) -> Tensor:
        """A contiguous copy of ``x``."""
        copy = self.result(tuple(x.shape), x.dtype, x.device)
        self.apply(Tensor.copy_, copy, x)
        return copy

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in another dtype, contiguous; ``x`` itself if it has that one."""
        if x.dtype is dtype:
            return x
        cast = self.result(tuple(x.shape), dtype, x.device)
        self.apply(Tensor.copy_, cast, x)
        return cast

    def once(self) -> None:
        """Says that this execution also does what does not go through here."""


def shares_memory(x: Tensor | None, addresses: Iterable[int]) -> bool:
    """Whether more than one of the addresses, x's own among them, lies in x's memory."""
    if x is None:
        return False
    storage = x.untyped_storage()
    first = storage.data_ptr()
    last = first + storage.nbytes()
    return len([address for address in addresses if first <= address < last]) > 1
