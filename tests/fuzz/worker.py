"""One process of the pool: ``python -m tests.fuzz.worker RECORD ENDS SEED FIRST PROGRAMS STRIDE SECONDS``."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import bases, scripts
from tests.fuzz.judge import Judge, Verdict
from tests.fuzz.recipes import Recipe, recipe
from tests.fuzz.shrink import shrunk

Row = dict[str, Any]

FAILED = ("wrong", "crashed")
SHRINKING = 40
"""Seconds that a failing program is made smaller for."""


def judged(judge: Judge, seed: int, number: int, seconds: int) -> Row:
    """The row of one program."""
    made = recipe(seed, number)
    if made is None:
        return {"program": number, "kind": "not drawn", "seconds": 0.0}
    verdict = judge(made, seconds)
    return {
        "program": number,
        "kind": verdict.kind,
        "base": made.base,
        "source": bases.base(made.base).kind,
        "groups": [mutation.group for mutation in made.mutations],
        "patterns": verdict.patterns,
        "codes": verdict.codes,
        "detail": verdict.detail,
        "seconds": verdict.seconds,
    }


def smaller(judge: Judge, made: Recipe, kind: str, seconds: int) -> tuple[Recipe, Verdict]:
    until = time.monotonic() + SHRINKING

    def fails(candidate: Recipe) -> bool:
        return time.monotonic() < until and judge(candidate, seconds).kind == kind

    found = shrunk(made, fails)
    return found, judge(found, seconds)


def judged_already(folder: Path) -> set[int]:
    """Programs that a run which was interrupted has rows of."""
    rows = (row for record in folder.glob("rows-*.jsonl") for row in rows_of(record))
    return {row["program"] for row in rows if "kind" in row}


def rows_of(record: Path) -> Iterator[Row]:
    """The rows of a record; the last line may have been cut off."""
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def main() -> int:
    record, ends = Path(sys.argv[1]), float(sys.argv[2])
    seed, first, programs, stride, seconds = map(int, sys.argv[3:])
    for name in ("torch", "kdacompile"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    judge, done = Judge(), judged_already(record.parent)
    with record.open("a") as file:
        for number in range(first, programs, stride):
            if time.time() > ends:
                break
            if number in done:
                continue
            print(json.dumps({"program": number}), file=file, flush=True)
            row = judged(judge, seed, number, seconds)
            print(json.dumps(row), file=file, flush=True)
            made = recipe(seed, number) if row["kind"] in FAILED else None
            if made is not None:
                print(f"program {number} of seed {seed}: {row['kind']}: {row['detail'][:300]}", flush=True)
                found, verdict = smaller(judge, made, row["kind"], seconds)
                scripts.write(found, verdict, record.parent / f"{row['kind']}-{seed}-{number}.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
