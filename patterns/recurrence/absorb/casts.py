"""Casts and layouts: the same numbers under another shape or dtype.

    x32 = x.transpose(1, 2).contiguous().float()      absorbed: x, with its dimensions relabelled

Views, copies and upcasts to float32 are passed on the way up (``kda.precision="fp32"`` keeps the upcasts); a downcast
rounds and stays. Half-precision inputs reach the op as they are: the op computes in float32 itself. Where a region
makes its upcasts inside (token by token), ``kda.precision="fp32"`` hands the op float32 copies instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING
from kdacompile.patterns.recurrence.absorb.axes import SAME_DATA, above
from kdacompile.patterns.recurrence.absorb.scope import HALVES, Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch

MERGED = frozenset({"g", "dt_bias"})
"""Roles that may come with H and K merged."""


def step_up(placement: Placement, scope: Scope, sizes: dict[str, int]) -> Placement | None:
    """The placement one layout, copy or upcast further up, visible to Dynamo or not."""
    op = placement.value.op
    if op is None or op.name not in SAME_DATA or not scope.crosses(op):
        return None
    axes = above(op, placement.axes, sizes)
    if axes is None or ("*" in axes and placement.role not in MERGED):
        return None
    return replace(placement, value=op.reads[0], axes=axes)


def climb(placement: Placement, scope: Scope, sizes: dict[str, int]) -> Placement | None:
    """The highest placement at or above this one that the rewrite can read; None if there is none."""
    found = placement if scope.holds(placement.value) else None
    crossed: set[Op] = set()
    higher = step_up(placement, scope, sizes)
    while higher is not None:
        assert placement.value.op is not None
        crossed.add(placement.value.op)
        placement = higher
        if not scope.lets_gradients_through(crossed, [placement.value]):
            break
        if scope.holds(placement.value) and (found is None or scope.same_device(placement.value, found.value)):
            found = placement
        higher = step_up(placement, scope, sizes)
    return found


def absorb_casts(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    moved: dict[str, Placement] = {}
    for role, placement in match.inputs.items():
        higher = climb(placement, scope, match.sizes)
        if higher is not None and higher.value is not placement.value:
            moved[role] = higher
    if not moved:
        return None
    upcast = any(moved[role].value.dtype != match.inputs[role].value.dtype for role in moved)
    return match.taking("upcast", moved) if upcast else match.moved_up(moved)


def kept_upcasts(match: RecurrenceMatch) -> frozenset[str]:
    """Roles of half-precision tensors that the region itself casts to float32 before it computes with them."""
    ops = match.candidate.ops
    return frozenset(
        role
        for role, placement in match.inputs.items()
        if placement.value.dtype in HALVES
        and placement.value in match.candidate.cut
        and _all_upcast(placement.value, ops)
    )


def _all_upcast(value: Value, ops: set[Op]) -> bool:
    def inside(value: Value) -> list[Op]:
        upcast = (user for user in value.users if user.name == "_to_copy" and user.out.dtype == torch.float32)
        return list((ops & {*value.users}).difference(upcast))

    moved = reach([value], lambda moved: [out for user in inside(moved) for out in user.outs])
    return all(user.name in LAYOUT | PICKING and user.name != "_to_copy" for each in moved for user in inside(each))


Rule = Callable[[RecurrenceMatch, Scope], "RecurrenceMatch | None"]
"""One absorption: the match with something upstream taken over, or None."""
