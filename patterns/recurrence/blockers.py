"""Near misses that never become a region: a threshold, a saturation or an operator that nobody knows stands between
products of activations.

Such an operator splits what would otherwise be one group, so no candidate shows up. The report should still say why the
model's linear attention was left alone, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kdacompile.graph.ir import Graph, Op, reach
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.vocabulary import REGION
from kdacompile.patterns.recurrence.regions import is_anchor, is_soft

BLOCKERS = frozenset(
    "tanh clamp clamp_min clamp_max maximum minimum where masked_fill nan_to_num round floor ceil trunc sign "
    "abs".split()
)
"""Pointwise operators with a threshold or a saturation, as found in variants of the recurrence."""


Blocks = Callable[[Op], bool]


def find_blockers(graph: Graph) -> Iterator[Obstacle]:
    """The first blocker of each kind that stands between two anchors."""
    for op, place in _between(graph, _is_blocker):
        yield Obstacle("operator", f"a non-linearity {place} ({op.name}), which probes cannot judge", op)


def find_unknown(graph: Graph) -> Iterator[Obstacle]:
    """The first operator of each kind between two anchors that the vocabulary lacks."""
    for op, place in _between(graph, _is_unknown):
        yield Obstacle("operator", f"an unknown operator {place} ({op.name})", op)


def _between(graph: Graph, blocks: Blocks) -> Iterator[tuple[Op, str]]:
    """The first of each kind of operators that block, between two anchors, and where it acts."""
    after = _reached(graph.ops, blocks)
    before = _reached_backwards(graph.ops, blocks)
    between = [op for op in graph.ops if blocks(op) and op in after and op in before]
    for name in dict.fromkeys(op.name for op in between):
        turns = [op for op in between if op.name == name]
        yield turns[0], "on the state" if _repeats(turns, blocks) else "between products of activations"


def _repeats(ops: list[Op], blocks: Blocks) -> bool:
    """True if one of the operators depends on another: a loop carries on what the first one made."""

    def below(op: Op) -> Iterator[Op]:
        return (user for value in op.outs for user in value.users if user in ops or _passable(user, blocks))

    return any(op in ops for op in reach(below(ops[0]), below))


def _is_blocker(op: Op) -> bool:
    return op.name in BLOCKERS and not op.out.const and not is_soft(op) and op.out.dtype.is_floating_point


def _is_unknown(op: Op) -> bool:
    """Of operators that keep a shape: others (norms, convolutions) are no part of a recurrence."""
    like_an_operand = any(read.shape == op.out.shape for read in op.reads)
    return op.name not in REGION and not op.out.const and like_an_operand and op.out.dtype.is_floating_point


def _passable(op: Op, blocks: Blocks) -> bool:
    return not op.out.const and (is_soft(op) or blocks(op))


def _reached(ops: list[Op], blocks: Blocks) -> set[Op]:
    """Operators that depend on an anchor through soft operators and those that block."""
    reached: set[Op] = set()
    for op in ops:
        if _passable(op, blocks) and any(v.op is not None and (v.op in reached or is_anchor(v.op)) for v in op.reads):
            reached.add(op)
    return reached


def _reached_backwards(ops: list[Op], blocks: Blocks) -> set[Op]:
    """Operators that an anchor depends on through soft operators and those that block."""
    reached: set[Op] = set()
    for op in reversed(ops):
        users = (user for value in op.outs for user in value.users)
        if _passable(op, blocks) and any(user in reached or is_anchor(user) for user in users):
            reached.add(op)
    return reached
