"""The pass: find linear attention and MLA in one Dynamo graph, prove it, rewrite it, and say what was done and why."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from kdacompile import compat
from kdacompile.containment import contain
from kdacompile.graph import edit, prefilter
from kdacompile.graph.build import Tables, overwritten
from kdacompile.graph.ir import Graph, Op
from kdacompile.graph.prefilter import Prospects
from kdacompile.patterns import canonical
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.match import Code
from kdacompile.patterns.mla.spec import LATENT_ATTENTION
from kdacompile.patterns.recurrence.spec import CALLS, RECURRENCE
from kdacompile.report import trace
from kdacompile.report.collect import emit, with_postponed
from kdacompile.report.findings import GraphReport, Match, Rejection, internal
from kdacompile.report.source import first_own_line, source_of
from kdacompile.rewrite import local, mapped, strides
from kdacompile.rewrite.attention import MlaSplice
from kdacompile.rewrite.linear_attention import LinearAttentionSplice
from kdacompile.search.matching import Context, Matching
from kdacompile.settings import Settings

Lifted = Callable[[fx.Graph], Iterable[Match]]
"""What is known of ops that stand in a graph where functions were lifted."""


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

    def __init__(self, gm: fx.GraphModule, settings: Settings) -> None:
        self.captured, self.settings = gm.graph, settings
        self.tables: Tables = {}
        """Inputs whose values matches may rely on: who gives some sees to it that they keep them (``Match.holds``)."""
        self.text: str | None = None

    @functools.cached_property
    def prospects(self) -> Prospects:
        return prefilter.prospects(self.captured)

    @functools.cached_property
    def result(self) -> Result:
        """The rewritten copy. Raises what an error of ours raises."""
        prospects = self.prospects
        if not prospects.anything:
            return Result(self.captured, False, GraphReport(nodes=len(self.captured.nodes)))
        with deadline.uncollected():
            return self._searched(prospects)

    def _searched(self, prospects: Prospects) -> Result:
        self.text = _text(self.captured)
        graph = compat.copy_of_graph(self.captured)
        with compat.no_python_dispatcher(), compat.no_saved_tensors_hooks():
            prepared = [compat.transforms(graph) and mapped.unmap(graph)]
            if prospects.subclasses:
                prepared += [local.localise(graph), local.open_weights(graph)]
            search = Search(graph, prospects, self.settings, self.tables, trial=False)
            search.run()
        if any(prepared) and not search.found:
            graph = compat.copy_of_graph(self.captured)
        return Result(graph, search.found, search.report())

    def is_of(self, gm: fx.GraphModule) -> bool:
        """Whether this is about just this graph. Passes that ran since it was worked out may have changed it."""
        return gm.graph is self.captured and ("result" not in vars(self) or _text(gm.graph) == self.text)


def _text(graph: fx.Graph) -> str:
    """What a result follows from, the graph's modes included."""
    return f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {graph}"


def run(
    gm: fx.GraphModule, settings: Settings, *, lifted: Lifted = lambda _: (), analysis: Analysis | None = None
) -> GraphReport:
    """Rewrite ``gm``; emits and returns the report. After an error of ours ``gm`` is as it was.

    ``analysis``: what is known of the graph, if capture has asked for it.
    """

    def with_lifted(report: GraphReport, graph: fx.Graph) -> GraphReport:
        return replace(report, matches=(*lifted(graph), *report.matches))

    def attempt() -> GraphReport:
        known = analysis if analysis is not None and analysis.is_of(gm) else Analysis(gm, settings)
        graph, found, report = known.result
        report = with_lifted(report, graph) if known.prospects.ops else report
        if (report.matches and known.prospects.grows and strides.settle(graph)) or found:
            gm.graph = graph
        return report

    def instead(reason: str) -> GraphReport:
        report = GraphReport((), (internal(reason, first_own_line(gm.graph)),), len(gm.graph.nodes))
        return contain("completing a report", lambda: with_lifted(report, gm.graph), lambda _: report)

    report = contain("rewriting a graph", attempt, instead, strict=settings.strict)
    report = with_postponed(report)
    if settings.context_parallel is not None:
        from kdacompile.distributed.graphs import spread  # torch.distributed is slow to import

        spread(gm, settings.context_parallel, report.rejections)
    emit(report)
    return report


