"""Linear attention in one graph: find it in the functional graph, prove and rewrite it, and say why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import fx

from kdacompile.graph.instances import Instances
from kdacompile.graph.ir import Graph, Op, ancestors
from kdacompile.graph.readings import Readings
from kdacompile.patterns.engine.match import Fused, from_hypothesis
from kdacompile.patterns.engine.obstacle import Obstacle
from kdacompile.patterns.engine.verdicts import Verdicts
from kdacompile.patterns.recurrence.absorb import absorb
from kdacompile.patterns.recurrence.absorb.casts import kept_upcasts
from kdacompile.patterns.recurrence.blockers import find_blockers, find_unknown
from kdacompile.patterns.recurrence.candidates import Candidate, Effort, candidates
from kdacompile.patterns.recurrence.family import pattern_of
from kdacompile.patterns.recurrence.layers import inner_groups, is_layer
from kdacompile.patterns.recurrence.proof import Verdict
from kdacompile.patterns.recurrence.regions import Group, find_groups, keeps_tokens_apart
from kdacompile.report import loops, trace
from kdacompile.report.findings import Match, Rejection
from kdacompile.report.source import describe, source_of
from kdacompile.rewrite import reabsorb
from kdacompile.rewrite.held import Tables
from kdacompile.rewrite.linear_attention import LinearAttentionSplice
from kdacompile.rewrite.mla_pass import Timed
from kdacompile.rewrite.splice import CannotSplice
from kdacompile.settings import Settings

log = logging.getLogger(__name__)

MAX_CANDIDATES = 24
"""Candidates proven per group before it is left alone."""

verdicts = Verdicts()


class RecurrenceWork:
    """One graph's groups of products; ``matches`` and ``rejections`` are the outcome."""

    def __init__(self, readings: Readings, settings: Settings, timed: Timed, *, trial: bool) -> None:
        self.readings, self.gm = readings, readings.gm
        self.settings, self.timed, self.trial = settings, timed, trial
        self.held: Tables = {}
        self.instances = Instances(self.gm)
        self.inside = True
        """Layers within a group are looked for. That takes long: what can be taken out of loops goes first."""
        self.changed = False
        """An op that was there already absorbed something."""
        self.missed = False
        """Products that reach each other were left alone, be it without a word."""
        self.matches: list[Match] = []
        self.rejections: list[Rejection] = []

    def hold(self, tables: Tables) -> None:
        """Rely on the values of these inputs from here on."""
        self.held = tables
        self.instances = Instances(self.gm, tables)

    def run(self, functional: Graph, read: Callable[[], Graph]) -> Graph:
        """Visit every group; where one of several layers within a group was rewritten, the graph is read again. Returns
        what was read last.
        """
        while self.visit_all(functional):
            self.instances = Instances(self.gm, self.held)
            functional = read()
        for call in reabsorb.calls(functional):
            self.extend(functional, call)
        return functional

    def visit_all(self, functional: Graph) -> bool:
        """True if there may be more to find once the graph is read again."""
        self.rejections = []
        with self.timed("match"):
            groups = find_groups(functional)
        again = False
        for group in groups:
            again |= not self.visit_whole(functional, group) and self.inside and self.visit_inside(functional, group)
        return again

    def visit_whole(self, functional: Graph, group: Group) -> bool:
        """Visit a group, unless an earlier search came to nothing there."""
        reasons = self.readings.reasons(group)
        if reasons is not None:
            self.rejections += reasons
        else:
            told = len(self.rejections)
            if self.visit(functional, group):
                return True
            self.readings.reject(group, self.rejections[told:])
        self.missed |= len(group.anchors) > 2
        return False

    def visit_inside(self, functional: Graph, group: Group) -> bool:
        """Rewrite one layer of a group that holds several; what is wrong with the others is not told here."""
        told = len(self.rejections)
        # for all of them together; what is one recurrence, as functions on trial must be, is cut off soon
        effort = Effort(ways=30, operators=0 if self.trial else 30_000)
        found = any(self.visit(functional, inner, group, effort) for inner in inner_groups(functional, group))
        del self.rejections[told:]
        return found

    def visit(self, functional: Graph, group: Group, within: Group | None = None, effort: Effort | None = None) -> bool:
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
            trace.match(found, verdict.reason or "proven")
            if verdict.hypothesis is None:
                refused.append((found, verdict))
            elif within is None or is_layer(within, found, verdict.hypothesis.sizes):
                failure = self.apply(functional, found, verdict)
                if failure is None:
                    return True
                unspliced.append(failure)
            if len(refused) + len(unspliced) >= MAX_CANDIDATES:
                break
        if unspliced:
            self.rejections.append(unspliced[0])
        else:
            self.reject(group, obstacles, refused)
        return False

    def candidates(self, group: Group, effort: Effort | None) -> Iterator[Candidate | Obstacle]:
        found = candidates(group, effort)
        while True:
            with self.timed("match"):
                item = next(found, None)
            if item is None:
                return
            yield item

    def apply(self, functional: Graph, candidate: Candidate, verdict: Verdict) -> Rejection | None:
        """Rewrite a proven candidate: with what stands upstream absorbed or, where the graph forbids that, without."""
        whole = self.fuse(functional, candidate, verdict)
        failure = self.check_sizes(functional, whole, self.fuse) or self.rewrite(functional, whole)
        if failure is None or failure.code == "disabled":
            return failure
        bare = self.take(functional, candidate, verdict)
        if (
            bare.inputs == whole.inputs
            or self.check_sizes(functional, bare, self.take)
            or self.rewrite(functional, bare)
        ):
            return failure
        return None

    def extend(self, functional: Graph, call: Fused) -> None:
        """Let an op that is in the graph already take over what stands above it, if it may."""

        def absorbed(other: Graph, candidate: Candidate) -> Fused | None:
            assert candidate.output.op is not None
            found = reabsorb.as_match(candidate.output.op)
            return None if found is None else absorb(found, other, keep_upcasts=self.settings.precision == "fp32")

        with self.timed("absorb"):
            fused = absorbed(functional, call.candidate)
        if fused is None or not fused.absorbed:
            return
        with self.timed("sizes"):
            reabsorb.tie_sizes(call)
            reason = self.instances.disagreement(functional, fused, absorbed, reabsorb.same_call)
        if reason is None:
            splice = LinearAttentionSplice(self.gm, functional, fused, keep_strides=not self.trial)
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

    def take(self, functional: Graph, candidate: Candidate, verdict: Verdict) -> Fused:
        """The match as it was proven."""
        assert verdict.hypothesis is not None
        taken = from_hypothesis(candidate, verdict.hypothesis, verdict.max_error)
        return replace(taken, upcast=kept_upcasts(taken)) if self.settings.precision == "fp32" else taken

    def fuse(self, functional: Graph, candidate: Candidate, verdict: Verdict) -> Fused:
        """The match with everything upstream that the op does itself."""
        with self.timed("absorb"):
            taken = self.take(functional, candidate, verdict)
            return absorb(taken, functional, keep_upcasts=self.settings.precision == "fp32")

    def check_sizes(
        self, functional: Graph, fused: Fused, make: Callable[[Graph, Candidate, Verdict], Fused]
    ) -> Rejection | None:
        """A rejection if the match might not hold at other values of the graph's symbolic sizes."""

        def recognise(other: Graph, candidate: Candidate) -> Fused | None:
            verdict = self.judge(candidate)
            return None if verdict.hypothesis is None else make(other, candidate, verdict)

        with self.timed("sizes"):
            reason = self.instances.disagreement(functional, fused, recognise)
        if reason is None:
            return None
        return Rejection(fused.pattern.name, reason, source_of(_innermost(fused)), "dynamic")

    def rewrite(self, functional: Graph, fused: Fused) -> Rejection | None:
        """Splice the op in; a rejection if the graph around the region does not allow it."""
        name = fused.pattern.name
        source = source_of(_innermost(fused))
        if name in self.settings.disable:
            return Rejection(name, "switched off by kda.disable", source, "disabled")
        splice = LinearAttentionSplice(self.gm, functional, fused, keep_strides=not self.trial)
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

    def reject(self, group: Group, obstacles: list[Obstacle], refused: list[tuple[Candidate, Verdict]]) -> None:
        if refused:
            candidate, verdict = min(refused, key=lambda pair: pair[1].max_error)
            pattern = next(iter(candidate.hypotheses))
            name = pattern_of(pattern.gate, delta=pattern.delta).name
            self.rejections.append(Rejection(name, verdict.reason, source_of(candidate.output.node), "proof"))
        elif obstacles:
            first = obstacles[0]
            op = first.op or group.anchors[-1]
            self.rejections.append(Rejection("linear_attention", first.reason, source_of(op.node), first.code))
        elif len(group.anchors) > 2 and not keeps_tokens_apart(group):
            reason = "what enters and leaves does not fit the roles of the recurrence"
            self.rejections.append(Rejection("linear_attention", reason, source_of(group.anchors[-1].node), "roles"))

    def reject_blocked(self, functional: Graph) -> None:
        """Near misses without a region: say which operator stands in the way, where that is known."""
        if self.matches or any(rejection.code != "roles" for rejection in self.rejections):
            return
        obstacles = list(find_blockers(functional))
        if self.rejections and not obstacles:
            obstacles = list(find_unknown(functional))
        blockers = [
            Rejection("linear_attention", found.reason, source_of(found.op.node if found.op else None), found.code)
            for found in obstacles
        ]
        self.rejections = blockers or self.rejections


def _loop(fused: Fused) -> str:
    """ "file:line" of the loop whose turns the region is, "" if it was written down without one."""
    if fused.mode == "step":
        return ""
    found = loops.unrolled({op.node for op in fused.candidate.ops if isinstance(op.node, fx.Node)})
    return "" if found is None else found.place


def _innermost(fused: Fused) -> fx.Node | None:
    """A node of the region's heart, for the report: where its first anchor stands."""
    anchors: list[Op] = [op for op in fused.candidate.group.anchors if op in fused.candidate.ops]
    return anchors[0].node if anchors else fused.output.value.node
