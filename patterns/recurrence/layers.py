"""Several layers in one group: linear attention whose result is worked on by nothing but soft operators.

Between the layers of a usual model stand projections and norms, which end a group. Where only sums and products stand
(two mixers in a row, two branches added up), anchors of several layers reach each other. Their results still have to
pass one value each: a value that every path from the anchors above it to the group's end runs through closes those
anchors off, and they are a group of their own. So are the sequences of a packed batch, one loop each, whose results are
put beside each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.vocabulary import DATA_MOVEMENT
from kdacompile.patterns.recurrence.regions import Group, exits_of
from kdacompile.patterns.recurrence.roles import Recurrence, RecurrenceCandidate

MAX_GROUPS = 12
"""Smaller groups tried within one."""


def inner_groups(graph: Graph, group: Group) -> Iterator[Group]:
    """Groups of at least two anchors that one value of ``group`` closes off, smallest first."""
    if not group.exits:
        return
    everything = group.exits[0].anchors
    after = _dominators(group)
    closed: dict[int, None] = {}
    own: dict[Op, int] = {}
    for op in sorted(group.ops, key=lambda op: op.outs[0].index):
        if op in group.anchors:
            bit = group.masks[op] & ~_union(group, op)
            for dominator in _chain(op, after):
                own[dominator] = own.get(dominator, 0) | bit
    for op, bits in own.items():
        mask = group.masks[op]
        if mask & ~bits == 0 and mask != everything and mask.bit_count() >= 2:
            closed[mask] = None
    for mask in sorted(closed, key=int.bit_count)[:MAX_GROUPS]:
        ops = {op for op in group.ops if group.masks[op] & ~mask == 0}
        anchors = [op for op in group.anchors if op in ops]
        inner = Group(anchors, ops, masks=group.masks)
        inner.exits = exits_of(graph, inner)
        yield inner


def is_layer(group: Group, candidate: RecurrenceCandidate, binding: Recurrence) -> bool:
    """True if a binding that holds is a layer of ``group``, or one of several sequences that are only put beside each
    other in the end. One chunk's share of the tokens is neither: it begins with the state that other chunks leave, they
    read its keys, or they add to its result.
    """
    sizes = binding.sizes
    wanted = Counter(size for size in (sizes["B"], binding.tokens, sizes["H"]) if size > 1)
    if any(not wanted - Counter(value.shape) for value in group.exits[0].chain):
        return True
    others = group.ops - candidate.ops
    if sizes["T"] == 1 or any(value.op in others or _read_by(value, group, others) for value in candidate.cut):
        return False
    return not any(_computed_from(value, others) for value in candidate.outputs)


def _read_by(value: Value, group: Group, ops: set[Op]) -> bool:
    """True if one of ``ops`` reads an input of the group, or a rearrangement of it."""
    moved = [out for user in value.users if user not in group.ops and user.name in DATA_MOVEMENT for out in user.outs]
    return not ops.isdisjoint(value.users) or any(_read_by(out, group, ops) for out in moved)


def _computed_from(value: Value, ops: set[Op]) -> bool:
    """True if one of ``ops`` computes something from a result, rather than putting it somewhere."""
    users = [user for user in value.users if user in ops]
    return any(user.name not in DATA_MOVEMENT or any(_computed_from(out, ops) for out in user.outs) for user in users)


def _union(group: Group, op: Op) -> int:
    """Anchors above an operator, itself not counted."""
    mask = 0
    for value in op.reads:
        if value.op is not None:
            mask |= group.masks.get(value.op, 0)
    return mask


def _chain(op: Op, after: dict[Op, Op | None]) -> Iterator[Op]:
    current: Op | None = op
    while current is not None:
        yield current
        current = after.get(current)


def _dominators(group: Group) -> dict[Op, Op | None]:
    """For each operator on the way to the group's main end: the next one that all its paths there run through (None:
    the end itself). Ways out elsewhere (a state that is returned) do not count: whether a value escapes is asked later.
    """
    main = group.exits[0].anchors
    after: dict[Op, Op | None] = {}
    depth: dict[Op, int] = {}

    def meet(one: Op | None, other: Op | None) -> Op | None:
        while one is not other:
            if one is None or other is None:
                return None
            if depth[one] >= depth[other]:
                one = after[one]
            else:
                other = after[other]
        return one

    for op in sorted(group.ops, key=lambda op: -op.outs[0].index):
        inside = [user for value in op.outs for user in value.users if user in after]
        if inside:
            found: Op | None = inside[0]
            for user in inside[1:]:
                found = meet(found, user)
            after[op] = found
        elif group.masks[op] == main:
            after[op] = None
        else:
            continue
        step = after[op]
        depth[op] = 0 if step is None else depth[step] + 1
    return after
