"""Clocks and scales of the benchmark.

Times are medians and quartiles of ``torch.utils.benchmark``'s blocks, and contenders take turns, so that what else the
machine does meets all of them alike. Where that was much, it is said.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, get_num_threads
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from torch.utils.benchmark import timer as wall

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median and the quartiles of its blocks."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return cls(median, low, high)

    @property
    def spread(self) -> float:
        """The interquartile range, as a share of the median."""
        return (self.high - self.low) / self.median

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{in_unit(self.median)} (called once)"
        return f"{in_unit(self.median)} (quartiles {in_unit(self.low)} to {in_unit(self.high)})"


LONGEST = 15.0
"""Seconds after which no other round begins."""


def timings(calls: Mapping[str, Callable[[], object]], *, seconds: float = 1.0, rounds: int = 5) -> dict[str, Timing]:
    """The calls in turn, ``rounds`` times, ``seconds`` for each in all. They are warm: each has been called before.

    ``torch.utils.benchmark`` chooses the length of a block, so that its clock costs nothing, and waits for the device.
    It calls what it measures four times at least: calls that take longer than ``seconds`` are timed one by one, and
    there are fewer rounds of them.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    started = wall()
    for turn in range(rounds):
        if turn and wall() - started > LONGEST:
            break
        for name, call in calls.items():
            first = _once(call)
            samples[name] += [first] if first > seconds else samples_of(call, seconds / rounds)
    return {name: Timing.of(found) for name, found in samples.items()}


def _once(call: Callable[[], object]) -> float:
    """Seconds of one call; ``wall`` waits for the device."""
    start = wall()
    call()
    return wall() - start


def samples_of(call: Callable[[], object], seconds: float, clock: Callable[[], float] = wall) -> list[float]:
    """Seconds a call, block by block, for about so many seconds."""
    timer = Timer("call()", globals={"call": call}, num_threads=get_num_threads(), timer=clock)
    return timer.blocked_autorange(min_run_time=seconds).times


@dataclass(frozen=True)
class Speedup:
    """How many times faster one call is than another: by the medians, and between which bounds by the quartiles."""

    times: float
    least: float
    most: float

    @classmethod
    def of(cls, slow: Timing, fast: Timing) -> Speedup:
        return cls(slow.median / fast.median, slow.low / fast.high, slow.high / fast.low)

    def __str__(self) -> str:
        if self.least <= 1.0 <= self.most:
            return f"cannot be told on this machine now ({self.least:.2f} to {self.most:.2f} times)"
        faster = self.times > 1.0
        numbers = (self.times, self.least, self.most) if faster else (1 / self.times, 1 / self.most, 1 / self.least)
        word = "faster" if faster else "slower"
        if self.least == self.most:
            return f"{numbers[0]:.1f} times {word}, by one call of each"
        return "{:.1f} times {word} ({:.1f} to {:.1f})".format(*numbers, word=word)


def load() -> str:
    """What else the machine is busy with, as a warning; "" where that is little, or the system does not say."""
    if not hasattr(os, "getloadavg"):
        return ""
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy < 0.5 * cores:
        return ""
    return f"this machine is busy: {busy:.1f} processes want its {cores} cores, so times may be far too long"


def in_unit(seconds: float) -> str:
    """``0.00123`` as ``1.23 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """The most bytes the call's tensors held at once, inputs excluded, as torch's allocator counts them.

    Exact and repeatable, where a process's resident size depends on what malloc chose to keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def reset_peak_resident() -> None:
    """Start a new high-water mark of the resident size (Linux only)."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5", encoding="utf-8")


def resident_bytes(field: str) -> int | None:
    """``VmRSS`` or ``VmHWM`` of this process; None where the system does not say."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    difference = (result.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())
