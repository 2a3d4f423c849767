"""``python -m tests.faults``: an error at every function boundary in turn; each must leave what torch alone gives.

Rows go to a file as they come; ``--resume`` leaves out the boundaries that it has rows of.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path

import torch

# Torch-private: switches Inductor's caches on disk off.
from torch._inductor import config as inductor_config

from kdacompile import containment
from tests.faults.inject import Fault, boundaries, in_children
from tests.faults.models import MODELS, Case

GOOD = ("contained", "survived", "unreached")


def outcome(case: Case) -> str:
    """What came of a fault: "contained" or "survived" (torch's results), or what is wrong."""
    try:
        results, report = case.compile()
    except Exception as error:  # noqa: BLE001 - whatever reaches the caller is the finding
        return f"ESCAPED as {type(error).__name__}: {str(error)[:200]}"
    if not case.agrees(results, report):
        return "WRONG"
    told = any(rejection.code == "internal" for rejection in report.rejections)
    return "contained" if told else "survived"


class Record:
    """A file of rows: model, boundary, outcome. Children of a process add to it; each row is one write."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        if not resume:
            path.write_text("")

    def rows(self, model: str) -> dict[str, str]:
        """The outcome at each boundary, the last one told."""
        split = [line.split("\t", 2) for line in self.path.read_text().splitlines()]
        return {boundary: outcome for name, boundary, outcome in split if name == model}

    def add(self, model: str, fault: Fault, outcome: str) -> None:
        outcome = " ".join(outcome.split())
        with self.path.open("a") as file:
            file.write(f"{model}\t{fault.boundary}\t{outcome}\n")
        if not outcome.startswith(GOOD):
            print(f"{model}: {fault}: {outcome}", flush=True)


def table(record: Record, models: list[str]) -> bool:
    """Print how many faults came to what; whether none was bad."""
    bad = 0
    for name in models:
        rows = record.rows(name).values()
        counts = Counter(row.split()[0] for row in rows)
        bad += sum(count for kind, count in counts.items() if kind not in GOOD)
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(f"{name}: {len(rows)} faults: {listed}", flush=True)
    return bad == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--inner", default="aot_eager", choices=["eager", "aot_eager", "inductor"])
    parser.add_argument("--every", type=int, default=1, help="take every so many boundaries only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time; default: all cores")
    parser.add_argument("--rows", type=Path, default=Path("fault-results.tsv"), help="the file of rows")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has rows of")
    arguments = parser.parse_args()
    os.environ.pop(containment.RAISE, None)
    logging.getLogger("kdacompile").setLevel(logging.CRITICAL)
    models = arguments.model or list(MODELS)
    record = Record(arguments.rows, resume=arguments.resume)
    with inductor_config.patch(force_disable_caches=True):
        for name in models:
            case, known = Case(name, arguments.inner), record.rows(name)
            case.compile()  # loads what a process loads once
            faults = boundaries(case.compile)[:: arguments.every]
            left = [fault for fault in faults if fault.boundary not in known]
            print(f"{name}: {len(faults)} faults, {len(left)} of them to be raised", flush=True)
            if left:
                in_children(left, partial(outcome, case), arguments.processes, partial(record.add, name))
            torch._dynamo.reset()
    return int(not table(record, models))


if __name__ == "__main__":
    raise SystemExit(main())
