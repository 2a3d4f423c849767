"""One pattern in one graph: find where it could be, check it, look at other sizes, rewrite it, and say why not.

What differs between patterns is in their ``Spec``; this is the same for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import fx

from kdacompile import compat
from kdacompile.graph.build import Tables, functional_graph
from kdacompile.graph.instances import NO_TIES, Instances, Sizes, Ties, symbols_of
from kdacompile.graph.ir import Graph, Op, Value, ancestors
from kdacompile.graph.turns import Turns
from kdacompile.patterns import canonical
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.match import B, Candidate, Match, Obstacle, Verdict
from kdacompile.patterns.engine.spec import Inner, R, Spec
from kdacompile.report import findings, refusals, source, trace
from kdacompile.report.findings import Rejection
from kdacompile.report.source import describe, source_of
from kdacompile.rewrite.splice import CannotSplice, Splice
from kdacompile.settings import Settings

MAX_CANDIDATES = 24
"""Candidates checked per region before it is left alone."""

LIKELY = 24
"""Bindings among which the one that has held at other sizes is looked for."""

MAX_WITHOUT = 4
"""Candidates of a region that are checked as if nothing outside read their values, to tell why it was left alone."""

FEW = 20
"""Operators of a region up to which a reason is worth such checks."""

NEAR = 64
"""Operators above a mask among which the one that chooses tokens is looked for."""

FIXED_GRAPHS = 4
"""Captures of one piece of code that may be for their own sizes alone; half of what torch.compile allows by default."""

T = TypeVar("T")
Timed = Callable[[str], AbstractContextManager[None]]


class Context:
    """What the patterns share while one graph is searched: its functional graph, and what came to nothing there."""

    def __init__(self, graph: fx.Graph, settings: Settings, timed: Timed, *, trial: bool, loops: bool) -> None:
        """``loops``: there may be loops to take apart, which comes before regions are looked for within others."""
        self.graph, self.settings, self.timed, self.trial, self.loops = graph, settings, timed, trial, loops
        self.rejected: dict[AbstractSet[Op], list[Rejection]] = {}
        """Regions that were rejected, with the reasons: the same region is not searched twice."""
        self.known: Graph | None = None
        """The functional graph, until a splice changes the graph."""
        self.tables: Tables = {}
        self.likely: Sequence[object] = ()
        """How regions of this function were read at other sizes (``Binding.reading``)."""
        self.held: list[object] = []
        """How they were read here."""
        self.rely_on({})

    def rely_on(self, tables: Tables) -> None:
        """Take these inputs for constants from here on."""
        if tables.keys() != self.tables.keys():
            self.known = None
        self.tables = tables
        self.rewritten: Callable[[Graph], object] = lambda _: None
        """Applies the canonical rules that the functional graph has seen to one at other sizes."""
        self.regions: dict[tuple[int, str], list[Any]] = {}
        vars(self).pop("instances", None)

    @functools.cached_property
    def instances(self) -> Instances:
        return Instances(self.graph, self.tables, self.rewritten)

    def functional(self) -> Graph:
        """The functional graph of the graph as it is now."""
        if self.known is None:
            with self.timed("functional"):
                self.known = functional_graph(self.graph, tables=self.tables)
            trace.stage("functional", self.known)
        return self.known

    @functools.cached_property
    def inside(self) -> bool:
        """Regions within others are looked for. That takes long: what can be taken out of loops goes first."""
        loops = self.loops and not compat.switches_modes(self.graph, grad=False)
        return not (loops and canonical.may_take_loops_apart(self.functional()))

    def settle(self, symbols: Iterable[Any]) -> None:
        """Have these sizes guarded to be what they are."""
        env = compat.shape_env(self.instances.nodes)
        for symbol in symbols:
            compat.settle(env, symbol)

    def at(self, sizes: Sizes, spec: Spec[R, Any]) -> tuple[Graph, list[R]]:
        """The functional graph at other sizes, and where the pattern could be there."""
        graph = self.instances.at(sizes)
        key = id(graph), type(spec).__name__
        if key not in self.regions:
            self.regions[key] = list(spec.regions(graph))
        return graph, self.regions[key]


class Matching(Generic[R, B]):
    """The regions of one pattern; ``matches`` and ``rejections`` are the outcome."""

    def __init__(self, spec: Spec[R, B], splice: type[Splice[B]], context: Context, *, tells: bool = True) -> None:
        """``tells``: reports tell of what is found."""
        self.spec, self.splice, self.context, self.tells = spec, splice, context, tells
        self.settings, self.timed = context.settings, context.timed
        self.missed = False
        """Something that looks like the pattern was left alone, be it without a word."""
        self.rewritten: set[Op] = set()
        """Operators that ops have taken the place of."""
        self.declined: set[Op] = set()
        """Operators of what was shown to be the pattern and is left to Inductor, which is estimated to be faster."""
        self.taken: set[Op] = set()
        """Those that another pattern has declined: what they are is known."""
        self.matches: list[findings.Match] = []
        self.rejections: list[Rejection] = []

    # -- regions

    def run(self, graph: Graph) -> Graph:
        """Visit every region; where one within another was rewritten, the graph is read again. Returns what was read
        last.
        """
        while self.visit_all(graph):
            self.context.rely_on(self.context.tables)
            graph = self.context.functional()
        return graph

    def visit_all(self, graph: Graph) -> bool:
        """True if there may be more to find once the graph is read again."""
        self.rejections = []
        with self.timed("match"):
            regions = list(self.spec.regions(graph))
        again = False
        for region in regions:
            again |= not self.visit_whole(graph, region) and self.context.inside and self.visit_inside(graph, region)
        return again

    def visit_whole(self, graph: Graph, region: R) -> bool:
        """Visit a region, unless an earlier search came to nothing there."""
        ops = frozenset(region.ops)
        if not self.taken.isdisjoint(ops):
            return False
        if ops in self.context.rejected:
            self.rejections += self.context.rejected[ops]
        else:
            told = len(self.rejections)
            if self.visit(graph, Inner(region, lambda candidate, binding: True)):
                return True
            self.context.rejected[ops] = self.rejections[told:]
        self.missed |= self.declined.isdisjoint(ops) and self.spec.is_near(region)
        return False

    def visit_inside(self, graph: Graph, region: R) -> bool:
        """Rewrite regions within another that share nothing; what is wrong with the others is not told here."""
        told, found = len(self.rejections), False
        for inner in self.spec.inner(graph, region, trial=self.context.trial):
            if self.rewritten.isdisjoint(inner.region.ops):
                found |= self.visit(graph, inner)
        del self.rejections[told:]
        return found

    def visit(self, graph: Graph, inner: Inner[R, B]) -> bool:
        """Rewrite the first candidate of a region that holds and can be spliced; else report the most telling
        reason.
        """
        obstacles: list[Obstacle] = []
        refused: list[tuple[Candidate[B], Verdict[B]]] = []
        failures: list[Rejection] = []
        for found in self.stepwise("match", self.spec.candidates(graph, inner.region, inner.effort)):
            deadline.check()
            if isinstance(found, Obstacle):
                obstacles.append(found)
                continue
            verdict = self.judge(found)
            trace.match(found, verdict.reason or "proven")
            if verdict.binding is None:
                refused.append((found, verdict))
            elif inner.accepts(found, verdict.binding):
                failure = self.apply(graph, found, verdict)
                if failure is None:
                    return True
                failures.append(failure)
                if failure.code == "cost":
                    self.declined |= found.ops
                    break
            if len(refused) + len(failures) >= MAX_CANDIDATES:
                break
        if failures:
            self.rejections.append(failures[0])
        elif forbidden := self.spec.forbids(inner.region):
            self.rejections.append(self.rejection(forbidden))
        elif refused and (only := self.only_obstacle(obstacles)):
            self.rejections.append(only)
        elif refused:
            candidate, verdict = min(refused, key=lambda pair: pair[1].max_error)
            likely = next(iter(candidate.bindings), None)  # there is none where no roles fit
            name = self.spec.name if likely is None else likely.name
            self.rejections.append(Rejection(name, verdict.reason, source_of(candidate.output.node), verdict.code))
        elif obstacles:
            self.rejections.append(self.rejection(obstacles[0]))
        return False

    def stepwise(self, phase: str, found: Iterator[T]) -> Iterator[T]:
        """The same items, of which each takes its time from ``phase``."""
        while True:
            with self.timed(phase):
                item = next(found, None)
            if item is None:
                return
            yield item

    def judge(self, candidate: Candidate[B]) -> Verdict[B]:
        """The verdict on the bindings of a candidate; what has held at other sizes is likely to hold again."""
        with self.timed("proof"):
            if self.context.likely:
                first, ends = itertools.islice(candidate.bindings, LIKELY), candidate.ends
                candidate.likely = next((each for each in first if each.reading(ends) in self.context.likely), None)
            verdict = self.spec.verdicts(candidate, wide=self.settings.verify == "wide")
            if self.context.trial and verdict.binding is not None:
                self.context.held.append(verdict.binding.reading(candidate.ends))
            return verdict

    def only_obstacle(self, obstacles: list[Obstacle]) -> Rejection | None:
        """The first obstacle, of a few, without which there would be a candidate that holds."""
        without = [(obstacle, obstacle.candidate) for obstacle in obstacles if obstacle.candidate is not None]
        if any(len(candidate.ops) > FEW for _, candidate in without):
            return None
        for obstacle, candidate in without[:MAX_WITHOUT]:
            binding = self.judge(candidate).binding
            if binding is not None:
                return self.rejection(obstacle, binding.name)
        return None

    def rejection(self, obstacle: Obstacle, name: str = "") -> Rejection:
        node = obstacle.op.node if obstacle.op else None
        return Rejection(name or self.spec.name, obstacle.reason, source_of(node), obstacle.code)

    def reject_blocked(self, graph: Graph) -> None:
        """Near misses without a region, beside matches too: say which operator stands in the way, where it is known."""
        if any(rejection.code != "roles" for rejection in self.rejections):
            return
        blockers = self.spec.blockers(graph, self.rewritten, unknown=bool(self.rejections))
        self.rejections = [self.rejection(found) for found in blockers] or self.rejections

    # -- one binding that holds

    def apply(self, graph: Graph, candidate: Candidate[B], verdict: Verdict[B]) -> Rejection | None:
        """Rewrite a candidate in the best form that the graph allows, or say why none is."""
        failure = self.attempt_all(graph, candidate, verdict)
        if failure is not None and failure.code == "dynamic" and self.spec.narrows and self.narrow(graph, candidate):
            verdict = self.judge(candidate)
            failure = self.attempt_all(graph, candidate, verdict) if verdict.binding is not None else failure
        if failure is not None and failure.code == "dynamic" and self.fix_sizes(candidate):
            alone = replace(verdict, alone=True)
            for match in self.forms(graph, candidate, alone):
                failure = self.rewrite(graph, match)  # what is told is what stands in the way at these sizes
                if failure is None:
                    break
        return failure

    def attempt_all(self, graph: Graph, candidate: Candidate[B], verdict: Verdict[B]) -> Rejection | None:
        assert verdict.binding is not None
        name, source = verdict.binding.name, source_of(candidate.anchor.node)
        if name in self.settings.disable:
            return Rejection(name, "switched off by kda.disable", source, "disabled")
        failure: Rejection | None = None
        for match in self.forms(graph, candidate, verdict):
            with self.timed("sizes"):
                reason = self.disagreement(graph, match)
                if reason and (self.holds_at_equal_sizes(graph, match) or self.holds_at_counted_sizes(graph, match)):
                    reason = None
            failure = Rejection(name, reason, source, "dynamic") if reason else self.rewrite(graph, match)
            if failure is None:
                return None
        return failure

    def forms(self, graph: Graph, candidate: Candidate[B], verdict: Verdict[B]) -> Iterator[Match[B]]:
        """The match with as much absorbed as the op can do itself, then with less."""
        if verdict.binding is None:
            return
        match = Match(candidate, verdict.binding, verdict.binding, verdict.max_error, verdict.shown)
        yield from self.stepwise(
            "absorb", self.spec.forms(graph, match, keep_upcasts=self.settings.precision == "fp32")
        )

    def rewrite(self, graph: Graph, match: Match[B]) -> Rejection | None:
        """Splice the op in; a rejection if the graph around the region does not allow it."""
        name, source = match.binding.name, source_of(match.candidate.anchor.node)
        roles = {role: describe(placement) for role, placement in match.inputs.items()}
        for role in self.spec.masks:
            if role in roles:
                roles[role] += _chosen_by(match.inputs[role].value)
        with self.timed("rewrite"):
            try:
                splice = self.splice(
                    self.context.graph,
                    graph,
                    match,
                    keep_strides=not self.context.trial,
                    writes_views=self.settings.inner != "aot_eager",
                )
                before = splice.check()
                if self.settings.judges_cost and not self.context.trial:  # a function is tried at sizes of its own
                    splice.check_cost(inductor=self.settings.inner == "inductor")
                replaced = [node.meta[compat.REPORTED] for node in splice.dying if compat.REPORTED in node.meta]
                op = splice.apply(before)
            except CannotSplice as error:
                return Rejection(name, error.reason, source, error.code)
        self.context.known = None
        deadline.restart()
        self.rewritten |= match.candidate.ops
        holds = self.relied_on(match)
        found = findings.Match(name, match.mode, source, roles, match.max_error, op, match.absorbed, holds=holds)
        self.matches.append(replace(found, checked=match.shown, **self.loop(match)))
        for reported in [self.matches[-1]] if self.tells else replaced[:1]:
            for node in splice.called:
                node.meta[compat.REPORTED] = reported
        return None

    def loop(self, match: Match[B]) -> dict[str, str]:
        """ "file:line" of the loop whose turns the region is, if there is one, and why its function was not lifted."""
        nodes = {op.node for op in match.candidate.ops if isinstance(op.node, fx.Node)}
        found = None if match.mode == "step" or self.context.trial else source.unrolled(nodes)
        if found is None:
            return {}
        lifts = self.settings.lift
        return {"loop": found.place, "not_lifted": refusals.reason(found.place) if lifts else "kda.lift is off"}

    def relied_on(self, match: Match[B]) -> tuple[str, ...]:
        """Inputs of the graph whose values the match takes for constants."""
        inputs = {placement.value for placement in match.inputs.values()}
        region = ancestors(match.candidate.outputs, inputs.__contains__) if self.context.tables else set[Op]()
        read = {value.node.name for op in region for value in op.reads if value.const and value.node is not None}
        return tuple(name for name in self.context.tables if name in read)

    # -- other sizes

    def disagreement(self, graph: Graph, match: Match[B], tied: Ties = NO_TIES) -> str | None:
        """Why the match might not hold at all sizes that the graph allows; None if it does, as far as others tell."""
        nodes = _nodes(match)
        if not symbols_of(nodes):
            return None
        turns = Turns(_region(match), apart="C" not in match.binding.sizes)

        def compare(sizes: Sizes) -> str | None:
            other, regions = self.context.at(sizes, self.spec)
            found = self.spec.counterpart(match.candidate, graph, other, regions)
            if isinstance(found, str):
                return found
            alike = [binding for binding in found.bindings if binding.assignment() == match.checked.assignment()]
            if not alike:
                return "the roles do not fit at other sizes"
            found = replace(found, bindings=alike, likely=alike[0])
            for again in self.forms(other, found, self.judge(found)):
                if again.binding.same_as(match.binding):
                    return turns.add(sizes, _region(again))
            return "the region computes something else at other sizes"

        return self.context.instances.anywhere(nodes, compare, tied, turns)

    def holds_at_equal_sizes(self, graph: Graph, match: Match[B]) -> bool:
        """Whether the match holds wherever two sizes are equal that are now; then that is guarded."""
        pair = self.spec.equal_sizes(match)
        if pair is None:
            return False
        one, other = map(compat.free_symbols, pair)
        if len(one) != 1 or len(other) != 1 or one == other:
            return False
        if self.disagreement(graph, match, {other.pop(): one.pop()}) is not None:
            return False
        compat.tie(*pair)
        return True

    def holds_at_counted_sizes(self, graph: Graph, match: Match[B]) -> bool:
        """Whether the match holds wherever open sizes have the number that the graph has for the same axis elsewhere;
        then that is guarded. It costs no graphs: other numbers of turns are captured anew as it is.
        """
        symbols = set[Any]().union(*map(compat.free_symbols, self.spec.counted_sizes(match)))
        if not symbols or self.context.trial or compat.times_captured(*symbols) is None:
            return False
        if self.disagreement(graph, match, {symbol: symbol for symbol in symbols}) is not None:
            return False
        self.context.settle(symbols)
        return True

    def fix_sizes(self, candidate: Candidate[B]) -> bool:
        """Have the sizes that a candidate depends on guarded, so that others are captured anew; False where they are to
        stay open: for the caller, or for an op that the graph has already.
        """
        if any(map(compat.is_own_op, self.context.graph.nodes)):
            return False
        nodes = _nodes_of(candidate.ops, candidate.cut)
        symbols = symbols_of(nodes)
        captured = compat.times_captured(*symbols)
        if self.context.trial or captured is None or captured >= FIXED_GRAPHS or any(map(compat.is_unbacked, symbols)):
            return False
        self.context.settle(symbols)
        return True

    def narrow(self, graph: Graph, candidate: Candidate[B]) -> bool:
        """Leave the candidate the bindings that are made at other sizes too; True if that is some of them."""
        bindings = list(candidate.bindings)
        left = bindings

        def look(sizes: Sizes) -> None:
            nonlocal left
            other, regions = self.context.at(sizes, self.spec)
            found = self.spec.counterpart(candidate, graph, other, regions)
            keys = [] if isinstance(found, str) else [binding.key() for binding in found.bindings]
            left = [binding for binding in left if binding.key() in keys]

        self.context.instances.anywhere(_nodes_of(candidate.ops, candidate.cut), look)
        candidate.bindings = left
        return 0 < len(left) < len(bindings)


def _region(match: Match[Any]) -> set[Op]:
    """All between the inputs of a match and its results, constants included."""
    inputs = _inputs(match)
    return ancestors(match.candidate.outputs, inputs.__contains__)


def _inputs(match: Match[Any]) -> set[Value]:
    """What a match reads: the tensors of its roles, and what holds the same numbers, as a second slice of a cache."""
    return {placement.value for placement in match.inputs.values()} | set(match.candidate.duplicates)


def _nodes(match: Match[Any]) -> set[fx.Node]:
    inputs = _inputs(match)
    absorbed = ancestors(match.candidate.cut, inputs.__contains__)
    return _nodes_of(match.candidate.ops | absorbed, inputs)


def _nodes_of(ops: set[Op], inputs: Iterable[Value]) -> set[fx.Node]:
    """The Dynamo nodes of a region and what they read: tensors, sizes and other numbers."""
    own = {op.node for op in ops if op.node is not None} | {value.node for value in inputs}
    return own | {arg for node in own for arg in node.all_input_nodes if node.op != "placeholder"}


def _chosen_by(mask: Value) -> str:
    """What a report adds of a mask that a sparse indexer has made."""
    near, stack = set[Value](), [mask]
    while stack and len(near) < NEAR:
        value = stack.pop(0)
        if value in near or value.op is None:
            continue
        near.add(value)
        if value.op.name == "topk":
            return f", chosen by topk at {source_of(value.op.node)}, which stays with Inductor"
        stack += value.op.reads
    return ""
