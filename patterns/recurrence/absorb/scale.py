"""Scale: a constant factor on q.

    q * c,  q / c,  -q                                  absorbed: scale

The output is linear in q and nothing else depends on it, so the factor moves to the op's scale. A factor on k does not
absorb (the state depends on k), and none moves past an l2norm.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.values import number
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def absorb_scale(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    q = match.inputs["q"]
    op = q.value.op
    if op is None or match.binding.qk_l2norm_eps or not scope.computes(op):
        return None
    found = factor(op)
    if found is None:
        return None
    source, scale = found
    if (source.shape, source.dtype) != (op.out.shape, op.out.dtype) or not scope.lets_gradients_through([op], [source]):
        return None
    higher = climb(replace(q, value=source), scope, match.sizes)
    if higher is None or not scope.same_device(higher.value, q.value):
        return None
    return match.taking("scale", {"q": higher}, scale=match.binding.scale * scale)


def factor(op: Op) -> tuple[Value, float] | None:
    """(x, c) if the operator computes ``c * x`` for a usable number c."""
    if op.name == "neg":
        return op.reads[0], -1.0
    if op.name not in ("mul", "div") or op.kwargs.get("rounding_mode"):
        return None
    left, right = op.args[:2]
    if op.name == "mul" and number(left) is not None:
        left, right = right, left
    scale = number(right)
    if not isinstance(left, Value) or left.const or scale is None or not math.isfinite(scale) or scale == 0.0:
        return None
    return left, scale if op.name == "mul" else 1.0 / scale
