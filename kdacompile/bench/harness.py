"""Runs a suite: every contender of every case in a fresh process with empty compiler caches."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

from kdacompile.bench import cuda, table
from kdacompile.bench.suites import SUITES, Case, Suite
from kdacompile.doctor import version_of
from kdacompile.errors import BenchError, MissingDependencyError

_TICK = 1.0  # seconds between two looks at the running contender
_STDERR_TAIL = 15  # lines of a failed contender's stderr that are kept

Results = dict[str, dict[str, dict[str, Any]]]  # case -> contender -> figures, or {"failure": text}


def main(suite_name: str, only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Run, print the table, write the JSON. Exit status 1 where a contender failed."""
    if suite_name == "cuda":  # cases, clocks and contenders of its own
        return cuda.main(only, json_path, timeout)
    if suite_name == "mla":
        return _mla(only, json_path)
    suite = _suite(suite_name)
    cases = [case for case in suite.cases if not only or any(part in case.name for part in only)]
    if not cases:
        known = ", ".join(case.name for case in suite.cases)
        raise BenchError(detail=f"no case of suite {suite_name!r} matches {', '.join(only or ())}; it has {known}")
    if util.find_spec("fla"):
        print("warning: flash-linear-attention is installed and transformers binds its functions", file=sys.stderr)
    results = _run_all(suite_name, suite, cases, timeout)
    print(table.render(cases, suite, results))
    json_path.write_text(json.dumps(_record(suite_name, cases, results), indent=2) + "\n")
    print(f"\nwritten to {json_path}")
    return 1 if any("failure" in figures for by_name in results.values() for figures in by_name.values()) else 0


def _mla(only: Sequence[str] | None, json_path: Path) -> int:
    try:
        from kdacompile.bench import mla
    except ImportError as error:
        raise MissingDependencyError(what="bench suite 'mla'", package="torch", install="torch") from error
    return mla.main(only, json_path)


def _suite(name: str) -> Suite:
    if name not in SUITES:
        raise BenchError(detail=f"no suite {name!r}; there are {', '.join(SUITES)}, cuda, mla")
    for package in SUITES[name].packages:
        if util.find_spec(package) is None:
            raise MissingDependencyError(what=f"bench suite {name!r}", package=package, install="'kdacompile[models]'")
    return SUITES[name]


def _run_all(suite_name: str, suite: Suite, cases: Sequence[Case], timeout: float) -> Results:
    results: Results = {case.name: {} for case in cases}
    work = [(case, contender) for case in cases for contender in suite.contenders]
    for number, (case, contender) in enumerate(work, 1):
        label = f"[{number}/{len(work)}] {case.name} T={case.length}, {contender}"
        figures = _run_one(suite_name, case, contender, timeout, label)
        results[case.name][contender] = figures
        _progress(f"{label}: {table.one_line(figures)}", last=True)
    return results


def _run_one(suite_name: str, case: Case, contender: str, timeout: float, label: str) -> dict[str, Any]:
    """One contender in its own process. Its caches live and die with a temporary folder, so nothing is ever warm."""
    with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder:
        out, err = Path(folder, "result.json"), Path(folder, "stderr.txt")
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        with err.open("w") as stderr:
            nothing = subprocess.DEVNULL
            command, environment = _command(suite_name, case, contender, out), {**os.environ, **caches}
            process = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=stderr)
            finished = _wait(process, timeout, label)
        if not finished:
            return {"failure": f"not finished after {timeout:.0f} s"}
        if process.returncode != 0 or not out.exists():
            tail = err.read_text(errors="replace").splitlines()[-_STDERR_TAIL:]
            return {"failure": f"exit status {process.returncode}", "stderr": tail}
        return json.loads(out.read_text())


def _command(suite_name: str, case: Case, contender: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "kdacompile.bench.worker", suite_name, case.name, contender, str(out)]


def _wait(process: subprocess.Popen[bytes], timeout: float, label: str) -> bool:
    start = time.monotonic()
    _progress(f"{label} ...", last=False)
    try:
        while (elapsed := time.monotonic() - start) < timeout:
            try:
                process.wait(_TICK)
                return True
            except subprocess.TimeoutExpired:
                if sys.stderr.isatty():
                    _progress(f"{label} ... {elapsed:.0f} s", last=False)
        return False
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _progress(text: str, *, last: bool) -> None:
    """One line per contender: rewritten in place on a terminal, start and end elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _record(suite_name: str, cases: Sequence[Case], results: Results) -> dict[str, Any]:
    versions = {name: version_of(name) for name in ("torch", "kdacompile", "transformers", "triton")}
    measured = [(asdict(case), results[case.name]) for case in cases]
    return {
        "suite": suite_name,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": versions,
        "cases": [{**case, "results": found, "ratios": table.ratios(found)} for case, found in measured],
    }
