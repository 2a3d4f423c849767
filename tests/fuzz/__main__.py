"""``python -m tests.fuzz``: so many programs or minutes, in so many processes, and a table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import table
from tests.fuzz.worker import FAILED

Row = dict[str, Any]


class Pool:
    """Processes that share the programs of a seed by their number. One that dies costs the program it was at."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.ends = time.time() + arguments.minutes * 60
        self.at: dict[int, subprocess.Popen[bytes]] = {}

    def record(self, share: int) -> Path:
        return self.folder / f"rows-{share}.jsonl"

    def start(self, share: int, first: int) -> None:
        given = self.arguments
        numbers = [given.seed, first, given.programs, given.processes, given.program_seconds]
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.worker", str(self.record(share)), str(self.ends)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KDA_RAISE_INTERNAL_ERRORS": "1"}
        self.at[share] = subprocess.Popen([*command, *map(str, numbers)], env=environment)

    def run(self) -> list[Row]:
        first = self.arguments.first
        for share in range(self.arguments.processes):
            self.record(share).unlink(missing_ok=True)
            self.start(share, first + share)
        try:
            while self.at:
                time.sleep(0.2)
                for share, process in list(self.at.items()):
                    if process.poll() is not None:
                        self._over(share, process.returncode)
        finally:
            for process in self.at.values():
                process.kill()
        return [row for share in range(self.arguments.processes) for row in self._rows(share) if "kind" in row]

    def _over(self, share: int, status: int) -> None:
        del self.at[share]
        rows = list(self._rows(share))
        if status == 0:
            return
        begun = rows[-1]["program"] if rows else None
        if begun is None:
            raise SystemExit(f"a worker ended with status {status} before its first program")
        died = {
            "program": begun,
            "kind": "crashed",
            "detail": f"the process ended with status {status}",
            "seconds": 0.0,
        }
        with self.record(share).open("a") as record:
            record.write(json.dumps(died) + "\n")
        self.start(share, begun + self.arguments.processes)

    def _rows(self, share: int) -> Iterator[Row]:
        if self.record(share).exists():
            yield from map(json.loads, self.record(share).read_text().splitlines())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; default: when all have run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=3000, help="default: 3000")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program; default: 0")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--program-seconds", type=int, default=60, help="what a program may take; default: 60")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-results"), help="where failing programs go")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    rows = Pool(arguments, arguments.folder).run()
    print(table.text(rows, arguments.seed, time.time() - started))
    return int(any(row["kind"] in FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
