"""Launching what Triton compiled, without its Python wrapper: that asks for the stream and looks for hooks every time.

``CompiledKernel.run``, ``.function`` and ``.packed_metadata`` are what ``CompiledKernel.__getitem__`` itself calls
with, and ``knobs.runtime`` has the hooks. They are not documented; these were read and run in Triton 3.6.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from kdacompile.compat.streams import current_stream


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], stream: int | None) -> None:
    """A compiled kernel on its grid and a stream; None leaves the stream, and telling of the launch, to Triton."""
    if stream is None:
        kernel[grid](*arguments)
    else:
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


def launch_stream(device: torch.device) -> int | None:
    """What to launch on; None to leave it to Triton, where someone, a profiler as a rule, is to be told of launches."""
    if device.type != "cuda":
        return None
    runtime = _runtime()
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return None if any(getattr(hook, "calls", hook) for hook in hooks) else current_stream(device.index)


@functools.cache
def _runtime() -> Any:
    return import_module("triton").knobs.runtime  # not at the top: the package is optional
