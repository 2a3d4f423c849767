"""Stand-ins for Triton's kernels on a machine without a GPU: launched as it launches, with numbers for addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


class Compiled:
    """A kernel compiled for what it was called with; equal to what another call of the same kind gets."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compiled) and self.kernel.name == other.kernel.name

    def __hash__(self) -> int:
        return hash(self.kernel.name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: self.kernel.launched(grid, values)


class Kernel:
    """In place of a jitted function: ``compiled`` counts calls that bind arguments, ``launches`` are all."""

    def __init__(self, name: str, arg_names: list[str], body: Callable[..., None] | None = None) -> None:
        self.name, self.arg_names, self.body = name, arg_names, body
        self.compiled = 0
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def bind(*args: Any, **named: Any) -> Compiled:
            given = dict(zip(self.arg_names, args, strict=False)) | named
            assert set(given) - set(self.arg_names) <= {"num_warps", "num_stages", "launch_pdl"}
            self.compiled += 1
            self.launched((*grid, 1, 1)[:3], tuple(given[name] for name in self.arg_names))
            return Compiled(self)

        return bind

    def warmup(self, *args: Any, grid: tuple[int, ...], **named: Any) -> None:
        """Compiling ahead of the first call: there is nothing to compile."""

    def launched(self, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        assert len(values) == len(self.arg_names) and None not in values
        plain = tuple(x.data_ptr() if hasattr(x, "data_ptr") else x for x in values)
        self.launches.append((grid, plain))
        if self.body is not None:
            self.body(*plain)


def floats(address: int, count: int) -> Any:
    """The fp32 numbers at an address of the host."""
    return (ctypes.c_float * count).from_address(address)
