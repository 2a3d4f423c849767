"""Bias of the gate's logit.

    x + dt_bias                                         absorbed: dt_bias, [H] or [H, K]

after the activation was. The bias may be added before the heads are split ([B, T, H K] + [H K]).
"""

from __future__ import annotations

from dataclasses import replace

from kdacompile.graph.ir import Value
from kdacompile.lowering.gates import GATE_FUNCTIONS
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.recurrence.absorb.axes import broadcast
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch, in_role


def absorb_dt_bias(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    if not GATE_FUNCTIONS[match.binding.gate_fn].parametric or "dt_bias" in match.inputs:
        return None
    g = match.inputs["g"]
    op = g.value.op
    if op is None or op.name != "add" or op.kwargs.get("alpha", 1) != 1 or not scope.computes(op):
        return None
    left, right = op.args[:2]
    if not isinstance(left, Value) or not isinstance(right, Value) or not scope.lets_gradients_through([op], op.reads):
        return None
    placed = [replace(g, value=value, axes=broadcast(op, g.axes, value)) for value in (left, right)]
    for logit, bias in sorted(zip(placed, reversed(placed), strict=True), key=lambda pair: _likeness(pair[1].value)):
        if not _is_bias(bias, match) or not _same_axes(logit, g):
            continue
        x = climb(logit, scope, match.sizes)
        parameter = climb(in_role(bias, "dt_bias"), scope, match.sizes)
        if x is not None and parameter is not None and scope.same_device(parameter.value, x.value):
            return match.taking("dt_bias", {"g": x, "dt_bias": parameter})
    return None


def _is_bias(placement: Placement, match: RecurrenceMatch) -> bool:
    """No batch row or token has a bias of its own, and a gate per head has none per channel."""
    legal = "H.=" if match.binding.gate == "token" else "HK*.="
    return set(placement.axes) <= set(legal) and not placement.value.const


def _same_axes(logit: Placement, gate: Placement) -> bool:
    """The logit alone must be as large as the sum in heads and channels."""
    return all(axis in logit.axes for axis in gate.axes if axis in "HK*")


def _likeness(value: Value) -> tuple[bool, bool, int]:
    """Sorts what looks like a parameter first; it decides only where one token of one row hides which is which."""
    return not value.param, value.op is not None, len(value.shape)
