"""``python -m tests.fuzz``: so many programs or minutes, in so many processes, and a table.

Rows go to the folder as they come. Interrupted (SIGTERM, Ctrl-C, ``--minutes``), the table of what has run is printed,
and ``--resume`` goes on from there, in the same tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kdacompile.store.disk import source_fingerprint
from tests.fuzz import table
from tests.fuzz.worker import FAILED, Row, rows_of

TOTALS = 60.0
"""Seconds between two lines of running totals."""


class Interrupted(BaseException):
    """Somebody asked the run to end."""


class Pool:
    """Processes that share the programs of a seed by their number. One that dies costs the program it was at."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.ends = time.time() + arguments.minutes * 60
        self.at: dict[int, subprocess.Popen[bytes]] = {}

    def record(self, share: int) -> Path:
        return self.folder / f"rows-{share}.jsonl"

    def prepare(self) -> None:
        """An empty folder, or one with rows of this seed and this tree."""
        mark = self.folder / "run.json"
        run = {"seed": self.arguments.seed, "tree": fingerprint()}
        if self.arguments.resume:
            if not mark.exists() or json.loads(mark.read_text()) != run:
                raise SystemExit(f"{self.folder} holds no run of this seed in this tree to go on with")
            return
        for record in self.folder.glob("rows-*.jsonl"):
            record.unlink()
        mark.write_text(json.dumps(run))

    def start(self, share: int, first: int) -> None:
        given = self.arguments
        numbers = [given.seed, first, given.programs, given.processes, given.program_seconds]
        command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.worker", str(self.record(share)), str(self.ends)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KDA_RAISE_INTERNAL_ERRORS": "1"}
        self.at[share] = subprocess.Popen([*command, *map(str, numbers)], env=environment)

    def run(self) -> None:
        first, said = self.arguments.first, time.time()
        try:
            for share in range(self.arguments.processes):
                self.start(share, first + share)
            while self.at:
                time.sleep(0.2)
                for share, process in list(self.at.items()):
                    if process.poll() is not None:
                        self._over(share, process.returncode)
                if time.time() > said + TOTALS:
                    said = time.time()
                    print(table.totals(self.rows()), flush=True)
        except (Interrupted, KeyboardInterrupt):
            print("interrupted", flush=True)
        finally:
            for process in self.at.values():
                process.kill()

    def _over(self, share: int, status: int) -> None:
        del self.at[share]
        rows = list(rows_of(self.record(share)))
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

    def rows(self) -> list[Row]:
        """What has been judged, once a program, in the order of their numbers."""
        found = {
            row["program"]: row
            for record in self.folder.glob("rows-*.jsonl")
            for row in rows_of(record)
            if "kind" in row
        }
        return [found[number] for number in sorted(found)]


def fingerprint() -> str:
    """A hash of what is tested, and of the tests that programs and their judge are made of."""
    digest = hashlib.sha256(source_fingerprint().encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long; default: when all have run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=3000, help="default: 3000")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program; default: 0")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--program-seconds", type=int, default=60, help="what a program may take; default: 60")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-results"), help="where failing programs go")
    parser.add_argument("--resume", action="store_true", help="leave out what the folder has rows of")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pool = Pool(arguments, arguments.folder)
    pool.prepare()

    def interrupt(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGTERM, interrupt)
    pool.run()
    rows = pool.rows()
    print(table.text(rows, arguments.seed, arguments.programs - arguments.first))
    return int(any(row["kind"] in FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
