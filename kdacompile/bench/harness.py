"""Runs a suite: every contender of every case in a fresh process with empty compiler caches, timed in turn.

What is there is written after every case, and when somebody stops it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

from kdacompile.bench import cuda, measure, table
from kdacompile.bench.relay import READY
from kdacompile.bench.suites import SUITES, Case, Suite
from kdacompile.doctor import version_of
from kdacompile.errors import BenchError, MissingDependencyError
from kdacompile.store.disk import write_whole

ROUNDS = 5
_STDERR_TAIL = 15  # lines of a failed contender's stderr that are kept

Results = dict[str, dict[str, dict[str, Any]]]  # case -> contender -> figures, or {"failure": text}


def main(suite_name: str, only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Run, print the table, write the JSON. Exit status 1 where a contender failed."""
    if suite_name == "cuda":  # cases, clocks and contenders of its own
        return cuda.main(only, json_path, timeout)
    if suite_name in ("mla", "train", "parallel"):
        return _with_torch(suite_name, only, json_path, timeout)
    suite = _suite(suite_name)
    cases = [case for case in suite.cases if not only or any(part in case.name for part in only)]
    if not cases:
        known = ", ".join(case.name for case in suite.cases)
        raise BenchError(detail=f"no case of suite {suite_name!r} matches {', '.join(only or ())}; it has {known}")
    if util.find_spec("fla"):
        print("warning: flash-linear-attention is installed and transformers binds its functions", file=sys.stderr)
    busy = measure.load()
    if busy:
        print(f"warning: {busy}", file=sys.stderr)

    def write(results: Results) -> None:
        record = _record(suite_name, [case for case in cases if case.name in results], results)
        write_whole(json_path, json.dumps({**record, "load": busy or measure.load()}, indent=2) + "\n")

    results, finished = _run_all(suite_name, suite, cases, timeout, write)
    done = [case for case in cases if case.name in results]
    if done:
        print(table.render(done, suite, results))
        print(f"\nwritten to {json_path}; `python -m kdacompile.bench.charts {json_path}` draws it")
    if not finished:
        print(f"stopped after {len(done)} of {len(cases)} cases", file=sys.stderr)
        return 130
    return 1 if any("failure" in figures for by_name in results.values() for figures in by_name.values()) else 0


def _with_torch(suite_name: str, only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Suites of a CUDA device whose modules import torch."""
    try:
        from kdacompile.bench import mla, parallel, train
    except ImportError as error:
        raise MissingDependencyError(what=f"bench suite {suite_name!r}", package="torch", install="torch") from error
    if suite_name == "train":
        return train.main(only, json_path, timeout)
    return (mla if suite_name == "mla" else parallel).main(only, json_path)


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


def _run_case(suite_name: str, suite: Suite, case: Case, timeout: float, place: str) -> dict[str, dict[str, Any]]:
    """Every contender gets ready alone; then they are timed in turn."""
    contenders: dict[str, _Contender] = {}
    with ExitStack() as stack:
        for name in suite.contenders_of(case):
            label = f"{place} {case.name} T={case.length}, {name}"
            contenders[name] = stack.enter_context(_Contender(suite_name, case, name, timeout, label))
            contenders[name].wait("first call")
        for turn in range(ROUNDS):
            for contender in contenders.values():
                contender.send(f"round {turn + 1} of {ROUNDS}")
        found = {name: contender.figures() for name, contender in contenders.items()}
    for name, figures in found.items():
        _progress(f"{place} {case.name} T={case.length}, {name}: {table.one_line(figures)}", last=True)
    return found


class _Contender:
    """A contender in its own process. Its caches live and die with a temporary folder, so nothing is ever warm."""

    def __init__(self, suite_name: str, case: Case, name: str, timeout: float, label: str) -> None:
        self._timeout, self._label, self._failure = timeout, label, ""
        self._folder = tempfile.TemporaryDirectory(prefix="kdacompile-bench-")
        self._out, self._err = Path(self._folder.name, "result.json"), Path(self._folder.name, "stderr.txt")
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environment = {**os.environ, **{key: str(Path(self._folder.name, place)) for key, place in caches.items()}}
        with self._err.open("w") as stderr:
            self._process = subprocess.Popen(
                _command(suite_name, case, name, self._out),
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._lines = self._process.stdin, self._process.stdout

    def __enter__(self) -> _Contender:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def send(self, what: str) -> None:
        """Have one round timed."""
        if self._failure:
            return
        try:
            print("go", file=self._in, flush=True)
        except OSError:  # it has ended
            self._failure = f"exit status {self._process.wait()}"
        else:
            self.wait(what if sys.stderr.isatty() else "")

    def wait(self, what: str) -> None:
        """Until it says that it is ready."""
        if what:
            _progress(f"{self._label}: {what} ...", last=False)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._timeout, give_up)
        timer.start()
        try:
            ready = any(line.strip() == READY for line in iter(self._lines.readline, ""))
        finally:
            timer.cancel()
        if not ready:
            late_by = f"not finished after {self._timeout:.0f} s"
            self._failure = late_by if late.is_set() else f"exit status {self._process.wait()}"

    def figures(self) -> dict[str, Any]:
        """What it measured, or why not."""
        if not self._failure:
            self._process.communicate()
            if self._process.returncode == 0 and self._out.exists():
                return json.loads(self._out.read_text())
            self._failure = f"exit status {self._process.returncode}"
        return {"failure": self._failure, "stderr": self._err.read_text(errors="replace").splitlines()[-_STDERR_TAIL:]}


def _command(suite_name: str, case: Case, contender: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "kdacompile.bench.worker", suite_name, case.name, contender, str(out)]


def _progress(text: str, *, last: bool) -> None:
    """One line per contender: rewritten in place on a terminal, start and end elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _processor() -> str:
    """Its name where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _record(suite_name: str, cases: Sequence[Case], results: Results) -> dict[str, Any]:
    versions = {name: version_of(name) for name in ("torch", "kdacompile", "transformers", "triton")}
    measured = [(asdict(case), results[case.name]) for case in cases]
    return {
        "suite": suite_name,
        "title": SUITES[suite_name].title or f"suite {suite_name}",
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": versions,
        "cases": [{**case, "results": found, "ratios": table.ratios(found)} for case, found in measured],
    }