class Rewritten(NamedTuple):
    """What was done to the graph of a function that may become one op."""

    report: GraphReport
    constants: tuple[Op, ...]
    """The operators that made masks, tables and other numbers that follow from sizes."""
    readings: tuple[object, ...]
    """How its regions were read, for other sizes."""


def rewrite_function(graph: fx.Graph, settings: Settings, likely: Sequence[object] = ()) -> Rewritten:
    """Rewrite such a graph in place. ``likely``: how its regions were read at other sizes."""
    constants: tuple[Op, ...] = ()
    with compat.no_python_dispatcher(), compat.no_saved_tensors_hooks():
        search = Search(graph, prefilter.prospects(graph), settings, {}, trial=True)
        search.context.likely = likely
        if search.has_recurrence:
            constants = tuple(op for op in search.context.functional().ops if op.out.const)
            search.run()
    return Rewritten(search.report(), constants, tuple(search.context.held))


# -- one search of one graph: latent attention, then linear attention -------------------------------------------------

log = logging.getLogger(__name__)


class Search:
    """The patterns in a graph, which is rewritten in place: what was found, and why the rest was left alone."""

    def __init__(
        self, graph: fx.Graph, prospects: Prospects, settings: Settings, tables: Tables, *, trial: bool
    ) -> None:
        self.graph = graph
        self.tables = tables
        self.has_recurrence = prospects.recurrence or prospects.ops
        self.has_attention = prospects.attention and not trial  # a function that may become one op is a recurrence
        self.prospects = prospects
        self.copied = False
        """Whether an operand of an op was copied."""
        self.applied: list[edit.Rule] = []
        """Canonical rules that the functional graph has seen."""
        self.seconds: dict[str, float] = {}
        self.nodes = len(graph.nodes)
        self.subclasses: list[Rejection] = []
        self.context = Context(graph, settings, self.timed, trial=trial, loops=self.has_recurrence and not trial)
        self.recurrence = Matching(RECURRENCE, LinearAttentionSplice, self.context)
        self.calls = Matching(CALLS, LinearAttentionSplice, self.context, tells=False)
        """Ops that were there already: what they absorb is told of nobody."""
        self.attention = Matching(LATENT_ATTENTION, MlaSplice, self.context)

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def run(self) -> None:
        if compat.transforms(self.graph):
            reason = "the graph runs under a transform of torch.func (grad, jvp, or a vmap that is not written out)"
            if self.has_recurrence:
                self.reject(reason, first_own_line(self.graph), "transform")
            return
        trace.stage("dynamo", self.graph)
        if self.prospects.ops and not self.context.trial:
            self.keep_operands()
        try:
            with deadline.within(self.context.settings.deadline):
                self.search_all()
        except deadline.OutOfTime as error:
            self.recurrence.rejections += [
                Rejection("linear_attention", error.reason, first_own_line(self.graph), "deadline")
            ]
        attention = self.has_attention and not self.attention.matches
        if self.prospects.subclasses and (node := local.left_alone(self.graph, attention=attention)) is not None:
            reason = "tensor subclasses (DTensor, quantised) are computed with here; local tensors are rewritten"
            self.subclasses = [
                Rejection("mla" if attention else "linear_attention", reason, source_of(node), "subclass")
            ]
        if self.found:
            self.graph.lint()
            trace.stage("rewritten", self.graph)

    def search_all(self) -> None:
        """The graph as it is (adapters merged, where there is attention), with the values of tables, in other forms."""
        for rule in canonical.FOR_ATTENTION if self.has_attention else ():
            self.canonicalise(rule)
        again = not compat.switches_modes(self.graph, grad=False)
        if again and self.has_recurrence and _may_choose(self.context.functional()):
            self.canonicalise_in_turn(canonical.FIRST)
        inputs = self.graph.find_nodes(op="placeholder") if self.tables and self.has_recurrence else ()
        if any(node.users for node in inputs if node.name in self.tables):
            inside, self.context.inside = self.context.inside, self.context.inside and not again
            self.search()
            self.context.inside = inside
            self.search_with_tables()
        else:
            self.search()
        if again:
            self.search_canonical_forms()

    def keep_operands(self) -> None:
        """Copies of what ops that are there already read and the graph overwrites later: with gradients their backward
        reads it again, where the code that they replaced need not (it keeps a gate's exponential).
        """
        functional = self.context.functional()
        for op in functional.ops:
            later = {write.storage for write in functional.mutations if write.position > op.position}
            for node in op.node.all_input_nodes if op.grad and op.name in compat.OWN_OPS else ():
                if functional.storages.get(node) in later:
                    with self.graph.inserting_before(op.node):
                        copy = self.graph.call_function(torch.clone, (node,))
                    compat.propagate_fake(copy, op.node)
                    op.node.replace_input_with(node, copy)
                    self.copied, self.context.known = True, None

    @property
    def found(self) -> bool:
        """True if the graph was rewritten."""
        return bool(self.copied or self.recurrence.matches or self.attention.matches or self.calls.matches)

    @property
    def wanting(self) -> bool:
        """True if something that looks like linear attention was left alone."""
        return self.recurrence.missed or any(not rejection.declined for rejection in self.recurrence.rejections)

    def reject(self, reason: str, source: str, code: Code) -> None:
        self.recurrence.rejections = [Rejection("linear_attention", reason, source, code)]

    def search(self) -> None:
        functional = self.context.functional()
        if self.shares_memory(functional):
            return
        if self.has_attention and not self.context.tables:
            self.attention.run(functional)
            self.recurrence.taken = self.attention.declined
        if not self.has_recurrence:
            return
        if self.attention.matches:
            self.context.rely_on(self.context.tables)
            functional = self.context.functional()
        functional = self.recurrence.run(functional)
        if self.prospects.ops:
            self.calls.run(functional)
            for rejection in self.calls.rejections:
                log.info("nothing above an op is absorbed: %s", rejection)
        if not (self.attention.matches or self.attention.rejections):
            self.recurrence.reject_blocked(functional)

    def search_canonical_forms(self) -> None:
        """Once more after each canonical rule, for what was left alone. Layers within a group are looked for only once
        loops are taken apart: that takes long.
        """
        for rules in canonical.ON_TRIAL if self.context.trial else ((rule,) for rule in canonical.RULES):
            if not self.wanting:
                return
            changed = self.canonicalise_in_turn(rules)
            waited, self.context.inside = not self.context.inside, True
            if changed or waited:
                self.recurrence.missed = False
                self.search()

    def canonicalise_in_turn(self, rules: Sequence[edit.Rule]) -> bool:
        """Each rule where the one before it has changed something; False if nothing comes of the first."""
        return bool(list(itertools.takewhile(self.canonicalise, rules)))

    def canonicalise(self, rule: edit.Rule) -> bool:
        """Apply ``rule`` to the functional graph, which is searched from here on; False if nothing comes of it."""
        self.context.rely_on({})
        functional = self.context.functional()
        calls = functional.calls or edit.NewCalls()
        seen = self.applied if functional.calls else []
        with self.timed("canonicalise"):
            changed = edit.apply([rule], functional, calls)
        if changed:
            trace.stage("canonical", functional)
            self.context.rejected.clear()  # what a group reads is written in another way
            seen = [*seen, rule]
        self.applied = seen
        self.context.rewritten = lambda other: edit.apply(seen, other, calls)
        return changed

    def shares_memory(self, functional: Graph) -> bool:
        """True, with a rejection, if the graph overwrites what another of its inputs reads."""
        target = overwritten(functional, self.graph.nodes)
        if target is None:
            return False
        reason = "the graph overwrites an input that shares its memory with another input"
        writer = next(m.node for m in functional.mutations if m.storage == functional.storages.get(target))
        self.reject(reason, source_of(writer), "alias")
        return True

    def search_with_tables(self) -> None:
        """Once more with the values of tables, for what does not hold without them, and before a part of it is looked
        for: a chunk of one token is a step. If nothing does, parts wait for the canonical forms.
        """
        without = self.recurrence.rejections
        matched = len(self.recurrence.matches)
        self.context.rely_on(self.tables)
        self.recurrence.missed = False
        self.search()
        declined = any(rejection.declined for rejection in self.recurrence.rejections)
        if len(self.recurrence.matches) == matched and not declined:
            self.recurrence.rejections = without
            self.context.inside = False

    def report(self) -> GraphReport:
        matches = (*self.recurrence.matches, *self.attention.matches)
        rejections = (*self.subclasses, *self.recurrence.rejections, *self.attention.rejections)
        return GraphReport(matches, rejections, self.nodes, self.seconds)


def _may_choose(functional: Graph) -> bool:
    """True if there is a mask that inputs reach, or what one is made of: no graph is edited for nothing."""
    made = (value for op in functional.ops for value in op.outs)
    return any(not (value.const or value.dtype.is_floating_point) for value in (*functional.inputs, *made))
