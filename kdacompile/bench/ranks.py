"""Times of a call over all ranks beside the same on one GPU: bursts in turn, each as long as on the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from kdacompile.bench.record import Figures

BURST, ROUNDS = 3, 7


def interleaved(one: Callable[[], object], ranks: Callable[[], object]) -> Figures:
    """Microseconds of both, in bursts in turn: medians of the slowest rank's."""
    for call in (one, ranks, one, ranks):
        call()
    times: dict[str, list[float]] = {"one_us": [], "ranks_us": []}
    for _ in range(ROUNDS):
        for name, call in (("one_us", one), ("ranks_us", ranks)):
            times[name].append(slowest(call))
    return {**{name: statistics.median(found) for name, found in times.items()}, "rounds": times}


def slowest(call: Callable[[], object], burst: int = BURST) -> float:
    """Microseconds of a call in a burst that all ranks begin together, on the slowest rank."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(burst):
        call()
    end.record()
    torch.cuda.synchronize()
    found = torch.tensor(1e3 * start.elapsed_time(end) / burst, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()
