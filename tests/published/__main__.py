"""``python -m tests.published``: published implementations under backend="kda", next to eager.

Repositories are named by commit and path; their clones lie in one folder, as ``DIR/owner/name``. A row says what was
matched, whether all results (and arguments that are written to) equal eager's, and why something was left.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import pkgutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kdacompile.explainer import explain
from tests import published
from tests.compare import worst_error
from tests.published import times
from tests.published.registry import CASES, Case
from tests.published.sources import Library, MissingSource, Repository

HEADER = "| repository | commit | path | case | matched | equal | s | reason |\n|---|---|---|---|---|---|---|---|"
RAISED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""What compiling or running a program under the backend may raise where it is wrong."""

UNBUILT = (*RAISED, ImportError, NameError, SyntaxError, OSError)
"""What a file of another repository, its classes and its own run may raise."""

ROUNDING = 1e-5
"""Relative error up to which results count as equal to eager's, where nothing is rounded to a narrow dtype."""

FRAME = {"draw", "registry", "sources", "times", "__main__"}


@dataclass(frozen=True)
class Row:
    """What became of a case; ``matched`` is None where it was skipped, or is ``broken``: its own code does not run.
    ``declined`` of the matches are left to Inductor, which is faster there by the cost model.
    """

    case: Case
    matched: tuple[str, ...] | None
    error: float
    seconds: float
    reason: str
    broken: bool = False
    bound: float = ROUNDING
    declined: int = 0

    @property
    def complete(self) -> bool:
        return self.matched is not None and not Counter(self.case.finds) - Counter(self.matched)

    @property
    def wrong(self) -> bool:
        return self.matched is not None and not self.error <= self.bound

    def __str__(self) -> str:
        skipped = "broken" if self.broken else "skipped"
        found = skipped if self.matched is None else ", ".join(self.matched) or "-"
        found += f" ({self.declined} by cost)" if self.declined else ""
        equal = "" if self.matched is None else f"{'no' if self.wrong else 'yes'} ({self.error:.0e})"
        where = self.case.repository
        cells = (where.name, where.commit[:8], self.case.path, self.case.name, found, equal, f"{self.seconds:.1f}")
        return "| " + " | ".join((*cells, " ".join(self.reason.replace("|", "/").split()))) + " |"


def measure(case: Case, library: Library) -> Row:
    """Run one case eagerly and under the backend, on equal arguments."""
    started = time.perf_counter()
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        fn, arguments = case.make(library.load(case.repository, case.path, case.only))
        own, theirs = copy.deepcopy((fn, arguments)), (fn, arguments)
        with torch.no_grad():
            exact = _exact(case, library, copy.deepcopy(arguments))
            expected = _run(*theirs)
    except MissingSource as missing:
        return Row(case, None, 0.0, 0.0, str(missing))
    except UNBUILT as error:
        reason = f"cannot be built: {type(error).__name__}: {error}"[:200]
        return Row(case, None, 0.0, time.perf_counter() - started, reason, broken=True)
    with torch.no_grad():
        torch.manual_seed(1)
        try:
            report = explain(own[0])(*own[1])
        except RAISED as error:
            return Row(case, (), math.inf, time.perf_counter() - started, f"{type(error).__name__}: {error}"[:200])
    declined = [rejection.pattern for rejection in report.declined for _ in range(rejection.count)]
    found = (*(match.pattern for match in report.matches), *declined)
    error, bound = worst_error((report.result, own[1]), exact or expected), ROUNDING
    if exact is not None:
        bound = worst_error(expected, exact)
    reasons = [f"{r.reason} [{r.code}]" for r in report.rejections] + [f"break: {b}" for b in report.graph_breaks]
    missed = bool(Counter(case.finds) - Counter(found))
    told = "; ".join(reasons[:3]) if missed else ""
    return Row(case, found, error, time.perf_counter() - started, told, bound=bound, declined=len(declined))


def _run(fn: Any, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(1)
    return fn(*arguments), arguments


def _exact(case: Case, library: Library, arguments: tuple[Any, ...]) -> Any:
    """What the case yields where nothing is rounded to a narrow dtype; None where it does not round."""
    if case.exact is None:
        return None
    return _run(case.exact(library.load(case.repository, case.path, case.only)), arguments)


def collect() -> list[Case]:
    """All cases: every file of this folder that is not part of the frame registers its own."""
    for found in pkgutil.iter_modules(published.__path__):
        if found.name not in FRAME and not found.name.startswith("test_"):
            importlib.import_module(f"{published.__name__}.{found.name}")
    return CASES


def summary(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if row.matched is not None]
    family = [row for row in ran if row.case.finds]
    names = {row.case.repository.name for row in ran}
    broken = sum(row.broken for row in rows)
    return (
        f"{len(ran)} cases of {len(names)} repositories, {len(rows) - len(ran) - broken} skipped, {broken} broken; "
        f"{sum(row.complete for row in family)} of {len(family)} of the family matched, "
        f"{sum(row.complete and row.declined > 0 for row in family)} of them left by cost; "
        f"{sum(row.wrong for row in ran)} wrong"
    )


def by_repository(rows: Sequence[Row]) -> str:
    """Of each repository that ran, how many cases of the family matched, and how many others there are."""
    lines = ["", "| repository | commit | matched | of | others |", "|---|---|---|---|---|"]
    ran: dict[Repository, list[Row]] = {}
    for row in rows:
        if row.matched is not None:
            ran.setdefault(row.case.repository, []).append(row)
    for where, cases in sorted(ran.items(), key=lambda item: item[0].name.lower()):
        family = [row for row in cases if row.case.finds]
        counts = (sum(row.complete for row in family), len(family), len(cases) - len(family))
        lines.append(f"| {where.name} | {where.commit[:8]} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join([*lines, ""])


def print_times(cases: Sequence[Case], library: Library) -> int:
    """The table of times; 1 if none ran, or a first call took longer than the budget."""
    within: list[bool] = []
    print(times.HEADER, flush=True)
    for case in cases:
        try:
            row, kept = times.timed(case, library)
        except MissingSource as missing:
            row = f"| {case.repository.name} | {case.name} | {missing} |"
        else:
            within.append(kept)
        print(row, flush=True)
    print(f"{sum(within)} of {len(within)} first calls within {times.BUDGET:g} s of eager's, without Inductor")
    return 0 if within and all(within) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repos", type=Path, default=Path("repos"), metavar="DIR", help="where the clones lie")
    parser.add_argument("--only", default="", help="cases whose repository, path or name contains this")
    parser.add_argument("--times", action="store_true", help="times beside Inductor alone, of cases of the family")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    library = Library(arguments.repos)
    chosen = [case for case in collect() if arguments.only in str(case)]
    if arguments.times:
        return print_times([case for case in chosen if case.finds], library)
    rows: list[Row] = []
    print(HEADER, flush=True)
    for case in chosen:
        rows.append(measure(case, library))
        print(rows[-1], flush=True)
    print(by_repository(rows))
    print(summary(rows))
    return 0 if rows and not any(row.wrong or row.broken for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
