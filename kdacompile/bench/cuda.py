"""The CUDA suite: our op beside the emitted kernels alone, the compiled PyTorch function, FLA, the floor; and models.

A contender of one kind of case is a process of its own with empty compiler caches, with FLA hidden from all but those
that use it (where it is importable, transformers binds its functions). Processes get ready side by side, first calls
included, and are timed one after the other, see ``relay``. FLA tunes itself on the device, for minutes, and keeps what
it found in Triton's cache: it comes after the others, so that a run cut short has all of ours; the first of its
processes tune, and those of the last wave find the kernels they have in common with them tuned, as on a machine where
FLA has run before.

Then comes the grid of ``cuda_grid``: all rows over norms, gates, heads and lengths.

The table gives device time (replays of a CUDA graph), the time of eager launches, the first call, peak memory and the
error against the fp64 recurrence; a JSON file has everything, a Markdown file the tables.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from kdacompile.bench import cuda_grid, record
from kdacompile.bench.cuda_cases import CASES, TUNED_BY_OTHERS, Case, contenders
from kdacompile.bench.cuda_table import markdown, table
from kdacompile.bench.record import Results
from kdacompile.bench.relay import LONGEST, Job, Outcome, Relay
from kdacompile.store.disk import write_whole

_WORKER = "kdacompile.bench.cuda_worker"
GRID = "grid"
"""What ``--case`` calls the grid of :mod:`~kdacompile.bench.cuda_grid`."""
_READY_SECONDS = 300.0  # a compiler that takes longer is out of the race


def main(only: Sequence[str] | None, json_path: Path, timeout: float | None) -> int:
    """Run, print the table, write it and the JSON. Exit status 1 where one of ours failed."""
    device = record.cuda_device("cuda")
    names = record.chosen([*(case.name for case in CASES), GRID], only)
    cases, writing = [case for case in CASES if case.name in names], threading.Lock()

    def write(results: Results) -> None:
        with writing:  # the last to come writes everything
            measured = [{**asdict(case), "results": results[case.name]} for case in cases]
            record.write(json_path, "cuda", measured, device=device)
            write_whole(json_path.with_suffix(".md"), markdown(cases, results))

    results = _run(cases, timeout, write)
    if cases:
        print(table(cases, results))
    failed = 0
    if GRID in names:
        failed = cuda_grid.run(json_path, timeout)
    print(f"\nwritten to {json_path}; the tables are beside it (.md)")
    ours = [figures for found in results.values() for name, figures in found.items() if name in ("ours", "portable")]
    return 1 if failed or any("failure" in figures for figures in ours) else 0


def _run(cases: Sequence[Case], timeout: float | None, write: Callable[[Results], None]) -> Results:
    """Measure; what is there is written whenever a process has come to its end."""
    results: Results = {case.name: {} for case in cases}
    groups: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for contender in contenders(case):
            results[case.name][contender] = {"failure": "not run"}  # keeps the order
            groups.setdefault((f"{case.kind} {case.heads}x{case.width}", contender), []).append(case.name)
    jobs = [
        Job(f"{kind}, {who}", _WORKER, ",".join(members), who, "fla" if who.endswith("fla") else "")
        for (kind, who), members in groups.items()
    ]

    def done(job: Job, outcome: Outcome) -> None:
        for name in job.group.split(","):
            failed = {"failure": outcome.reason, "stderr": list(outcome.stderr)}
            results[name][job.contender] = outcome.found.get(name, failed)
        print(f"{job.name}: {outcome.reason if outcome.failure else 'done'}", file=sys.stderr, flush=True)
        write(results)

    Relay(timeout or _READY_SECONDS, timeout or LONGEST).run(_waves(jobs), done)
    return results


def _waves(jobs: Sequence[Job]) -> list[list[Job]]:
    """First all but FLA, three a core; then FLA where it tunes what its other processes use, then these."""
    without = [job for job in jobs if not job.shares]
    tuning = [job for job in jobs if job.shares and job.name.split()[0] not in TUNED_BY_OTHERS]
    tuned = [job for job in jobs if job.shares and job not in tuning]
    size = 3 * (os.cpu_count() or 1)
    parts = (without, tuning, tuned)
    return [part[start : start + size] for part in parts for start in range(0, len(part), size)]
