"""Bias of the gate's logit.

    x + dt_bias                                         absorbed: dt_bias, [H] or [H, K]

after the activation was. The bias may be added before the heads are split ([B, T, H K] + [H K]).
"""

from __future__ import annotations

from dataclasses import replace

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.match import Fused
from kdacompile.patterns.recurrence.absorb.axes import broadcast
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import Placement


def absorb_dt_bias(fused: Fused, scope: Scope) -> Fused | None:
    if fused.gate_fn not in ("softplus", "sigmoid") or "dt_bias" in fused.inputs:
        return None
    g = fused.inputs["g"]
    op = g.value.op
    if op is None or op.name != "add" or op.kwargs.get("alpha", 1) != 1 or not scope.computes(op):
        return None
    left, right = op.args[:2]
    if not isinstance(left, Value) or not isinstance(right, Value) or not scope.lets_gradients_through([op], op.reads):
        return None
    placed = [replace(g, value=value, axes=broadcast(op, g.axes, value)) for value in (left, right)]
    for logit, bias in sorted(zip(placed, reversed(placed), strict=True), key=lambda pair: _likeness(pair[1].value)):
        if not _is_bias(bias, fused) or not _same_axes(logit, g):
            continue
        x = climb(logit, scope, fused.sizes)
        parameter = climb(replace(bias, role="dt_bias"), scope, fused.sizes)
        if x is not None and parameter is not None and scope.same_device(parameter.value, x.value):
            return fused.taking("dt_bias", {"g": x, "dt_bias": parameter})
    return None


def _is_bias(placement: Placement, fused: Fused) -> bool:
    """No batch row or token has a bias of its own, and a gate per head has none per channel."""
    legal = "H.=" if fused.gate == "token" else "HK*.="
    return set(placement.axes) <= set(legal) and not placement.value.const


def _same_axes(logit: Placement, gate: Placement) -> bool:
    """The logit alone must be as large as the sum in heads and channels."""
    return all(axis in logit.axes for axis in gate.axes if axis in "HK*")


def _likeness(value: Value) -> tuple[bool, bool, int]:
    """Sorts what looks like a parameter first; it decides only where one token of one row hides which is which."""
    return not value.param, value.op is not None, len(value.shape)
