"""Times of published implementations beside Inductor alone: ``python -m tests.published --times``.

The first call of eager mode, of this backend alone (what is not rewritten runs eagerly) and of both compilers, each in
a process of its own with empty caches; then calls of both compilers in turn, with the spread.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kdacompile.bench.measure import Speedup, Timing, samples_of, seconds_of
from kdacompile.bench.relay import LONGEST, Steps, Worker
from kdacompile.bench.suites import ROUNDS
from tests.published.registry import CASES, Case
from tests.published.sources import Library

BUDGET = 10.0
"""Seconds that this backend alone may take for a first call, beyond eager mode's."""

ROUND_SECONDS = 0.3
COLUMNS = ("repository", "case", "eager, first", "ours alone, first", "Inductor, first", "kda, first")
HEADER = f"| {' | '.join((*COLUMNS, 'Inductor', 'kda', 'kda is'))} |\n|{'---|' * (len(COLUMNS) + 3)}"
COMPILERS: Mapping[str, dict[str, Any]] = {
    "ours": {"backend": "kda", "options": {"kda.inner": "eager"}},
    "inductor": {"backend": "inductor"},
    "kda": {"backend": "kda"},
}
TIMED = ("inductor", "kda")
Found = Mapping[str, dict[str, Any]]
"""What each contender's process has found, by name; ``failure`` where it did not come to its end."""


def timed(case: Case, library: Library) -> tuple[str, bool]:
    """A row of the table, and whether the first call was within the budget. Raises ``MissingSource``."""
    library.load(case.repository, case.path, case.only)
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="published-") as folder, ExitStack() as stack:
        outs = {name: Path(folder, f"{name}.json") for name in ("eager", *COMPILERS)}
        for name, out in outs.items():
            group = json.dumps([str(library.folder), str(case)])
            command = ["-m", "kdacompile.bench.relay", __name__, group, name, str(out)]
            workers[name] = stack.enter_context(Worker([sys.executable, *command]))
            workers[name].until_ready(LONGEST)
        for _ in range(ROUNDS):
            for name in TIMED:
                workers[name].go()
                workers[name].until_ready(LONGEST)
        for worker in workers.values():
            worker.until_done(LONGEST)
        found: dict[str, dict[str, Any]] = {}
        for name, out in outs.items():
            found[name] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
            if workers[name].failure is not None:
                found[name]["failure"] = (workers[name].stderr or [workers[name].failure])[-1]
    return row(case, found)


def row(case: Case, found: Found) -> tuple[str, bool]:
    """The row, and whether the first call was within the budget; one with a failure is not."""
    failures = [f"{name}: {figures['failure']}" for name, figures in found.items() if "failure" in figures]
    if failures:
        return f"| {case.repository.name} | {case.name} | {'; '.join(failures)} |", False
    first = {name: figures["first"] for name, figures in found.items()}
    inductor, kda = (Timing.of(found[name]["samples"]) for name in TIMED)
    times = [f"{first[name]:.2f} s" for name in ("eager", *COMPILERS)]
    cells = (case.repository.name, case.name, *times, str(inductor), str(kda), str(Speedup.of(inductor, kda)))
    return f"| {' | '.join(cells)} |", first["ours"] <= first["eager"] + BUDGET


def measured(group: str, contender: str) -> Steps:
    """One contender on one case, in a process of its own (``kdacompile.bench.relay``): its first call, and of what is
    timed a round for every line that it is sent. ``group``: the folder of the clones, and the case.
    """
    folder, name = json.loads(group)
    importlib.import_module("tests.published.__main__").collect()
    case = next(case for case in CASES if str(case) == name)
    torch.manual_seed(0)
    fn, arguments = copy.deepcopy(case.make(Library(Path(folder)).load(case.repository, case.path, case.only)))
    if contender != "eager":  # what a compiler does but once in a process, or on a machine
        importlib.import_module("kdacompile.backend")
        torch.compile(torch.square)(torch.zeros(8))
        torch.compiler.reset()
        fn = torch.compile(fn, **COMPILERS[contender])
    with torch.no_grad():
        yield "first", seconds_of(lambda: fn(*arguments))
        yield None
        samples: list[float] = []
        for _ in range(ROUNDS if contender in TIMED else 0):
            fn(*arguments)
            samples += samples_of(lambda: fn(*arguments), ROUND_SECONDS)
            yield None
        yield "samples", samples
