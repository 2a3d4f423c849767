"""The pass: find linear attention and MLA in one Dynamo graph, prove it, rewrite it, and say what was done and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from kdacompile import compat
from kdacompile.containment import contain
from kdacompile.graph import prefilter
from kdacompile.graph.readings import Readings
from kdacompile.report.collect import emit, postponed
from kdacompile.report.findings import GraphReport, internal
from kdacompile.report.report import enforce
from kdacompile.report.source import first_own_line
from kdacompile.rewrite import fresh_caches, local
from kdacompile.rewrite.held import Tables
from kdacompile.rewrite.search import Search
from kdacompile.settings import Settings

Complete = Callable[[GraphReport, fx.GraphModule, Settings], GraphReport]


def run(
    gm: fx.GraphModule, settings: Settings, tables: Tables | None = None, complete: Complete | None = None
) -> GraphReport:
    """Rewrite ``gm`` in place; emits and returns the report. After an error of ours ``gm`` is as it was.

    ``tables`` are inputs whose values matches may rely on: the caller sees to it that they hold (``Match.holds``).
    ``complete`` adds to the report what is known from before capture.
    """
    before: list[fx.Graph] = []

    def attempt() -> GraphReport:
        if prefilter.is_interesting(gm.graph):
            before.append(compat.copy_of_graph(gm.graph))
        return _completed(gm, settings, tables, complete)

    def instead(reason: str) -> GraphReport:
        for graph in before:
            gm.graph = graph
        report = GraphReport((), (internal(reason, first_own_line(gm.graph)),), len(gm.graph.nodes))
        if (finish := complete) is None:
            return report  # else there may be ops that stand where functions were lifted
        return contain("completing a report", lambda: finish(report, gm, settings), lambda _: report)

    report = contain("rewriting a graph", attempt, instead, strict=settings.strict)
    report = replace(report, rejections=(*postponed(), *report.rejections))
    emit(report)
    enforce(report, settings)
    return report


def _completed(gm: fx.GraphModule, settings: Settings, tables: Tables | None, complete: Complete | None) -> GraphReport:
    report = rewrite(gm, settings, tables)
    if complete is not None:
        report = complete(report, gm, settings)
    if report.matches and fresh_caches.settle(gm.graph):
        gm.recompile()
    return report


def rewrite(
    gm: fx.GraphModule, settings: Settings, tables: Tables | None = None, *, trial: bool = False
) -> GraphReport:
    """Rewrite ``gm`` in place and say what was done. ``trial``: it is a function that may become one op (``lift``)."""
    with compat.no_python_dispatcher(), compat.no_saved_tensors_hooks():
        captured = local.localise(gm.graph)
        search = Search(Readings(gm), settings, tables or {}, trial=trial)
        if search.has_recurrence or search.has_attention:
            search.run()
        if captured is not None and not search.found:
            gm.graph = captured
    return search.report()
