"""``python -m tests.soundness [pytest's arguments]``: how the matches that tests make were shown to hold.

Counted is every match of every test: exactly, or by probes and what stood in the way of an exact check. Without
arguments the tests are spellings, MLA, models, layers and lifted functions. ``-p tests.soundness.__main__`` counts in a
run of pytest's own, ``-n`` included.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from kdacompile import compat
from kdacompile.patterns.engine.match import Match
from kdacompile.search.matching import Matching

FOLDERS = ("tests/spellings", "tests/mla", "tests/models", "tests/backend", "tests/lifting")
KIND = {True: "MLA", False: "linear attention"}

counts: Counter[tuple[str, str]] = Counter()
"""Matches by kind, and by how they were shown."""
_rewrite = Matching.rewrite


def _counting(self: Matching[Any, Any], graph: Any, match: Match[Any]) -> Any:
    failure = _rewrite(self, graph, match)
    if failure is None and match.candidate.anchor.name not in compat.OWN_OPS:
        counts[KIND[match.binding.name == "mla"], match.shown] += 1
    return failure


Matching.rewrite = _counting  # type: ignore[method-assign]


class Workers:
    """What the processes of pytest-xdist have counted."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for kind, shown, number in getattr(node, "workeroutput", {}).get("shown", []):
            counts[kind, shown] += number


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Workers())


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["shown"] = [(*key, number) for key, number in counts.items()]


def table() -> str:
    lines = ["| matches | shown exactly | by probes | share | in the way |", "|---|---|---|---|---|"]
    for kind in sorted({kind for kind, _ in counts}):
        own = {shown: number for (one, shown), number in counts.items() if one == kind}
        exact, every = own.get("exactly", 0), sum(own.values())
        ways = Counter({shown: number for shown, number in own.items() if shown != "exactly"}).most_common()
        why = "; ".join(f"{number} {shown.removeprefix('by probes ')}" for shown, number in ways) or "nothing"
        lines.append(f"| {kind} | {exact} | {every - exact} | {exact / every:.1%} | {why} |")
    return "\n".join(lines)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(table())


if __name__ == "__main__":
    from tests.soundness import __main__ as plugin

    sys.exit(pytest.main([*(sys.argv[1:] or FOLDERS), "-q"], plugins=[plugin]))
