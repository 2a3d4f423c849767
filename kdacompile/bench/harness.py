"""Runs a suite: every contender of every case in a fresh process with empty compiler caches, timed in turn.

What is there is written after every case, and when somebody stops it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module, util
from pathlib import Path
from typing import Any

from kdacompile.bench import measure, record, table
from kdacompile.bench.record import Figures, Results
from kdacompile.bench.relay import LONGEST, Worker
from kdacompile.bench.suites import ROUNDS, SUITES, Case, Suite
from kdacompile.errors import BenchError, MissingDependencyError


def main(suite_name: str, only: Sequence[str] | None, json_path: Path, timeout: float | None = None) -> int:
    """Run, print the table, write the JSON. Exit status 1 where a contender failed."""
    if suite_name in ("cuda", "train"):  # cases, clocks and contenders of their own
        return import_module(f"kdacompile.bench.{suite_name}").main(only, json_path, timeout)
    if suite_name in ("mla", "parallel"):
        return import_module(f"kdacompile.bench.{suite_name}").main(only, json_path)
    suite = _suite(suite_name)
    names = record.chosen([case.name for case in suite.cases], only)
    cases = [case for case in suite.cases if case.name in names]
    busy = measure.load()
    if busy:
        print(f"warning: {busy}", file=sys.stderr)

    def write(results: Results) -> None:
        done = [{**asdict(case), "results": results[case.name]} for case in cases if case.name in results]
        done = [case | {"ratios": table.ratios(case["results"])} for case in done]
        about = {"title": suite.title or f"suite {suite_name}", "machine": _machine(), "load": busy or measure.load()}
        record.write(json_path, suite_name, done, **about)

    results, finished = _run_all(suite_name, suite, cases, timeout or LONGEST, write)
    done = [case for case in cases if case.name in results]
    if done:
        print(table.render(done, suite, results))
        print(f"\nwritten to {json_path}")
    if not finished:
        print(f"stopped after {len(done)} of {len(cases)} cases", file=sys.stderr)
        return 130
    return 1 if any("failure" in figures for by_name in results.values() for figures in by_name.values()) else 0


def _suite(name: str) -> Suite:
    if name not in SUITES:
        raise BenchError(detail=f"no suite {name!r}; there are {', '.join(SUITES)}, cuda, mla, train, parallel")
    for package in SUITES[name].packages:
        if util.find_spec(package) is None:
            raise MissingDependencyError(what=f"bench suite {name!r}", package=package, install="'kdacompile[models]'")
    return SUITES[name]


def _run_all(
    suite_name: str, suite: Suite, cases: Sequence[Case], timeout: float, write: Callable[[Results], None]
) -> tuple[Results, bool]:
    """Measure, case after case; what there is is written after each. False where somebody stopped it."""
    results: Results = {}
    try:
        for number, case in enumerate(cases, 1):
            results[case.name] = _run_case(suite_name, suite, case, timeout, f"[{number}/{len(cases)}]")
            write(results)
    except KeyboardInterrupt:
        return results, False
    return results, True


def _run_case(suite_name: str, suite: Suite, case: Case, timeout: float, place: str) -> dict[str, Figures]:
    """Every contender gets ready alone; then they are timed in turn."""
    label, workers = f"{place} {case.name} T={case.length}", dict[str, Worker]()
    with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder, ExitStack() as stack:
        outs = {name: Path(folder, f"{name}.json") for name in suite.contenders_of(case)}
        for name, out in outs.items():
            workers[name] = stack.enter_context(Worker(_command(suite_name, case, name, out)))
            _progress(f"{label}, {name}: first call ...", last=False)
            workers[name].until_ready(timeout, "not finished")
        for turn in range(ROUNDS):
            for name, worker in workers.items():
                if sys.stderr.isatty():
                    _progress(f"{label}, {name}: round {turn + 1} of {ROUNDS} ...", last=False)
                worker.go()
                worker.until_ready(timeout, "not finished")
        found = {name: _figures(worker, outs[name], timeout) for name, worker in workers.items()}
    for name, figures in found.items():
        _progress(f"{label}, {name}: {table.one_line(figures)}", last=True)
    return found


def _figures(worker: Worker, out: Path, timeout: float) -> Figures:
    """What it measured, or why not."""
    worker.until_done(timeout)
    if worker.failure is None and out.exists():
        return json.loads(out.read_text(encoding="utf-8"))
    return {"failure": worker.failure or "no figures", "stderr": worker.stderr}


def _command(suite_name: str, case: Case, contender: str, out: Path) -> list[str]:
    group = f"{suite_name} {case.name}"
    return [sys.executable, "-m", "kdacompile.bench.relay", "kdacompile.bench.worker", group, contender, str(out)]


def _progress(text: str, *, last: bool) -> None:
    """One line per contender: rewritten in place on a terminal, start and end elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _processor() -> str:
    """Its name where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
