"""The pass: find linear attention and MLA in one Dynamo graph, prove it, rewrite it, and say what was done and why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from kdacompile import compat
from kdacompile.containment import contain
from kdacompile.graph import prefilter
from kdacompile.graph.build import Tables
from kdacompile.graph.ir import Op
from kdacompile.report.collect import emit, postponed
from kdacompile.report.findings import GraphReport, internal
from kdacompile.report.report import enforce
from kdacompile.report.source import first_own_line
from kdacompile.rewrite import local, strides
from kdacompile.search.search import Search
from kdacompile.settings import Settings

Complete = Callable[[GraphReport, fx.Graph, Settings], GraphReport]
"""Adds to the report on a graph what is known from before capture."""


class Result(NamedTuple):
    """What came of a graph: the graph to go on with, whether something in it was rewritten, and the report."""

    graph: fx.Graph
    found: bool
    report: GraphReport


class Analysis:
    """What the search makes of one Dynamo graph, worked out once, on a copy, when it is asked for first.

    Capture asks whether the graph will be rewritten and which sizes may open, before the graph is compiled. The pass
    puts the same result in the graph's place.
    """

    def __init__(self, gm: fx.GraphModule, settings: Settings, tables: Tables | None = None) -> None:
        """``tables`` are inputs whose values matches may rely on: the caller sees to it that they keep them
        (``Match.holds``).
        """
        self.gm, self.settings, self.tables = gm, settings, tables or {}
        self.captured = gm.graph
        self.text: str | None = None

    @functools.cached_property
    def result(self) -> Result:
        """The rewritten copy. Raises what an error of ours raises."""
        prospects = prefilter.prospects(self.captured)
        if not any(prospects):
            return Result(self.captured, False, GraphReport(nodes=len(self.captured.nodes)))
        self.text = _text(self.captured)
        graph = compat.copy_of_graph(self.captured)
        with compat.no_python_dispatcher(), compat.no_saved_tensors_hooks():
            localised = (prospects.recurrence or prospects.attention) and local.localise(graph)
            search = Search(graph, prospects, self.settings, self.tables, trial=False)
            search.run()
        if localised and not search.found:
            graph = compat.copy_of_graph(self.captured)
        return Result(graph, search.found, search.report())

    def is_of(self, gm: fx.GraphModule) -> bool:
        """Whether this is about just this graph. Passes that ran since it was worked out may have changed it."""
        return gm.graph is self.captured and ("result" not in vars(self) or _text(gm.graph) == self.text)


def _text(graph: fx.Graph) -> str:
    """What a result follows from, the graph's modes included."""
    return f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {graph}"


def run(
    gm: fx.GraphModule, settings: Settings, *, complete: Complete | None = None, analysis: Analysis | None = None
) -> GraphReport:
    """Rewrite ``gm``; emits and returns the report. After an error of ours ``gm`` is as it was.

    ``analysis``: what is known of the graph, if capture has asked for it.
    """

    def attempt() -> GraphReport:
        known = analysis if analysis is not None and analysis.is_of(gm) else Analysis(gm, settings)
        graph, found, report = known.result
        report = complete(report, graph, settings) if complete is not None else report
        if (report.matches and strides.settle(graph)) or found:
            gm.graph = graph
        return report

    def instead(reason: str) -> GraphReport:
        report = GraphReport((), (internal(reason, first_own_line(gm.graph)),), len(gm.graph.nodes))
        if (finish := complete) is None:
            return report  # else there may be ops that stand where functions were lifted
        return contain("completing a report", lambda: finish(report, gm.graph, settings), lambda _: report)

    report = contain("rewriting a graph", attempt, instead, strict=settings.strict)
    report = replace(report, rejections=(*postponed(), *report.rejections))
    if settings.context_parallel is not None:
        from kdacompile.distributed.graphs import spread  # torch.distributed is slow to import

        spread(gm, settings.context_parallel, report.rejections)
    emit(report)
    enforce(report, settings)
    return report


def rewrite_function(graph: fx.Graph, settings: Settings) -> tuple[GraphReport, tuple[Op, ...]]:
    """Rewrite the graph of a function that may become one op, in place. Returns what was done, and the operators that
    made constants of the function: masks, tables and other numbers that follow from sizes.
    """
    constants: tuple[Op, ...] = ()
    with compat.no_python_dispatcher(), compat.no_saved_tensors_hooks():
        search = Search(graph, prefilter.prospects(graph), settings, {}, trial=True)
        if search.has_recurrence:
            constants = tuple(op for op in search.context.functional().ops if op.out.const)
            search.run()
    return search.report(), constants
