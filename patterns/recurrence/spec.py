"""Linear attention as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kdacompile import compat
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import operands as operands_of
from kdacompile.patterns.engine.match import Candidate, Obstacle, Verdict, rounding
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.spec import Inner, Spec
from kdacompile.patterns.recurrence import regions
from kdacompile.patterns.recurrence.absorb import Scope, absorb
from kdacompile.patterns.recurrence.absorb.casts import kept_upcasts
from kdacompile.patterns.recurrence.candidates import Effort, candidates, read_region
from kdacompile.patterns.recurrence.layers import inner_groups, is_layer
from kdacompile.patterns.recurrence.masks import mask_that_is_given
from kdacompile.patterns.recurrence.proof import prove
from kdacompile.patterns.recurrence.regions import Group, find_groups
from kdacompile.patterns.recurrence.roles import AXES, Recurrence, RecurrenceCandidate, RecurrenceMatch, place


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
        verdict = prove(candidate, wide=wide)
        rounds = _rounds_a_state(candidate, verdict.binding) if verdict.binding else None
        return verdict if rounds is None else Verdict(None, verdict.max_error, rounds.reason, code=rounds.code)

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
        left = 0 if trial else 24_000  # for all of them together: each gets half of what those before it have left
        effort = Effort(ways=30)
        for inner in inner_groups(graph, region):
            effort.operators = left // 2
            yield Inner(inner, partial(is_layer, region), effort)
            left -= left // 2 - max(0, effort.operators)

    def is_near(self, region: Group) -> bool:
        return len(region.anchors) > 2

    def forbids(self, region: Group) -> Obstacle | None:
        return mask_that_is_given(sorted(region.ops, key=lambda op: op.out.index))

    def blockers(self, graph: Graph, matched: AbstractSet[Op], *, unknown: bool) -> list[Obstacle]:
        found = list(regions.find_blockers(graph, matched)) or list(regions.find_complex(graph, matched))
        return found or (list(regions.find_unknown(graph, matched)) if unknown else [])

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

    def counted_sizes(self, match: RecurrenceMatch) -> list[Any]:
        """Lengths: a loop over q's tokens fixes their number, and leaves open that of other arguments."""
        ends = [end for end in (*match.inputs.values(), match.output) if "T" in end.axes and end.value.node is not None]
        lengths = [compat.example_value(end.value.node).shape[end.axes.index("T")] for end in ends]
        still_open = [length for length in lengths if not isinstance(length, int)]
        return still_open if len(still_open) < len(lengths) else []


def _rounds_a_state(candidate: RecurrenceCandidate, binding: Recurrence) -> Obstacle | None:
    """A cast to fewer bits than queries, keys and values have: a state or a gate may be given in fewer."""
    inputs = [binding.inputs[role].value for role in ("q", "k", "v")]
    return rounding(candidate.core, candidate.ops, inputs, candidate.outputs)


def _versions(graph: Graph) -> dict[Any, list[Value]]:
    """The values each Dynamo node stands for, in order: a buffer has one per write."""
    found: dict[Any, list[Value]] = {}
    made = [*graph.inputs, *(value for op in graph.ops for value in op.outs)]
    for value in sorted(made, key=lambda value: value.index):
        if value.node is not None:
            found.setdefault(value.node, []).append(value)
    return found


RECURRENCE = RecurrenceSpec()


# -- ops that are in the graph already --------------------------------------------------------------------------------
# A lifted function arrives as the op, and so does a direct call of ``kdacompile.ops``; the model's gate activation,
# l2norm or sigmoid usually stands in the code around it. Nothing is checked here: the region is the op itself, and the
# rules of ``absorb`` move its inputs up.

_GATE_AXES = {"none": "", "head": "H", "token": "BTH", "channel": "BTHK"}


@dataclass(frozen=True)
class Existing:
    """An op that the graph has already."""

    op: Op

    @property
    def ops(self) -> set[Op]:
        return {self.op}


class CallSpec(Spec[Existing, Recurrence]):
    """Regions are the functional ops of the graph whose results are read."""

    name = "linear_attention"

    def regions(self, graph: Graph) -> Iterator[Existing]:
        return (Existing(op) for op in graph.ops if op.name in compat.OWN_OPS and op.outs[0].node is not None)

    def candidates(self, graph: Graph, region: Existing, effort: object = None) -> Iterator[RecurrenceCandidate]:
        op = region.op
        binding = _binding(op)
        if binding is not None:
            cut = [placement.value for placement in binding.inputs.values()]
            outputs = [placement.value for placement in binding.ends]
            yield Candidate(op, {op}, cut, outputs, [binding], core={op})

    def check(self, candidate: RecurrenceCandidate, *, wide: bool) -> Verdict[Recurrence]:
        return Verdict(next(iter(candidate.bindings)), 0.0, "an op that was there already")

    def forms(self, graph: Graph, match: RecurrenceMatch, *, keep_upcasts: bool) -> Iterator[RecurrenceMatch]:
        whole = absorb(match, Scope.of(match, graph, keep_upcasts=keep_upcasts))
        if whole.absorbed:
            _tie_sizes(match)
            yield whole

    def counterpart(
        self, candidate: RecurrenceCandidate, here: Graph, there: Graph, regions: list[Existing]
    ) -> RecurrenceCandidate | str:
        same = (region for region in regions if region.op.node is candidate.anchor.node)
        found = next((each for region in same for each in self.candidates(there, region)), None)
        return found or "the op is called otherwise at other sizes"


def _binding(op: Op) -> Recurrence | None:
    """Who is who in the op's call; None where the op was asked for something that a match never asks for."""
    operands = dict(zip((each.name for each in operands_of(Call)), op.args, strict=False))
    options = op.kwargs
    if options.get("chunk_size", 0) or operands.get("cu_seqlens") is not None:
        return None
    inputs = {
        role: _place(role, value, _axes(role, options["gate"], value))
        for role, value in operands.items()
        if isinstance(value, Value)
    }
    if any(placement.value.node is None for placement in inputs.values()):
        return None
    q, v = inputs["q"].value.shape, inputs["v"].value.shape
    state = op.outs[1]
    return Recurrence(
        inputs=inputs,
        output=_place("o", op.outs[0], AXES["o"]),
        final_state=None if state.node is None else _place("final_state", state, AXES["final_state"]),
        sizes={"B": q[0], "T": q[1], "G": q[2], "K": q[3], "H": v[2], "V": v[3]},
        **{name: option for name, option in options.items() if name in Recurrence.__dataclass_fields__},
    )


def _tie_sizes(call: RecurrenceMatch) -> None:
    """Guard what the op demands, equal sizes for equal axes: each input of a graph comes with symbols of its own."""
    known: dict[str, Any] = {}
    for placement in call.inputs.values():
        shape = compat.example_value(placement.value.node).shape
        for axis, size in zip(placement.axes, shape, strict=True):
            if axis != ".":
                compat.tie(known.setdefault(axis, size), size)


def _axes(role: str, gate: str, value: Value) -> str:
    if role == "g":
        return _GATE_AXES[gate]
    return AXES[role][: len(value.shape)]


def _place(role: str, value: Value, axes: str) -> Placement:
    """Size-one dimensions have no axis."""
    return place(role, value, "".join("." if n == 1 else axis for axis, n in zip(axes, value.shape, strict=True)))


CALLS = CallSpec()
