"""Grouped heads: key heads repeated for the value heads they serve.

    q.repeat_interleave(r, dim=heads),  q[:, :, :, None].expand(.., r, ..).reshape(..)     absorbed: H = G r

Value head h reads key head h // r, as the op has it. A repeat in the other order (h % G, as ``Tensor.repeat`` makes
it) is another function; which of the two it is, is read off the view that merges heads and copies: the copies come
last.
"""

from __future__ import annotations

from dataclasses import replace

from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.vocabulary import VIEWS
from kdacompile.patterns.recurrence.absorb.axes import one_head, split_heads
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def absorb_repeat(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    q, k = (_before_repeat(match.inputs[role], scope, match.sizes) for role in ("q", "k"))
    if q is None or k is None or q[1] != k[1]:
        return None
    heads = match.sizes["G"] // q[1]
    return match.taking("repeat", {"q": q[0], "k": k[0]}, sizes={**match.sizes, "G": heads})


def _before_repeat(placement: Placement, scope: Scope, sizes: dict[str, int]) -> tuple[Placement, int] | None:
    """The tensor with one head per group, and the number of copies made of each."""
    op = placement.value.op
    if op is None or op.name not in VIEWS | {"expand"} or "G" not in placement.axes:
        return None
    found = (one_head if op.name == "expand" else split_heads)(op.out, placement.axes, op.reads[0])
    if found is None or not scope.lets_gradients_through([op], op.reads):
        return None
    axes, copies = found
    merged = replace(placement, value=op.reads[0], axes=axes)
    higher = climb(merged, scope, sizes)
    if higher is None or "=" in higher.axes:  # the copies themselves must be gone
        return None
    return higher, copies
