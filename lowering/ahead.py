"""Compiling the kernels of a call side by side: launched one after the other, each would wait for the one before it."""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from kdacompile.containment import contain

from .scratch import Scratch

log = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds that nobody asks what is going on."""


@contextmanager
def telling(what: str) -> Generator[None]:
    """Say what takes long, once it does: in the log, and where a person looks at stderr, there."""

    def tell() -> None:
        log.info("%s", what)
        if sys.stderr.isatty():
            print(f"kdacompile: {what}", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
            run(_Ahead())  # leaving the block waits for the compiler

    with telling("compiling the GPU kernels of a first call, which are kept on disk"):
        contain("compiling kernels side by side", compile_all, lambda _: None)
