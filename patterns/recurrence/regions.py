"""Where linear attention could be: operators that mix tokens, and the values through which their results leave.

A region is found from its *anchors*: products of two activations that sum over a dimension (``q k^T``, ``k^T v``,
``(S * k).sum``), outer products, cumulative sums and triangular solves. Projections, norms and activations have none of
these, so anchors that reach each other belong to one region. Results leave through *exits*: the outputs and the final
state. Exits are told apart by which anchors they depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice

from kdacompile.graph.ir import Graph, Op, Value, ancestors, reach
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.values import is_weight, root
from kdacompile.patterns.engine.vocabulary import (
    CONTRACTIONS,
    INDEXED,
    LAYOUT,
    REGION,
    SCANS,
    SELECTIONS,
    SOLVES,
)
from kdacompile.patterns.recurrence.masks import mask_of, obstacle


def is_soft(op: Op) -> bool:
    """True if a region may contain the operator (constants may be made by anything)."""
    if op.out.const:
        return True
    if op.name not in REGION:
        return False
    if op.name in CONTRACTIONS:
        return not any(is_weight(root(value)) for value in op.reads)
    if op.name == "where":
        return isinstance(op.args[0], Value) and op.args[0].const
    if op.name == "masked_fill":
        return op.args[1].const
    if op.name in INDEXED:
        return all(v.const for v in op.reads[1:] if not v.dtype.is_floating_point)
    if op.name == "_to_copy":
        return op.out.dtype.is_floating_point
    if op.name == "pow":
        base, exponent = op.args[:2]
        if isinstance(exponent, Value):
            return exponent.const or not isinstance(base, Value) or base.const
        return exponent == int(exponent)
    return op.out.dtype.is_floating_point and not _saturates(op)


def _saturates(op: Op) -> bool:
    """``1 + exp(x)`` and what divides by it: a sigmoid in pieces. The recurrence never adds a number to an exponential,
    so a region begins below it, as it does below ``sigmoid``.
    """
    if op.name in ("add", "sub", "rsub"):
        data = [value for value in op.reads if not value.const]
        return len(data) == 1 and _is_exponential(data[0])
    below = {"div": op.args[1:2], "reciprocal": op.args[:1], "pow": op.args[:1]}.get(op.name, ())
    made = [root(value).op for value in below if isinstance(value, Value) and not value.const]
    return any(maker is not None and maker.name in ("add", "sub", "rsub") and _saturates(maker) for maker in made)


def _is_exponential(value: Value) -> bool:
    """True for an exponential, with a sign or a constant factor at most."""
    op = root(value).op
    while op is not None and op.name in ("mul", "neg") and sum(not read.const for read in op.reads) == 1:
        op = root(next(read for read in op.reads if not read.const)).op
    return op is not None and op.name in ("exp", "exp2")


def _activations(operands: list[Value]) -> list[Value]:
    """Distinct data operands: constants, parameters and repeats of the same value do not count."""
    roots = dict.fromkeys(root(value) for value in operands)
    return [value for value in roots if not value.const and not value.param]


def _spreads(factors: list[Value], out: Value) -> bool:
    """An outer product: the result is larger than both factors."""
    return len(factors) == 2 and all(math.prod(out.shape) > math.prod(value.shape) for value in factors)


def is_anchor(op: Op) -> bool:
    if op.out.const or not is_soft(op):
        return False
    if op.name in CONTRACTIONS:
        return len(_activations(op.reads)) >= 2
    if op.name in SCANS or op.name in SOLVES:
        return True
    if op.name == "mul":
        return len(_activations(op.reads)) >= 2 and _spreads(op.reads, op.out)
    if op.name == "addcmul":
        factors = list(op.args[1:3])
        return len(_activations(factors)) >= 2 and _spreads(factors, op.out)
    if op.name == "sum":
        source = root(op.reads[0]).op
        while source is not None and source.name in SELECTIONS:
            source = root(next(value for value in source.reads if not value.const)).op
        return source is not None and source.name == "mul" and len(_activations(source.reads)) >= 2
    return False


@dataclass
class Exit:
    """Values through which every path from one set of anchors leaves, earliest first."""

    anchors: int
    chain: list[Value]


@dataclass
class Group:
    """Anchors that reach each other, the operators after them, and the exits (most anchors first)."""

    anchors: list[Op] = field(default_factory=list)
    ops: set[Op] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    masks: dict[Op, int] = field(default_factory=dict)
    """For each operator of the graph, the anchors it depends on, as bits."""
    beyond: dict[Op, int] = field(default_factory=dict)
    """Those it depends on by way of operators that no region has: projections, norms, activations."""


def find_groups(graph: Graph) -> list[Group]:
    """Groups of at least two anchors that a region may have, one of them a contraction, in graph order."""
    masks: dict[Op, int] = {}
    bit = 0
    order: list[Op] = []
    leader: dict[Op, Op] = {}

    def find(op: Op) -> Op:
        while leader[op] is not op:
            leader[op] = leader[leader[op]]
            op = leader[op]
        return op

    for op in graph.ops:
        if op.out.const or not is_soft(op):
            continue
        above = [value.op for value in op.reads if value.op is not None and value.op in masks]
        mask = 0
        for parent in above:
            mask |= masks[parent]
        if is_anchor(op):
            mask |= 1 << bit
            bit += 1
        elif not above:
            continue
        masks[op] = mask
        leader[op] = op
        order.append(op)
        for parent in above:
            leader[find(op)] = find(parent)
    groups: dict[Op, Group] = {}
    for op in order:
        group = groups.setdefault(find(op), Group())
        group.ops.add(op)
        if is_anchor(op):
            group.anchors.append(op)
    found = [
        g
        for g in groups.values()
        if len(g.anchors) >= 2 and any(a.name in CONTRACTIONS or a.name == "sum" for a in g.anchors)
    ]
    for alone in [g for g in groups.values() if len(g.anchors) == 1 and g.anchors[0].name in CONTRACTIONS]:
        take_in_state(found, alone)
    beyond = by_way_of_others(graph, masks) if found else {}
    for group in found:
        group.masks, group.beyond = masks, beyond
    found = [group for group in found if may_have_a_region(group)]
    for group in found:
        group.exits = exits_of(graph, group)
    return found


def take_in_state(groups: list[Group], alone: Group) -> None:
    """Put a product of what a group reads, ``k^T v``, into it: the state after a first chunk, which reaches nothing."""
    keys = _sources(alone)
    for group in groups:
        if len(keys) == 2 and keys <= _sources(group):
            group.anchors += alone.anchors
            group.ops |= alone.ops
            return


def _sources(group: Group) -> set[Value]:
    """What the anchors of a group read that no operator of it makes, layouts and constant factors aside."""
    found: set[Value] = set()
    for value in (value for anchor in group.anchors for value in _activations(anchor.reads)):
        while value.op is not None and value.op.name in ("mul", "div", "neg", *LAYOUT):
            data = [read for read in value.op.reads if not read.const]
            if len(data) != 1:
                break
            value = data[0]
        if value.op not in group.ops:
            found.add(value)
    return found


def by_way_of_others(graph: Graph, masks: dict[Op, int]) -> dict[Op, int]:
    """For each operator the anchors from which a way leads to it through operators that are in no group."""
    found: dict[Op, int] = {}
    for op in graph.ops:
        mask = 0
        for above in (value.op for value in op.reads if value.op is not None):
            mask |= found.get(above, 0) | (0 if op in masks else masks.get(above, 0))
        if mask:
            found[op] = mask
    return found


CHAIN = 4
"""Anchors of two hyper-connections."""


def may_have_a_region(group: Group) -> bool:
    """Whether two anchors may be in one region, which an op can stand for only if no way leads out of it and back.

    They may not where all of them are steps of one chain, each computed from the last by a layer of the model: streams
    that hyper-connections mix and put back. What is wrong with a chain of few is told as usual.
    """
    if len(group.anchors) < CHAIN:
        return True
    before = 0
    for op in sorted(group.anchors, key=lambda op: op.out.index):
        if before & ~group.beyond.get(op, 0):
            return True
        before |= group.masks[op] & ~_above(group, op)
    return False


def _above(group: Group, op: Op) -> int:
    """The anchors above an operator: all that it depends on but itself."""
    found = 0
    for value in op.reads:
        found |= group.masks.get(value.op, 0) if value.op is not None else 0
    return found


def exits_of(graph: Graph, group: Group) -> list[Exit]:
    """The exits of a group, those of most anchors first."""
    masks = group.masks
    sinks: dict[int, list[Value]] = {}
    for op in sorted(group.ops, key=lambda op: op.out.index):  # exits of as many anchors in the order of the graph
        for value in op.outs:
            leaves = (
                value in graph.outputs or value in graph.written or any(user not in group.ops for user in value.users)
            )
            if leaves:
                sinks.setdefault(masks[op], []).append(value)
    exits = [Exit(mask, post_dominators(values, group.ops, mask, masks)) for mask, values in sinks.items()]
    return sorted(exits, key=lambda e: -e.anchors.bit_count())


def post_dominators(sinks: Iterable[Value], ops: set[Op], mask: int, masks: dict[Op, int]) -> list[Value]:
    """Values that every path from the anchors to any of ``sinks`` runs through, earliest first."""
    sinks = list(sinks)
    inside = ancestors(sinks, lambda value: value.op not in ops)
    line = sorted(inside, key=lambda op: op.outs[0].index)
    place = {op: index for index, op in enumerate(line)}
    leaving = {value.op for value in sinks}
    end = len(line)
    furthest = 0
    result: list[Value] = []
    for index, op in enumerate(line):
        reach = max((place[user] for value in op.outs for user in value.users if user in place), default=index)
        if op in leaving:
            reach = end
        if furthest <= index and masks[op] == mask and len(op.outs) == 1:
            result.append(op.out)
        furthest = max(furthest, reach)
    return result


# -- near misses that never become a region ---------------------------------------------------------------------------
# A threshold, a saturation or an operator that nobody knows, between products of activations, splits what would
# otherwise be one group, so no candidate shows up. The report should still say why the model's linear attention was
# left alone, and where.

BLOCKERS = frozenset(
    "tanh clamp clamp_min clamp_max maximum minimum where masked_fill nan_to_num round floor ceil trunc sign "
    "abs".split()
)
"""Pointwise operators with a threshold or a saturation, as found in variants of the recurrence."""


Blocks = Callable[[Op], bool]


def find_blockers(graph: Graph, matched: AbstractSet[Op]) -> Iterator[Obstacle]:
    """The first blocker of each kind that stands between two anchors, of those that no match has."""
    for op, place in _between(graph, _is_blocker, matched):
        if mask := mask_of(op):
            yield obstacle(op, mask)
        else:
            yield Obstacle("operator", f"a non-linearity {place} ({op.name}), which probes cannot judge", op)


def find_unknown(graph: Graph, matched: AbstractSet[Op]) -> Iterator[Obstacle]:
    """The first operator of each kind between two anchors that the vocabulary lacks."""
    for op, place in _between(graph, _is_unknown, matched):
        yield Obstacle("operator", f"an unknown operator {place} ({op.name})", op)


def find_complex(graph: Graph, matched: AbstractSet[Op]) -> Iterator[Obstacle]:
    """Complex numbers between two anchors, as in retention whose rotation is a factor: the first operator on them."""
    for op, _ in islice(_between(graph, _is_complex, matched), 1):
        yield Obstacle("operator", "complex numbers between products of activations: the op's are real", op)


def _between(graph: Graph, blocks: Blocks, matched: AbstractSet[Op]) -> Iterator[tuple[Op, str]]:
    """The first of each kind of operators that block, between two anchors, and where it acts."""

    def passable(op: Op) -> bool:
        return not op.out.const and (is_soft(op) or blocks(op))

    def below(op: Op) -> list[Op]:
        return [user for value in op.outs for user in value.users if passable(user)]

    def above(op: Op) -> list[Op]:
        return [value.op for value in op.reads if value.op is not None and passable(value.op)]

    anchors = [op for op in graph.ops if op not in matched and is_anchor(op)]
    after, before = (set(reach([op for each in anchors for op in way(each)], way)) for way in (below, above))
    between = [op for op in graph.ops if blocks(op) and op in after and op in before]
    for name in dict.fromkeys(op.name for op in between):
        turns = [op for op in between if op.name == name]
        repeats = any(op in turns for op in reach(below(turns[0]), below))  # a loop carries on what the first one made
        yield turns[0], "on the state" if repeats else "between products of activations"


def _is_blocker(op: Op) -> bool:
    return op.name in BLOCKERS and not op.out.const and not is_soft(op) and op.out.dtype.is_floating_point


def _is_complex(op: Op) -> bool:
    return op.out.dtype.is_complex and not op.out.const


def _is_unknown(op: Op) -> bool:
    """Of operators that keep a shape: others (norms, convolutions) are no part of a recurrence."""
    like_an_operand = any(read.shape == op.out.shape for read in op.reads)
    return op.name not in REGION and not op.out.const and like_an_operand and op.out.dtype.is_floating_point
