"""Ops that are in the graph already absorb what stands above them, as a match does.

A lifted function arrives as the op, and so does a direct call of ``kdacompile.ops``; the model's gate activation,
l2norm or sigmoid usually stands in the code around it. Nothing is checked here: the region is the op itself, and the
rules of ``absorb`` move its inputs up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdacompile import compat
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import operands as operands_of
from kdacompile.patterns.engine.match import Candidate, Verdict
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.spec import Spec
from kdacompile.patterns.recurrence.absorb import Scope, absorb
from kdacompile.patterns.recurrence.roles import AXES, Recurrence, RecurrenceCandidate, RecurrenceMatch, place

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
