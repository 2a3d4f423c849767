"""Clocks of a CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache

import torch


def device_microseconds(*calls: Callable[[], object], launches: int = 10, repeats: int = 9) -> float:
    """The median over replays of a CUDA graph of several calls in turn, divided by their number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph, turns = torch.cuda.CUDAGraph(), -(-launches // len(calls))
    with torch.cuda.graph(graph):
        for call in calls * turns:
            call()
    return statistics.median(elapsed(graph.replay) / (turns * len(calls)) for _ in range(repeats))


def eager_microseconds(call: Callable[[], object]) -> float:
    """The same from eager launches one after the other: what the host takes shows where it is longer."""

    def several() -> None:
        for _ in range(20):
            call()

    return statistics.median(elapsed(several) / 20 for _ in range(5))


def enqueued_microseconds(call: Callable[[], object]) -> float:
    """One call that the host has enqueued before the device comes to it: what the host takes does not show.

    The device is kept busy for some 12 ms, and its queue holds 1024 launches; beyond either the host shows.
    """
    source, target = _large()

    def busy() -> None:
        for _ in range(24):
            target.copy_(source)

    return elapsed(call, busy)


def elapsed(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Microseconds of a call between two events, ``before`` enqueued in front of the first."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def seconds_until_done(call: Callable[[], object]) -> float:
    """Of the host, until the device is done with a call."""
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


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
