"""``python -m tests.matrix``: measure every cell that the record lacks, in a process for each model and length.

What is not rewritten runs eagerly unless ``--inner`` names another compiler: what Inductor makes of the rest is
Inductor's, and a tenth of the time is enough to see what is ours. Rows go to a record as they are measured; an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.matrix.cells import INNERS, LENGTHS, MODES, NUMBERS, Cell, Row
from tests.matrix.record import HEADER, Record, how_shown, line, markdown
from tests.models.zoo import CASES

_TICK = 0.5  # seconds between two looks at the workers
Unit = list[Cell]


@dataclass
class Worker:
    """A process that measures a unit: the cells of one model and length."""

    unit: Unit
    process: subprocess.Popen[bytes]
    rows: int  # of the unit, when last looked at
    since: float  # when that number last grew


class Pool:
    """Runs units in up to ``jobs`` processes. One that dies or takes too long costs the cell it was at, no more."""

    def __init__(self, record: Record, jobs: int, timeout: float) -> None:
        self.record = record
        self.jobs = jobs
        self.timeout = timeout
        self.running: list[Worker] = []

    def run(self, units: Sequence[Unit]) -> None:
        waiting = list(units)
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.jobs:
                    self.start(waiting.pop(0))
                time.sleep(_TICK)
                for worker in list(self.running):
                    if self.is_over(worker):
                        self.running.remove(worker)
                        waiting[:0] = [rest for rest in [self.rest(worker)] if rest]
        finally:
            for worker in self.running:
                worker.process.kill()

    def start(self, unit: Unit) -> None:
        cells = json.dumps([asdict(cell) for cell in unit])
        command = [sys.executable, "-m", "tests.matrix.worker", str(self.record.path), cells]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self.running.append(Worker(unit, subprocess.Popen(command, env=environment), 0, time.monotonic()))

    def is_over(self, worker: Worker) -> bool:
        if worker.process.poll() is not None:
            return True
        done = self.record.rows()
        rows = sum(cell in done for cell in worker.unit)
        if rows > worker.rows:
            worker.rows, worker.since = rows, time.monotonic()
        if time.monotonic() - worker.since < self.timeout:
            return False
        worker.process.kill()
        worker.process.wait()
        return True

    def rest(self, worker: Worker) -> Unit:
        """The cells a finished worker has left, after a failed row for the one it died at."""
        status = worker.process.returncode
        died_at = self.record.unfinished(worker.unit) if status else None
        if died_at is not None:
            row = Row.failed(died_at, f"the process ended with status {status}")
            self.record.add(row)
            print(line(row), flush=True)
        elif status:
            raise SystemExit(f"a worker ended with status {status} before its first cell")
        done = self.record.rows()
        return [cell for cell in worker.unit if cell not in done]


def wanted(args: argparse.Namespace) -> list[Cell]:
    """The chosen cells, the longest first: they take the most time and are the likeliest to fail."""
    lengths = sorted(map(int, args.lengths), reverse=True)
    return [
        Cell(model, length, numbers, what, args.inner)
        for length in lengths
        for model in args.models
        for numbers in args.numbers
        for what in args.what
    ]


def units(cells: Sequence[Cell]) -> list[Unit]:
    grouped: dict[tuple[str, int], Unit] = {}
    for cell in cells:
        grouped.setdefault((cell.model, cell.length), []).append(cell)
    return list(grouped.values())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lengths = [str(length) for length in LENGTHS]
    parser.add_argument("--models", type=_names, default=list(CASES), help="comma-separated; default: all")
    parser.add_argument("--lengths", type=_names, default=lengths, help=f"default: {','.join(lengths)}")
    parser.add_argument("--numbers", type=_names, default=list(NUMBERS), help=f"default: {','.join(NUMBERS)}")
    parser.add_argument("--what", type=_names, default=list(MODES), help=f"default: {','.join(MODES)}")
    parser.add_argument("--inner", choices=INNERS, default="eager", help="who compiles the rest; default: eager")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time; default: all cores")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a cell may take; default: 900")
    parser.add_argument("--record", type=Path, default=Path("matrix.jsonl"), help="default: matrix.jsonl")
    parser.add_argument("--markdown", type=Path, help="write a summary there")
    args = parser.parse_args(argv)
    for chosen, known in ((args.models, CASES), (args.numbers, NUMBERS), (args.what, MODES)):
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return args


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no worker is left behind
    record = Record(args.record)
    cells = wanted(args)
    known = record.rows()
    print(HEADER + "  verdict", flush=True)
    for cell in cells:
        if cell in known:
            print(line(known[cell]), flush=True)
    Pool(record, args.jobs, args.timeout).run(units([cell for cell in cells if cell not in known]))
    done = record.rows()
    rows = [done[cell] for cell in cells]
    if args.markdown:
        args.markdown.write_text(markdown(rows) + "\n")
    passed = sum(not row.problems for row in rows)
    print(f"{passed} of {len(rows)} cells pass; {how_shown(rows)}")
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
