"""Worker processes that get ready side by side and are timed one after the other.

A worker is ``measured(group, contender)`` of a suite's module, a generator: it prepares (imports, compiles, makes first
calls), yields None, and what it measures then, it measures alone, and yields by name. Compilers take most of a
benchmark's time and none of the device's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kdacompile.bench.tuning import compile_side_by_side
from kdacompile.store.disk import write_whole

READY, GO = "ready", "go"
LONGEST = 1800.0
"""Seconds allowed for anything, where nobody says how many."""
Steps = Generator[tuple[str, Any] | None, None, None]
"""Of a worker: None once it is ready, then names and figures."""
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_STDERR_TAIL = 15
_POLL = 0.2  # seconds from one look whether a worker lives to the next


@dataclass(frozen=True)
class Job:
    """A worker with empty compiler caches; FLA is hidden from it unless the contender ends so.

    ``shares``: jobs that give the same name here have one Triton cache between them, empty when the relay starts.
    """

    name: str
    module: str
    group: str
    contender: str
    shares: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a worker has ``found``, by name. ``failure``: why it did not come to its end, and the last lines of its
    stderr.
    """

    failure: str | None
    stderr: Sequence[str] = ()
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def reason(self) -> str:
        """The last line of a traceback says more than an exit status."""
        if self.failure is not None and self.failure.startswith("exit") and self.stderr:
            return self.stderr[-1]
        return self.failure or "no figures"


class Worker:
    """The process of a command, with empty compiler caches: it says that it is ready, and again after every line that
    it is sent. ``failure``: why it did not come so far.

    A thread listens to it, and no wait is longer than it is allowed to be: a compiler that a worker started may hold
    its output open after the worker's end.
    """

    def __init__(self, command: Sequence[str], triton_cache: str = "") -> None:
        self.failure: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kdacompile-bench-", ignore_cleanup_errors=True)
        environment = {**os.environ, **{name: str(Path(self._folder.name, place)) for name, place in _CACHES.items()}}
        if triton_cache:
            environment["TRITON_CACHE_DIR"] = triton_cache
        self._errors, self._said = Path(self._folder.name, "stderr"), SimpleQueue[str]()
        with self._errors.open("w") as stderr:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._process.wait()
        self._send_no_more()
        self._folder.cleanup()

    @property
    def stderr(self) -> list[str]:
        """The last lines of it."""
        return self._errors.read_text(encoding="utf-8", errors="replace").splitlines()[-_STDERR_TAIL:]

    def until_ready(self, seconds: float, late: str = "not ready") -> None:
        """Wait, and stop it when it is ``late``."""
        end = time.monotonic() + seconds
        while self.failure is None:
            ended = self._process.poll() is not None  # what it said before its end may still be on its way
            try:
                if self._said.get(timeout=min(_POLL, max(end - time.monotonic(), 0))) == READY:
                    return
            except Empty:
                if ended:
                    self.failure = f"exit status {self._process.returncode}"
                elif time.monotonic() >= end:
                    self.failure = f"{late} after {seconds:.0f} s"
                    self.stop()

    def go(self) -> None:
        """Have it go on."""
        assert self._process.stdin is not None
        try:
            if self.failure is None:
                print(GO, file=self._process.stdin, flush=True)
        except OSError:  # it has ended
            self.failure = f"exit status {self._process.wait()}"

    def stop(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()

    def until_done(self, seconds: float) -> None:
        """Wait for its end, nothing more being sent, and stop it when that is late."""
        if self.failure is not None:
            return
        self._send_no_more()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.failure = f"not finished after {seconds:.0f} s"
            self.stop()
        else:
            self.failure = f"exit status {status}" if status else None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._said.put(line.strip())

    def _send_no_more(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            self._process.stdin.close()


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
                names = "; ".join(job.name for job in wave)
                print(f"getting ready, for {self._ready:.0f} s at most: {names}", file=sys.stderr, flush=True)
                barrier = threading.Barrier(len(wave))
                with ExitStack() as stack, ThreadPoolExecutor(len(wave)) as pool:
                    workers = [stack.enter_context(_started(job, shared)) for job in wave]
                    running = [
                        pool.submit(self._follow, job, worker, shared, barrier, done)
                        for job, worker in zip(wave, workers, strict=True)
                    ]
                    try:
                        for future in running:
                            future.result()
                    finally:  # interrupted: what the workers have found until now is handed on
                        for worker in workers:
                            worker.stop()

    def _follow(
        self, job: Job, worker: Worker, shared: str, barrier: threading.Barrier, done: Callable[[Job, Outcome], None]
    ) -> None:
        worker.until_ready(self._ready)
        barrier.wait()
        if worker.failure is None:
            with self._device:
                worker.go()
                worker.until_done(self._timed)
        out = _found_by(job, shared)
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        done(job, Outcome(worker.failure, worker.stderr, found))


def _found_by(job: Job, shared: str) -> Path:
    return Path(shared, f"{job.name}.json")


def _started(job: Job, shared: str) -> Worker:
    command = [sys.executable, "-m", __name__, job.module, job.group, job.contender, str(_found_by(job, shared))]
    return Worker(command, str(Path(shared, job.shares)) if job.shares else "")


def work(module: str, group: str, contender: str, out: str) -> None:
    """In a worker: what it finds is written as it comes."""
    if contender.endswith("fla"):
        compile_side_by_side()
    else:  # whether it is importable decides what transformers' models call
        sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    found: dict[str, Any] = {}
    for step in import_module(module).measured(group, contender):
        if step is None:
            print(READY, flush=True)
            sys.stdin.readline()
        else:
            found.update([step])
            write_whole(Path(out), json.dumps(found))


if __name__ == "__main__":
    work(*sys.argv[1:])
