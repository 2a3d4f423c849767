"""Collecting reports: ``with collecting() as report:`` gathers what the pass emits while the block runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from threading import local

from torch import fx

from kdacompile import compat
from kdacompile.report.findings import GraphBreak, GraphReport, Rejection, internal
from kdacompile.report.report import Report, first_line

log = logging.getLogger(__name__)

# A context variable, not a module-level list: compilations on different threads must not mix their reports.
_collectors: ContextVar[tuple[Report, ...]] = ContextVar("kdacompile_collectors", default=())


@contextmanager
def collecting() -> Generator[Report, None, None]:
    """Gather the reports of every compilation in this block; blocks nest, and each enclosing one sees everything.

    What is compiled already is not compiled again, by a second ``module.compile(backend="kda")`` either: it is told
    once, until ``torch._dynamo.reset()``.
    """
    report, before = Report(), compat.graph_breaks()
    token = _collectors.set((*_collectors.get(), report))
    try:
        yield report
    finally:
        _collectors.reset(token)
        report.graph_breaks += _unlocated(report.graph_breaks, before)


def _unlocated(located: list[GraphBreak], before: Mapping[str, int]) -> list[GraphBreak]:
    """Breaks Dynamo counted that ended no graph (nothing had been captured yet): the reason is all there is."""
    known = {graph_break.reason for graph_break in located}
    new = [first_line(reason) for reason, count in compat.graph_breaks().items() if count > before.get(reason, 0)]
    return [GraphBreak(reason, "") for reason in new if reason not in known]


class _Postponed(local):
    """Of one thread, as compilations are."""

    rejections: tuple[Rejection, ...] = ()
    seconds: float = 0.0
    """What capture spent on functions that may become an op."""


_postponed = _Postponed()


def postpone(reason: str, source: str = "unknown") -> None:
    """Tell this internal error with the thread's next report: where it happened there was none."""
    rejection = internal(reason, source)
    if rejection not in _postponed.rejections:
        _postponed.rejections = (*_postponed.rejections, rejection)


@contextmanager
def lifting() -> Generator[None, None, None]:
    """Count the time of this block in the thread's next report."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _postponed.seconds += time.perf_counter() - start


def with_postponed(report: GraphReport) -> GraphReport:
    """The report with what was postponed, once."""
    told, spent = _postponed.rejections, _postponed.seconds
    _postponed.rejections, _postponed.seconds = (), 0.0
    seconds = {"lift": spent, **report.seconds} if spent else report.seconds
    return replace(report, rejections=(*told, *report.rejections), seconds=seconds)


def emit_break(gm: fx.GraphModule) -> None:
    """Called once a captured graph: tell who collects why it ended where it did."""
    if (found := compat.graph_break_behind(gm)) is None:
        return
    reason, source = found
    for report in _collectors.get():
        report.graph_breaks.append(GraphBreak(first_line(reason), source))


def emit(graph: GraphReport) -> None:
    """Called by the pass once a graph: log it, write it where torch traces, and hand it to whoever collects."""
    compat.trace_artifact("kdacompile_report", lambda: str(Report(graphs=[graph])))
    for match in graph.matches:
        log.info("matched %s", match)
    for rejection in graph.rejections:
        log.info("rejected %s", rejection)
    for report in _collectors.get():
        report.add(graph)
