"""Clocks of a CUDA device."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch


def device_microseconds(call: Callable[[], object], launches: int = 10, repeats: int = 9) -> float:
    """The median over replays of a CUDA graph of several calls, divided by their number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return statistics.median(_elapsed(graph.replay) / launches for _ in range(repeats))


def eager_microseconds(call: Callable[[], object], launches: int = 20, repeats: int = 5) -> float:
    """The same from eager launches one after the other: what the host takes shows where it is longer."""

    def several() -> None:
        for _ in range(launches):
            call()

    return statistics.median(_elapsed(several) / launches for _ in range(repeats))


def enqueued_microseconds(call: Callable[[], object]) -> float:
    """One call that the host has enqueued before the device comes to it: what the host takes does not show.

    The device is kept busy for some 12 ms, and its queue holds 1024 launches; beyond either the host shows.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    source, target = _large()
    torch.cuda.synchronize()
    for _ in range(24):
        target.copy_(source)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def _elapsed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most device memory the call held at once, inputs excluded, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@cache
def rates() -> tuple[float, float]:
    """This device's rates of copying, in bytes, and of bf16 products, in operations, a microsecond."""
    source, target = _large()
    # Not from a graph: a copy that is a graph's node runs at two thirds of the rate.
    copied = 2 * source.nbytes / eager_microseconds(lambda: target.copy_(source))
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    return copied, 2 * 8192**3 / device_microseconds(lambda: x @ x, launches=3)


@cache
def _large() -> tuple[torch.Tensor, torch.Tensor]:
    """1 GiB, and room for a copy."""
    source = torch.randn(2**28, device="cuda")
    return source, torch.empty_like(source)
