"""Clocks and scales of the benchmark."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], *, least_runs: int = 11, least_seconds: float = 2.0) -> float:
    """The median over enough runs for both limits, after one run that does not count."""
    call()
    samples: list[float] = []
    while len(samples) < least_runs or sum(samples) < least_seconds:
        samples.append(seconds_of(call))
    return statistics.median(samples)


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """The most bytes the call's tensors held at once, inputs excluded, as torch's allocator counts them.

    Exact and repeatable, where a process's resident size depends on what malloc chose to keep.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def reset_peak_resident() -> None:
    """Start a new high-water mark of the resident size (Linux only)."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def resident_bytes(field: str) -> int | None:
    """``VmRSS`` or ``VmHWM`` of this process; None where the system does not say."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    difference = (result.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())
