"""Ops that are in the graph already absorb what stands above them, as a match does.

A lifted function arrives as the op, and so does a direct call of ``kdacompile.ops``; the model's gate activation,
l2norm or sigmoid usually stands in the code around it. Nothing is proven here: the region is the op itself, and the
rules of ``patterns/absorb`` move its inputs up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kdacompile import compat
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.match import Fused
from kdacompile.patterns.recurrence.candidates import Candidate
from kdacompile.patterns.recurrence.regions import Group
from kdacompile.patterns.recurrence.roles import AXES, Placement

_OPERANDS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
_GATE_AXES = {"none": "", "head": "H", "token": "BTH", "channel": "BTHK"}


def calls(functional: Graph) -> Iterator[Fused]:
    """The functional ops of the graph whose results are read, each as a match that has absorbed nothing yet."""
    for op in functional.ops:
        if op.name in compat.OWN_OPS and op.outs[0].node is not None:
            fused = as_match(op)
            if fused is not None:
                yield fused


def as_match(op: Op) -> Fused | None:
    """The op call as a match; None where the op was asked for something that a match never asks for."""
    operands = dict(zip(_OPERANDS, op.args, strict=False))
    options = op.kwargs
    if options.get("chunk_size", 0) or (len(op.args) > len(_OPERANDS) and op.args[-1] is not None):
        return None
    inputs = {
        role: _place(role, value, _axes(role, options["gate"], value))
        for role, value in operands.items()
        if isinstance(value, Value)
    }
    if any(placement.value.node is None for placement in inputs.values()):
        return None
    q, v = inputs["q"].value.shape, inputs["v"].value.shape
    sizes = {"B": q[0], "T": q[1], "G": q[2], "K": q[3], "H": v[2], "V": v[3]}
    state = op.outs[1] if op.outs[1].node is not None else None
    candidate = Candidate(Group([op], {op}, []), {op}, [p.value for p in inputs.values()], op.outs[0], state, [])
    return Fused(
        candidate,
        inputs,
        _place("o", op.outs[0], AXES["o"]),
        None if state is None else _place("final_state", state, AXES["final_state"]),
        sizes,
        gate=options["gate"],
        delta=options["delta"],
        scale=options["scale"],
        max_error=0.0,
        gate_fn=options["gate_fn"],
        gate_scale=options["gate_scale"],
        sigmoid_beta=options["sigmoid_beta"],
        qk_l2norm_eps=options["qk_l2norm_eps"],
    )


def tie_sizes(call: Fused) -> None:
    """Guard what the op demands, equal sizes for equal axes: each input of a graph comes with symbols of its own."""
    known: dict[str, Any] = {}
    for placement in call.inputs.values():
        shape = compat.example_value(placement.value.node).shape
        for axis, size in zip(placement.axes, shape, strict=True):
            if axis != ".":
                compat.tie(known.setdefault(axis, size), size)


def same_call(candidate: Candidate, here: Graph, there: Graph, groups: list[Group]) -> Candidate | str:
    """The op's call in a functional graph at other sizes."""
    node = candidate.output.op.node if candidate.output.op else None
    fused = next(
        (fused for fused in calls(there) if fused.output.value.op and fused.output.value.op.node is node), None
    )
    return "the op is called otherwise at other sizes" if fused is None else fused.candidate


def _axes(role: str, gate: str, value: Value) -> str:
    if role == "g":
        return _GATE_AXES[gate]
    return AXES[role][: len(value.shape)]


def _place(role: str, value: Value, axes: str) -> Placement:
    """Size-one dimensions have no axis."""
    marked = "".join("." if size == 1 else axis for axis, size in zip(axes, value.shape, strict=True))
    return Placement(role, value, marked)
