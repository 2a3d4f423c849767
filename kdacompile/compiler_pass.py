"""The pass: find linear attention and MLA in one Dynamo graph, prove it, rewrite it, and say what was done and why."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import fx

from kdacompile import compat, fresh_caches, glance, mla_pass
from kdacompile.held import Tables
from kdacompile.hoist import packed, row_sums
from kdacompile.hoist.attempt import attempt, may_help
from kdacompile.hoist.change import Change
from kdacompile.patterns.absorb import absorb
from kdacompile.patterns.absorb.casts import kept_upcasts
from kdacompile.patterns.blockers import find_blockers, find_unknown
from kdacompile.patterns.candidates import Candidate, Effort, candidates
from kdacompile.patterns.ir import Graph, Op, ancestors
from kdacompile.patterns.layers import inner_groups, is_layer
from kdacompile.patterns.match import Fused, from_hypothesis
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import Group, find_groups, keeps_tokens_apart
from kdacompile.proof.region import Verdict
from kdacompile.proof.verdicts import Verdicts
from kdacompile.readings import Readings
from kdacompile.report import loops, trace
from kdacompile.report.collect import emit
from kdacompile.report.findings import GraphReport, Match, Rejection
from kdacompile.report.report import enforce
from kdacompile.report.source import describe, source_of
from kdacompile.rewrite import reabsorb
from kdacompile.rewrite.linear_attention import LinearAttentionSplice
from kdacompile.rewrite.splice import CannotSplice
from kdacompile.settings import Settings
from kdacompile.shadow import aliases
from kdacompile.shadow.instances import Instances

log = logging.getLogger(__name__)

MAX_CANDIDATES = 24
"""Candidates proven per group before it is left alone."""

verdicts = Verdicts()


def run(
    gm: fx.GraphModule,
    settings: Settings,
    tables: Tables | None = None,
    complete: Callable[[GraphReport, fx.GraphModule, Settings], GraphReport] | None = None,
) -> GraphReport:
    """Rewrite ``gm`` in place; emits and returns the report.

    ``tables`` are inputs whose values matches may rely on: the caller sees to it that they hold (``Match.holds``).
    ``complete`` adds to the report what is known from before capture.
    """
    report = rewrite(gm, settings, tables)
    if complete is not None:
        report = complete(report, gm, settings)
    if report.matches and fresh_caches.settle(gm.graph):
        gm.recompile()
    emit(report)
    enforce(report, settings)
    return report


def rewrite(
    gm: fx.GraphModule, settings: Settings, tables: Tables | None = None, *, keep_strides: bool = True
) -> GraphReport:
    """Rewrite ``gm`` in place and say what was done. Without ``keep_strides`` results come as the ops lay them out."""
    work = _Work(Readings(gm), settings, tables or {}, keep_strides=keep_strides)
    if work.has_recurrence or work.has_attention:
        with compat.no_python_dispatcher():
            helps = work.has_recurrence and may_help(gm.graph)
            work.inside = not helps
            work.run()
            if helps and (work.rejections or work.missed):
                work = _again(settings, work)
            for other_text in (row_sums.attempt, packed.attempt):
                if work.rejections or work.missed:
                    work = _with(other_text(gm.graph, work.read), settings, work) or work
    return work.report()


def _again(settings: Settings, work: _Work) -> _Work:
    """Search again with what loops do to every token alike taken out of them; if that does not help, inside groups."""
    found = _with(attempt(work.gm.graph, work.read), settings, work)
    if found is not None:
        return found
    other = _Work(work.readings, settings, work.tables, keep_strides=work.keep_strides)
    other.run()
    other.take_over(work)
    return other


def _with(change: Change | None, settings: Settings, work: _Work) -> _Work | None:
    """The search of the changed graph; None, with nothing changed, if it finds nothing new."""
    if change is None or not change.apply(work.read):
        return None
    other = _Work(work.readings, settings, {}, keep_strides=work.keep_strides)
    other.run()
    if not (other.matches or other.attention.matches or other.changed):
        change.undo()
        return None
    change.finish()
    work.gm.recompile()
    other.take_over(work)
    return other


class _Work:
    """One search of one graph: its groups, what was rewritten, and why the rest was not."""

    def __init__(self, readings: Readings, settings: Settings, tables: Tables, *, keep_strides: bool) -> None:
        gm = readings.gm
        self.readings = readings
        self.gm = gm
        self.settings = settings
        self.tables = tables
        self.held: Tables = {}
        self.keep_strides = keep_strides
        self.changed = False
        """An op that was there already absorbed something."""
        self.inside = True
        """Layers within a group are looked for. That takes long: what can be taken out of loops goes first."""
        self.missed = False
        """Products that reach each other were left alone, be it without a word."""
        self.matches: list[Match] = []
        self.rejections: list[Rejection] = []
        self.seconds: dict[str, float] = {}
        self.nodes = len(gm.graph.nodes)
        self.instances = Instances(gm)
        self.has_recurrence = glance.may_have_recurrence(gm.graph) or any(map(compat.is_own_op, gm.graph.nodes))
        self.has_attention = keep_strides and glance.may_have_attention(gm.graph)  # what is lifted is a recurrence
        self.attention = mla_pass.MlaWork(gm, settings, self.instances, self.timed)

    @contextmanager
    def timed(self, phase: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def run(self) -> None:
        if compat.transforms(self.gm.graph):
            reason = "the graph runs under a transform of torch.func (vmap, grad, jvp; associative_scan uses vmap)"
            if self.has_recurrence:
                self.rejections.append(
                    Rejection("linear_attention", reason, _first_own_line(self.gm.graph), "transform")
                )
            return
        if compat.wrapped_tensors(self.gm.graph):
            reason = "inputs are tensor subclasses (DTensor); local tensors are rewritten (DTensor.to_local, local_map)"
            self.rejections.append(Rejection("linear_attention", reason, "unknown", "subclass"))
            return
        trace.before(self.gm)
        self.search()
        if self.has_recurrence and any(node.users for node in self.tables):
            self.search_with_tables()
        if self.matches or self.attention.matches or self.changed:
            self.gm.graph.lint()
            self.gm.recompile()
            trace.after(self.gm)

    def search(self) -> None:
        """Visit every group; where one of several layers within a group was rewritten, the graph is read again."""
        shadow = self.read()
        if self.shares_memory(shadow):
            return
        if self.has_attention and not self.held:
            self.find_attention(shadow)
        if not self.has_recurrence:
            return
        if self.attention.matches:
            shadow = self.read()
        while self.visit_all(shadow):
            self.instances = Instances(self.gm, self.held)
            shadow = self.read()
        for call in reabsorb.calls(shadow):
            self.extend(shadow, call)
        self.reject_blocked(shadow)

    def find_attention(self, shadow: Graph) -> None:
        known = self.readings.without_attention
        if known is not None and known[0] is shadow:
            self.attention.rejections = known[1]
            return
        self.attention.run(shadow)
        if not self.attention.matches:
            self.readings.without_attention = shadow, self.attention.rejections

    def shares_memory(self, shadow: Graph) -> bool:
        """True, with a rejection, if the graph overwrites what another of its inputs reads."""
        target = aliases.overwritten(shadow, self.gm.graph.nodes)
        if target is None:
            return False
        reason = "the graph overwrites an input that shares its memory with another input"
        writer = next(m.node for m in shadow.mutations if m.storage == shadow.storages.get(target))
        self.rejections = [Rejection("linear_attention", reason, source_of(writer), "alias")]
        return True

    def read(self) -> Graph:
        with self.timed("shadow"):
            shadow, news = self.readings.shadow(self.held)
        if news:
            trace.shadow(shadow)
        return shadow

    def visit_all(self, shadow: Graph) -> bool:
        """True if there may be more to find once the graph is read again."""
        self.rejections = []
        with self.timed("match"):
            groups = find_groups(shadow)
        again = False
        for group in groups:
            again |= not self.visit_whole(shadow, group) and self.inside and self.visit_inside(shadow, group)
        return again

    def visit_whole(self, shadow: Graph, group: Group) -> bool:
        """Visit a group, unless an earlier search came to nothing there."""
        reasons = self.readings.reasons(group)
        if reasons is not None:
            self.rejections += reasons
            self.missed |= len(group.anchors) > 2
            return False
        told = len(self.rejections)
        found = self.visit(shadow, group)
        if not found:
            self.readings.reject(group, self.rejections[told:])
        return found

    def visit_inside(self, shadow: Graph, group: Group) -> bool:
        """Rewrite one layer of a group that holds several; what is wrong with the others is not told here."""
        told = len(self.rejections)
        effort = Effort(ways=30, operators=0)  # for all of them: layers are cut off soon, or something else was found
        found = any(self.visit(shadow, inner, group, effort) for inner in inner_groups(shadow, group))
        del self.rejections[told:]
        return found

    def search_with_tables(self) -> None:
        """Once more with the values of tables, for what does not hold without them."""
        without = self.rejections
        matched = len(self.matches)
        self.held = self.tables
        self.instances = Instances(self.gm, self.tables)
        self.search()
        if len(self.matches) == matched:
            self.rejections = without

    def visit(self, shadow: Graph, group: Group, within: Group | None = None, effort: Effort | None = None) -> bool:
        """Rewrite the first candidate of a group that is proven and can be spliced; else report the most telling
        reason. ``within`` is the larger group that this one must be a layer of.
        """
        obstacles: list[Obstacle] = []
        refused: list[tuple[Candidate, Verdict]] = []
        unspliced: list[Rejection] = []
        for found in self.candidates(group, effort):
            if isinstance(found, Obstacle):
                obstacles.append(found)
                continue
            verdict = self.judge(found)
            trace.candidate(found, verdict.reason or "proven")
            if verdict.hypothesis is None:
                refused.append((found, verdict))
            elif within is None or is_layer(within, found, verdict.hypothesis.sizes):
                failure = self.apply(shadow, found, verdict)
                if failure is None:
                    return True
                unspliced.append(failure)
            if len(refused) + len(unspliced) >= MAX_CANDIDATES:
                break
        if unspliced:
            self.rejections.append(unspliced[0])
        else:
            self.reject(group, obstacles, refused)
        self.missed |= len(group.anchors) > 2
        return False

    def candidates(self, group: Group, effort: Effort | None) -> Iterator[Candidate | Obstacle]:
        found = candidates(group, effort)
        while True:
            with self.timed("match"):
                item = next(found, None)
            if item is None:
                return
            yield item

    def apply(self, shadow: Graph, candidate: Candidate, verdict: Verdict) -> Rejection | None:
        """Rewrite a proven candidate: with what stands upstream absorbed or, where the graph forbids that, without."""
        whole = self.fuse(shadow, candidate, verdict)
        failure = self.check_sizes(shadow, whole, self.fuse) or self.rewrite(shadow, whole)
        if failure is None or failure.code == "disabled":
            return failure
        bare = self.take(shadow, candidate, verdict)
        if bare.inputs == whole.inputs or self.check_sizes(shadow, bare, self.take) or self.rewrite(shadow, bare):
            return failure
        return None

    def extend(self, shadow: Graph, call: Fused) -> None:
        """Let an op that is in the graph already take over what stands above it, if it may."""

        def absorbed(other: Graph, candidate: Candidate) -> Fused | None:
            assert candidate.output.op is not None
            found = reabsorb.as_match(candidate.output.op)
            return None if found is None else absorb(found, other, keep_upcasts=self.settings.precision == "fp32")

        with self.timed("absorb"):
            fused = absorbed(shadow, call.candidate)
        if fused is None or not fused.absorbed:
            return
        with self.timed("sizes"):
            reabsorb.tie_sizes(call)
            reason = self.instances.disagreement(shadow, fused, absorbed, reabsorb.same_call)
        if reason is None:
            splice = LinearAttentionSplice(self.gm, shadow, fused, keep_strides=self.keep_strides)
            try:
                splice.apply(splice.check())
                self.changed = True
            except CannotSplice as error:
                reason = error.reason
        if reason is not None:
            log.info("nothing above %s is absorbed: %s", call.candidate.output.node, reason)

    def judge(self, candidate: Candidate) -> Verdict:
        with self.timed("proof"):
            return verdicts(candidate, wide=self.settings.verify == "wide")

    def take(self, shadow: Graph, candidate: Candidate, verdict: Verdict) -> Fused:
        """The match as it was proven."""
        assert verdict.hypothesis is not None
        taken = from_hypothesis(candidate, verdict.hypothesis, verdict.max_error)
        return replace(taken, upcast=kept_upcasts(taken)) if self.settings.precision == "fp32" else taken

    def fuse(self, shadow: Graph, candidate: Candidate, verdict: Verdict) -> Fused:
        """The match with everything upstream that the op does itself."""
        with self.timed("absorb"):
            taken = self.take(shadow, candidate, verdict)
            return absorb(taken, shadow, keep_upcasts=self.settings.precision == "fp32")

    def check_sizes(
        self, shadow: Graph, fused: Fused, make: Callable[[Graph, Candidate, Verdict], Fused]
    ) -> Rejection | None:
        """A rejection if the match might not hold at other values of the graph's symbolic sizes."""

        def recognise(other: Graph, candidate: Candidate) -> Fused | None:
            verdict = self.judge(candidate)
            return None if verdict.hypothesis is None else make(other, candidate, verdict)

        with self.timed("sizes"):
            reason = self.instances.disagreement(shadow, fused, recognise)
        if reason is None:
            return None
        return Rejection(fused.pattern.name, reason, source_of(_innermost(fused)), "dynamic")

    def reject_blocked(self, shadow: Graph) -> None:
        """Near misses without a region: say which operator stands in the way, where that is known."""
        told = any(rejection.code != "roles" for rejection in self.rejections)
        if told or self.matches or self.attention.matches or self.attention.rejections:
            return
        obstacles = list(find_blockers(shadow))
        if self.rejections and not obstacles:
            obstacles = list(find_unknown(shadow))
        blockers = [
            Rejection("linear_attention", found.reason, source_of(found.op.node if found.op else None), found.code)
            for found in obstacles
        ]
        self.rejections = blockers or self.rejections

    def reject(self, group: Group, obstacles: list[Obstacle], refused: list[tuple[Candidate, Verdict]]) -> None:
        if refused:
            candidate, verdict = min(refused, key=lambda pair: pair[1].max_error)
            pattern = candidate.hypotheses[0]
            name = _pattern_name(pattern.gate, pattern.delta)
            self.rejections.append(Rejection(name, verdict.reason, source_of(candidate.output.node), "proof"))
        elif obstacles:
            first = obstacles[0]
            op = first.op or group.anchors[-1]
            self.rejections.append(Rejection("linear_attention", first.reason, source_of(op.node), first.code))
        elif len(group.anchors) > 2 and not keeps_tokens_apart(group):
            reason = "what enters and leaves does not fit the roles of the recurrence"
            self.rejections.append(Rejection("linear_attention", reason, source_of(group.anchors[-1].node), "roles"))

    def rewrite(self, shadow: Graph, fused: Fused) -> Rejection | None:
        """Splice the op in; a rejection if the graph around the region does not allow it."""
        name = fused.pattern.name
        source = source_of(_innermost(fused))
        if name in self.settings.disable:
            return Rejection(name, "switched off by kda.disable", source, "disabled")
        splice = LinearAttentionSplice(self.gm, shadow, fused, keep_strides=self.keep_strides)
        with self.timed("rewrite"):
            try:
                op = splice.apply(splice.check())
            except CannotSplice as error:
                return Rejection(name, error.reason, source, error.code)
        roles = {role: describe(fused.inputs[role]) for role in fused.inputs}
        holds = tuple(node.name for node in self.relied_on(fused))
        found = Match(name, fused.mode, source, roles, fused.max_error, op, fused.absorbed, holds=holds)
        self.matches.append(replace(found, loop=_loop(fused)))
        return None

    def relied_on(self, fused: Fused) -> list[fx.Node]:
        """Inputs of the graph whose values the match holds constant."""
        inputs = {placement.value for placement in fused.inputs.values()}
        results = fused.candidate.outputs
        read = {value.node for op in ancestors(results, inputs.__contains__) for value in op.reads if value.const}
        return [node for node in self.held if node in read]

    def take_over(self, earlier: _Work) -> None:
        """Tell what an earlier search of the same graph found as well."""
        self.matches[:0] = earlier.matches
        self.attention.matches[:0] = earlier.attention.matches
        self.nodes = earlier.nodes
        for phase, seconds in earlier.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def report(self) -> GraphReport:
        matches = (*self.matches, *self.attention.matches)
        return GraphReport(matches, (*self.rejections, *self.attention.rejections), self.nodes, self.seconds)


def _pattern_name(gate: str, delta: bool) -> str:
    from kdacompile.patterns.family import pattern_of

    return pattern_of(gate, delta=delta).name


def _loop(fused: Fused) -> str:
    """ "file:line" of the loop whose turns the region is, "" if it was written down without one."""
    if fused.mode == "step":
        return ""
    found = loops.unrolled({op.node for op in fused.candidate.ops if isinstance(op.node, fx.Node)})
    return "" if found is None else found.place


def _first_own_line(graph: fx.Graph) -> str:
    """ "file:line" of the first call that was not written in torch itself."""
    library = os.path.dirname(torch.__file__)
    sources = [source_of(node) for node in graph.nodes]
    return next((source for source in sources if source != "unknown" and not source.startswith(library)), "unknown")


def _innermost(fused: Fused) -> fx.Node | None:
    """A node of the region's heart, for the report: where its first anchor stands."""
    anchors: list[Op] = [op for op in fused.candidate.group.anchors if op in fused.candidate.ops]
    return anchors[0].node if anchors else fused.output.value.node
