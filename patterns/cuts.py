"""Where a region begins: the smallest set of values that everything entering the region passes through.

Linear attention has few inputs (q, k, v, a gate, beta, a state), however many tensors are derived from them on the way
in (``k * beta``, ``v * beta``, padded, chunked, scaled copies). So the inputs are a minimum vertex cut between what
the region must not look behind and the region itself; of several minimum cuts the earliest comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

import torch

from kdacompile.patterns.ir import Op, Value
from kdacompile.patterns.regions import is_soft

MAX_INPUTS = 8


class NoCut(Exception):
    """No small set of eligible values separates the region from its surroundings."""


def minimum_cut(
    targets: list[Value],
    core: set[Op],
    eligible: Callable[[Value], bool],
    barriers: Collection[Op] = (),
) -> tuple[list[Value], list[Value]]:
    """The earliest and the latest minimum cut above ``targets``.

    ``targets`` are the region's outputs, ``core`` the operators that surely belong to it; only ``eligible`` values
    outside the core may be cut, and the region does not reach above ``barriers``. Raises ``NoCut``.
    """
    parents, sources = _walk(targets, core, barriers)
    reads: dict[Value, list[Value]] = {}
    for value, above in parents.items():
        for parent in above:
            reads.setdefault(parent, []).append(value)
    flow: dict[tuple[Value, Value], int] = {}
    through: set[Value] = set()
    sink = set(targets)
    cuttable = {value for value in parents if (value.op is None or value.op not in core) and eligible(value)}
    for _ in range(MAX_INPUTS + 1):
        path = _augment(sources, sink, reads, parents, flow, through, cuttable)
        if isinstance(path, set):
            late = _latest(sink, reads, parents, flow, through, cuttable)
            return _in_order(path), _in_order(late)
    raise NoCut(f"more than {MAX_INPUTS} tensors enter the region")


def _walk(
    targets: list[Value], core: set[Op], barriers: Collection[Op]
) -> tuple[dict[Value, list[Value]], list[Value]]:
    """Values above ``targets`` with what they are computed from, and those nothing soft computes."""
    parents: dict[Value, list[Value]] = {}
    sources: list[Value] = []
    stack = list(targets)
    while stack:
        value = stack.pop()
        if value in parents:
            continue
        op = value.op
        if op is None or op in barriers or not (op in core or (is_soft(op) and not _rounds(op))):
            parents[value] = []
            sources.append(value)
            continue
        parents[value] = [read for read in dict.fromkeys(op.reads) if not read.const]
        if not parents[value]:
            sources.append(value)
        stack.extend(parents[value])
    return parents, sources


def _rounds(op: Op) -> bool:
    """True for casts to less precision: the proof runs in float64 and cannot see them, so a region ends there."""
    if op.name != "_to_copy" or not op.reads:
        return False
    source, target = op.reads[0].dtype, op.out.dtype
    return torch.promote_types(source, target) != target


Side = tuple[Value, bool]
"""A value's upper (False) or lower (True) half: cutting a value means not getting from one to the other."""


def _augment(
    sources: list[Value],
    sink: set[Value],
    reads: dict[Value, list[Value]],
    parents: dict[Value, list[Value]],
    flow: dict[tuple[Value, Value], int],
    through: set[Value],
    cuttable: set[Value],
) -> set[Value] | None:
    """Push one more unit of flow; when none fits, return the cut nearest to the sources."""
    queue: deque[Side] = deque((value, False) for value in sources)
    came: dict[Side, Side | None] = {(value, False): None for value in sources}
    while queue:
        side = queue.popleft()
        if side[1] and side[0] in sink:
            _push(side, came, flow, through, cuttable)
            return None
        for onward in _onward(side, reads, parents, flow, through, cuttable):
            if onward not in came:
                came[onward] = side
                queue.append(onward)
    return {value for value in cuttable if (value, False) in came and (value, True) not in came}


def _onward(
    side: Side,
    reads: dict[Value, list[Value]],
    parents: dict[Value, list[Value]],
    flow: dict[tuple[Value, Value], int],
    through: set[Value],
    cuttable: set[Value],
) -> Iterator[Side]:
    """Where another unit of flow could go from here, flow taken back included."""
    value, below = side
    if not below:
        if value not in cuttable or value not in through:
            yield value, True
        for parent in parents[value]:  # undo flow that enters this value
            if flow.get((parent, value), 0) > 0:
                yield parent, True
    else:
        for child in reads.get(value, []):
            yield child, False
        if value not in cuttable or value in through:
            yield value, False


def _latest(
    sink: set[Value],
    reads: dict[Value, list[Value]],
    parents: dict[Value, list[Value]],
    flow: dict[tuple[Value, Value], int],
    through: set[Value],
    cuttable: set[Value],
) -> set[Value]:
    """Once no more flow fits: the cut nearest to the sink, between what could still reach it and what could not."""
    before: dict[Side, list[Side]] = {}
    for value in parents:
        for side in ((value, False), (value, True)):
            for onward in _onward(side, reads, parents, flow, through, cuttable):
                before.setdefault(onward, []).append(side)
    stack: list[Side] = [(value, True) for value in sink]
    reaching = set(stack)
    while stack:
        for side in before.get(stack.pop(), ()):
            if side not in reaching:
                reaching.add(side)
                stack.append(side)
    return {value for value in cuttable if (value, True) in reaching and (value, False) not in reaching}


def _in_order(values: set[Value]) -> list[Value]:
    return sorted(values, key=lambda value: value.index)


def _push(
    end: Side,
    came: dict[Side, Side | None],
    flow: dict[tuple[Value, Value], int],
    through: set[Value],
    cuttable: set[Value],
) -> None:
    if all(value not in cuttable for value in _path_values(end, came)):
        raise NoCut("a tensor enters the region in a shape no role has")
    side: Side | None = end
    while side is not None:
        origin = came[side]
        if origin is not None:
            if origin[0] is side[0]:
                if side[0] in cuttable:
                    (through.add if side[1] else through.discard)(side[0])
            elif origin[1]:
                flow[(origin[0], side[0])] = flow.get((origin[0], side[0]), 0) + 1
            else:
                flow[(side[0], origin[0])] -= 1
        side = origin


def _path_values(end: Side, came: dict[Side, Side | None]) -> list[Value]:
    values: list[Value] = []
    side: Side | None = end
    while side is not None:
        values.append(side[0])
        side = came[side]
    return values
