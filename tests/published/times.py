"""Times of published implementations beside Inductor alone: ``python -m tests.published --times``.

The first call, caches empty, of eager mode, of this backend alone (what is not rewritten runs eagerly) and of both
compilers; then calls of both in turn, with the spread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.compiler import config

from kdacompile.bench.measure import seconds_of, timings
from tests.published.registry import Case
from tests.published.sources import Library

BUDGET = 10.0
"""Seconds that this backend alone may take for a first call, beyond eager mode's."""

COLUMNS = ("repository", "case", "eager, first", "ours alone, first", "Inductor, first", "kda, first")
HEADER = f"| {' | '.join((*COLUMNS, 'Inductor', 'kda', 'times faster'))} |\n|{'---|' * (len(COLUMNS) + 3)}"
COMPILERS: Mapping[str, dict[str, Any]] = {
    "ours": {"backend": "kda", "options": {"kda.inner": "eager"}},
    "inductor": {"backend": "inductor"},
    "kda": {"backend": "kda"},
}


def start() -> None:
    """What compilers do but once in a process; nothing is read from disk from here on."""
    config.force_disable_caches = True
    torch.compile(torch.square)(torch.zeros(8))


def timed(case: Case, library: Library) -> tuple[str, bool]:
    """A row of the table, and whether the first call was within the budget. Raises what the case raises."""
    calls: dict[str, Callable[[], object]] = {"eager": _call(case, library, lambda fn: fn)}
    calls |= {
        name: _call(case, library, lambda fn, how=how: torch.compile(fn, **how)) for name, how in COMPILERS.items()
    }
    first: dict[str, float] = {}
    with torch.no_grad():
        for name, call in calls.items():
            torch.compiler.reset()
            first[name] = seconds_of(call)
        del calls["eager"], calls["ours"]
        torch.compiler.reset()
        for call in calls.values():
            call()
        found = timings(calls)
    times = [f"{first[name]:.2f} s" for name in ("eager", *COMPILERS)]
    gain = found["inductor"].median / found["kda"].median
    cells = (case.repository.name, case.name, *times, str(found["inductor"]), str(found["kda"]), f"{gain:.2f}")
    return f"| {' | '.join(cells)} |", first["ours"] <= first["eager"] + BUDGET


def _call(case: Case, library: Library, compiled: Callable[[Any], Any]) -> Callable[[], object]:
    torch.manual_seed(0)
    fn, arguments = copy.deepcopy(case.make(library.load(case.repository, case.path, case.only)))
    run = compiled(fn)
    return lambda: run(*arguments)
