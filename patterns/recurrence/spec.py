"""Linear attention as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kdacompile.graph.ir import Graph, Value
from kdacompile.patterns.engine.match import Obstacle, Verdict
from kdacompile.patterns.engine.spec import Inner, Spec
from kdacompile.patterns.recurrence import blockers
from kdacompile.patterns.recurrence.absorb import Scope, absorb
from kdacompile.patterns.recurrence.absorb.casts import kept_upcasts
from kdacompile.patterns.recurrence.candidates import Effort, candidates, read_region
from kdacompile.patterns.recurrence.layers import inner_groups, is_layer
from kdacompile.patterns.recurrence.proof import prove
from kdacompile.patterns.recurrence.regions import Group, find_groups
from kdacompile.patterns.recurrence.roles import Recurrence, RecurrenceCandidate, RecurrenceMatch


class RecurrenceSpec(Spec[Group, Recurrence]):
    """Regions are groups of products that reach each other."""

    name = "linear_attention"

    def regions(self, graph: Graph) -> Iterable[Group]:
        return find_groups(graph)

    def candidates(
        self, graph: Graph, region: Group, effort: Effort | None = None
    ) -> Iterator[RecurrenceCandidate | Obstacle]:
        return candidates(region, effort)

    def check(self, candidate: RecurrenceCandidate, *, wide: bool) -> Verdict[Recurrence]:
        return prove(candidate, wide=wide)

    def forms(self, graph: Graph, match: RecurrenceMatch, *, keep_upcasts: bool) -> Iterator[RecurrenceMatch]:
        """With everything upstream that the op does itself; where the graph forbids that, without."""
        if keep_upcasts:
            match = replace(match, upcast=kept_upcasts(match))
        whole = absorb(match, Scope.of(match, graph, keep_upcasts=keep_upcasts))
        yield whole
        if whole.inputs != match.inputs:
            yield match

    def inner(self, graph: Graph, region: Group, *, trial: bool) -> Iterator[Inner[Group, Recurrence]]:
        """Layers; what is one recurrence, as functions on trial must be, is cut off soon."""
        effort = Effort(ways=30, operators=0 if trial else 30_000)  # for all of them together
        for inner in inner_groups(graph, region):
            yield Inner(inner, partial(is_layer, region), effort)

    def is_near(self, region: Group) -> bool:
        return len(region.anchors) > 2

    def blockers(self, graph: Graph, *, unknown: bool) -> list[Obstacle]:
        return list(blockers.find_blockers(graph)) or (list(blockers.find_unknown(graph)) if unknown else [])

    def counterpart(
        self, candidate: RecurrenceCandidate, here: Graph, there: Graph, regions: list[Group]
    ) -> RecurrenceCandidate | str:
        """The candidate between the same Dynamo nodes."""
        versions, others = _versions(here), _versions(there)

        def move(value: Value) -> Value | None:
            own, other = versions.get(value.node, []), others.get(value.node, [])
            return other[own.index(value)] if value in own and len(own) == len(other) else None

        cut = [move(value) for value in candidate.cut]
        outputs = [move(value) for value in candidate.outputs]
        if any(value is None for value in (*cut, *outputs)):
            return "the region looks different at other sizes"
        output, state = outputs[0], outputs[1] if len(outputs) > 1 else None
        group = next((group for group in regions if output is not None and output.op in group.ops), None)
        if group is None or output is None:
            return "there is no such region at other sizes"
        likely = next(iter(candidate.bindings), None)
        writes = 1 if likely is None else likely.writes
        found = next(read_region(group, [value for value in cut if value is not None], output, state, writes), None)
        if found is None:
            return "the roles do not fit at other sizes"
        return found.reason if isinstance(found, Obstacle) else found


def _versions(graph: Graph) -> dict[Any, list[Value]]:
    """The values each Dynamo node stands for, in order: a buffer has one per write."""
    found: dict[Any, list[Value]] = {}
    made = [*graph.inputs, *(value for op in graph.ops for value in op.outs)]
    for value in sorted(made, key=lambda value: value.index):
        if value.node is not None:
            found.setdefault(value.node, []).append(value)
    return found


RECURRENCE = RecurrenceSpec()
