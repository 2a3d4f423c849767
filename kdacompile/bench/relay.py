"""Worker processes that get ready side by side and are timed one after the other.

A worker prepares (imports, compiles, first calls), writes a line and waits for one; what it measures then, it measures
alone. Compilers take most of a benchmark's time and none of the device's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

READY, GO = "ready", "go"
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "KDACOMPILE_CACHE_DIR": "kda"}
_STDERR_TAIL = 15


@dataclass(frozen=True)
class Job:
    """A worker: ``python -m module *arguments`` with empty compiler caches.

    ``shares``: jobs that give the same name here have one Triton cache between them, empty when the relay starts.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    shares: str = ""


@dataclass(frozen=True)
class Outcome:
    """``failure``: why the worker did not come to its end, and the last lines of its stderr."""

    failure: str | None
    stderr: Sequence[str] = ()

    @property
    def reason(self) -> str:
        """The last line of a traceback says more than an exit status."""
        if self.failure is not None and self.failure.startswith("exit") and self.stderr:
            return self.stderr[-1]
        return self.failure or "no figures"


class Relay:
    """Runs waves of jobs; seconds allowed for getting ready and for the rest."""

    def __init__(self, ready_seconds: float, timed_seconds: float) -> None:
        self._ready, self._timed = ready_seconds, timed_seconds
        self._device = threading.Lock()

    def run(self, waves: Iterable[Sequence[Job]], done: Callable[[Job, Outcome], None]) -> None:
        """``done`` is called for each job as it ends, from its thread.

        A wave's jobs get ready side by side, and nothing is timed before all of them are: they run their first calls on
        the device.
        """
        with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as shared:
            for wave in waves:
                barrier = threading.Barrier(len(wave))
                with ThreadPoolExecutor(len(wave)) as pool:
                    running = [pool.submit(self._follow, job, shared, barrier, done) for job in wave]
                for future in running:
                    future.result()

    def _follow(self, job: Job, shared: str, barrier: threading.Barrier, done: Callable[[Job, Outcome], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder:
            environment = {**os.environ, **{name: str(Path(folder, place)) for name, place in _CACHES.items()}}
            if job.shares:
                environment["TRITON_CACHE_DIR"] = str(Path(shared, job.shares))
            errors = Path(folder, "stderr")
            with errors.open("w") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", job.module, *job.arguments],
                    env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                )  # fmt: skip
                failure = self._until_ready(process)
                barrier.wait()
                if failure is None:
                    with self._device:
                        failure = self._until_done(process)
                _end(process)
            done(job, Outcome(failure, errors.read_text(errors="replace").splitlines()[-_STDERR_TAIL:]))

    def _until_ready(self, process: subprocess.Popen[str]) -> str | None:
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._ready, give_up)
        timer.start()
        assert process.stdout is not None
        said = any(line.strip() == READY for line in iter(process.stdout.readline, ""))
        timer.cancel()
        if said:
            return None
        return f"not ready after {self._ready:.0f} s" if late.is_set() else f"exit status {process.wait()}"

    def _until_done(self, process: subprocess.Popen[str]) -> str | None:
        try:
            process.communicate(GO + "\n", timeout=self._timed)
        except subprocess.TimeoutExpired:
            return f"not finished after {self._timed:.0f} s"
        return None if process.returncode == 0 else f"exit status {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def wait_for_turn() -> None:
    """Called by a worker that is ready; returns when it is alone."""
    print(READY, flush=True)
    sys.stdin.readline()
