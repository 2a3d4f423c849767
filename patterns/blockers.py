"""Near misses that never become a region: a threshold or saturation between products of activations.

Such an operator splits what would otherwise be one group, so no candidate shows up. The report should still say why the
model's linear attention was left alone, and where.
"""

from __future__ import annotations

from collections.abc import Iterator

from kdacompile.patterns.ir import Graph, Op
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import is_anchor, is_soft

BLOCKERS = frozenset(
    "tanh clamp clamp_min clamp_max maximum minimum where masked_fill nan_to_num round floor ceil trunc sign "
    "abs".split()
)
"""Pointwise operators with a threshold or a saturation, as found in variants of the recurrence."""


def find_blockers(graph: Graph) -> Iterator[Obstacle]:
    """The first blocker of each kind that stands between two anchors."""
    after = _reached(graph.ops)
    before = _reached_backwards(graph.ops)
    between = [op for op in graph.ops if _blocks(op) and op in after and op in before]
    for name in dict.fromkeys(op.name for op in between):
        turns = [op for op in between if op.name == name]
        place = "on the state" if _repeats(turns) else "between products of activations"
        yield Obstacle("operator", f"a non-linearity {place} ({name}), which probes cannot judge", turns[0])


def _repeats(ops: list[Op]) -> bool:
    """True if one of the operators depends on another: a loop carries on what the first one made."""
    first, known = ops[0], {ops[0]}
    stack = [user for value in first.outs for user in value.users]
    while stack:
        op = stack.pop()
        if op in ops:
            return True
        if op not in known and _passable(op):
            known.add(op)
            stack.extend(user for value in op.outs for user in value.users)
    return False


def _blocks(op: Op) -> bool:
    return op.name in BLOCKERS and not op.out.const and not is_soft(op) and op.out.dtype.is_floating_point


def _passable(op: Op) -> bool:
    return not op.out.const and (is_soft(op) or _blocks(op))


def _reached(ops: list[Op]) -> set[Op]:
    """Operators that depend on an anchor through soft operators and blockers."""
    reached: set[Op] = set()
    for op in ops:
        if _passable(op) and any(v.op is not None and (v.op in reached or is_anchor(v.op)) for v in op.reads):
            reached.add(op)
    return reached


def _reached_backwards(ops: list[Op]) -> set[Op]:
    """Operators that an anchor depends on through soft operators and blockers."""
    reached: set[Op] = set()
    for op in reversed(ops):
        users = (user for value in op.outs for user in value.users)
        if _passable(op) and any(user in reached or is_anchor(user) for user in users):
            reached.add(op)
    return reached
