"""The CUDA suite: our op beside the emitted kernels alone, the compiled PyTorch function, FLA, the floor; and models.

A contender of one kind of case is a process of its own with empty compiler caches, with FLA hidden from all but those
that use it (where it is importable, transformers binds its functions). Processes get ready side by side, first calls
included, and are timed one after the other, see ``relay``. FLA tunes itself on the device, for minutes, and keeps what
it found in Triton's cache: it comes after the others, so that a run cut short has all of ours; the first of its
processes tune, and those of the last wave find the kernels they have in common with them tuned, as on a machine where
FLA has run before.

Then comes the grid of ``cuda_grid``: all rows over norms, gates, heads and lengths.

The table gives device time (replays of a CUDA graph), the time of eager launches, the first call, peak memory and the
error against the fp64 recurrence; a JSON file has everything, a Markdown file the tables, an SVG the device times.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdacompile.bench.cuda_cases import CASES, TUNED_BY_OTHERS, Case, contenders
from kdacompile.bench.cuda_table import markdown, plot, table
from kdacompile.bench.relay import Job, Outcome, Relay
from kdacompile.doctor import version_of
from kdacompile.errors import BenchError, MissingDependencyError
from kdacompile.store.disk import write_whole

__all__ = ["CASES", "Case", "main", "plot", "table"]
_WORKER = "kdacompile.bench.cuda_worker"
GRID = "grid"
"""What ``--case`` calls the grid of :mod:`~kdacompile.bench.cuda_grid`."""
_READY_SECONDS = 300.0  # a compiler that takes longer is out of the race

Results = dict[str, dict[str, dict[str, Any]]]


def main(only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Run, print the table, write the JSON and the plot. Exit status 1 where one of ours failed."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(what="bench suite 'cuda'", package="torch", install="torch") from error
    if not torch.cuda.is_available():
        raise BenchError(detail="the cuda suite needs a CUDA device")
    cases = [case for case in CASES if not only or any(part in case.name for part in only)]
    grid = not only or any(part in GRID for part in only)
    if not cases and not grid:
        names = ", ".join([*(case.name for case in CASES), GRID])
        raise BenchError(detail=f"no case matches {', '.join(only or ())}; there are {names}")
    device, writing = torch.cuda.get_device_name(0), threading.Lock()

    def write(results: Results) -> None:
        with writing:  # the last to come writes everything
            measured = [{**asdict(case), "results": results[case.name]} for case in cases]
            record = {"suite": "cuda", "device": device, "versions": _versions(), "cases": measured}
            write_whole(json_path, json.dumps(record, indent=2) + "\n")
            write_whole(json_path.with_suffix(".md"), markdown(cases, results))
            write_whole(json_path.with_suffix(".svg"), plot(cases, results))

    results = _run(cases, timeout, write)
    if cases:
        print(table(cases, results))
    failed = 0
    if grid:
        from kdacompile.bench import cuda_grid  # after torch was found

        failed = cuda_grid.run(json_path, timeout)
    print(f"\nwritten to {json_path}, and beside it the tables (.md) and the plots (.svg)")
    ours = [figures for found in results.values() for name, figures in found.items() if name in ("ours", "portable")]
    return 1 if failed or any("failure" in figures for figures in ours) else 0


def _run(cases: Sequence[Case], timeout: float, write: Callable[[Results], None]) -> Results:
    """Measure; what is there is written whenever a process has come to its end."""
    results: Results = {case.name: {} for case in cases}
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for contender in contenders(case):
            results[case.name][contender] = {"failure": "not run"}  # keeps the order
            groups.setdefault((f"{case.kind} {case.heads}x{case.width}", contender), []).append(case)
    with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder:
        jobs: list[Job] = []
        for (kind, contender), members in groups.items():
            described = json.dumps([asdict(case) for case in members])
            arguments = (described, contender, str(Path(folder, f"{len(jobs)}.json")))
            jobs.append(Job(f"{kind}, {contender}", _WORKER, arguments, "fla" if contender.endswith("fla") else ""))

        def done(job: Job, outcome: Outcome) -> None:
            described, contender, out = job.arguments
            measured = json.loads(Path(out).read_text()) if Path(out).exists() else {}
            for case in json.loads(described):
                failed = {"failure": outcome.reason, "stderr": list(outcome.stderr)}
                results[case["name"]][contender] = measured.get(case["name"], failed)
            print(f"{job.name}: {outcome.reason if outcome.failure else 'done'}", file=sys.stderr, flush=True)
            write(results)

        Relay(min(_READY_SECONDS, timeout), timeout).run(_waves(jobs), done)
    return results


def _waves(jobs: Sequence[Job]) -> list[list[Job]]:
    """First all but FLA, three a core; then FLA where it tunes what its other processes use, then these."""
    without = [job for job in jobs if not job.shares]
    tuning = [job for job in jobs if job.shares and job.name.split()[0] not in TUNED_BY_OTHERS]
    tuned = [job for job in jobs if job.shares and job not in tuning]
    size = 3 * (os.cpu_count() or 1)
    parts = (without, tuning, tuned)
    return [part[start : start + size] for part in parts for start in range(0, len(part), size)]


def _versions() -> dict[str, str | None]:
    return {name: version_of(name) for name in ("torch", "triton", "kdacompile", "transformers", "fla-core")}
