"""Compiling the kernels of a call side by side: launched one after the other, each would wait for the one before it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kdacompile.containment import contain

from .scratch import Scratch


class _Ahead(Scratch):
    """Launches nothing and does nothing: kernels are compiled for the arguments they would have."""

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **named: kernel.warmup(*args, grid=grid, **named)

    def apply(self, function: Callable[..., object], *args: Any) -> None:
        pass


def compile_ahead(run: Callable[[Scratch], object], scratch: Scratch) -> None:
    """Compile what ``run`` launches, where this is the first call of its kind; what fails is left to the call."""
    if not scratch.first:
        return
    try:
        from triton import AsyncCompileMode
    except ImportError:  # before Triton 3.5
        return

    def compile_all() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            run(_Ahead())

    contain("compiling kernels side by side", compile_all, lambda _: None)
