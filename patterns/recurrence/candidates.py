"""From a group of anchors to candidates: a region with its inputs, its output, its final state, and what it may be.

This file decides *where*; ``bindings.py`` lists *what* it may be; nothing is believed before the proof.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch

from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.match import Candidate, Obstacle, rounding
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, DATA_MOVEMENT
from kdacompile.patterns.recurrence.bindings import Bindings
from kdacompile.patterns.recurrence.cuts import NoCut, Surroundings, is_rounded_decay
from kdacompile.patterns.recurrence.looks import (
    Above,
    Looks,
    each_alone,
    key_sizes,
    may_have_role,
    one_write,
    several,
    sizes_of,
)
from kdacompile.patterns.recurrence.regions import Exit, Group, is_soft
from kdacompile.patterns.recurrence.roles import RecurrenceCandidate, role_test
from kdacompile.patterns.recurrence.streams import keeps_tokens_apart

SMALLEST_VISIBLE = 1e-2
"""Additive constants below this could hide from random probes (an eps), so a region may not hold one."""


MAX_EXITS = 4
"""Exits of a group that are paired as output and final state."""

MAX_RUNS = 3
"""How far past the last anchor an exit is looked for."""


@dataclass
class Effort:
    """How long candidates are still looked for: a number of cuts whatever they cost, then as many as a budget of
    operators pays for; a cut costs as many as its group has. Where the region stands between other products of
    activations, up to 106 cuts were needed, and 25,000 operators.
    """

    ways: int = 60
    """Tried whatever they cost."""
    operators: int = 60_000
    """Operators looked through for more."""

    def take(self, group: Group) -> bool:
        deadline.check()
        self.ways -= 1
        self.operators -= len(group.ops) + 200  # a small group may stand below many others
        return self.ways >= 0 or self.operators >= 0


def candidates(group: Group, effort: Effort | None = None) -> Iterator[RecurrenceCandidate | Obstacle]:
    """Candidates of one group, most plausible first, with the obstacles met on the way."""
    nothing = True
    for item in _candidates(group, effort or Effort()):
        nothing = False
        yield item
    if nothing and _is_chain(group) and not keeps_tokens_apart(group):
        reason = "what enters and leaves does not fit the roles of the recurrence"
        yield Obstacle("roles", reason, group.anchors[-1])


def _is_chain(group: Group) -> bool:
    """False for two products side by side, as the two terms of softmax attention's scores: nobody's near miss."""
    return len(group.anchors) > 2 or any(group.masks[anchor].bit_count() > 1 for anchor in group.anchors)


def _candidates(group: Group, effort: Effort) -> Iterator[RecurrenceCandidate | Obstacle]:
    tried: set[tuple[int, ...]] = set()
    above = Above(group)
    ends = [item.chain[-1] for item in group.exits[:MAX_EXITS] if item.chain]
    everything = Surroundings(ends, group.ops)
    free = {everything.values[i] for i in everything.free}
    pairs = _exit_pairs(group.exits)
    passes: tuple[Looks, ...] = (one_write, functools.partial(several, free), each_alone)
    for looks, (out_exit, state_exit) in product(passes, pairs):
        for output in _carried_on(out_exit, last_first=False):
            for state in _carried_on(state_exit, last_first=True) if state_exit else [None]:
                for writes, cut in _cuts(above, output, state, effort, looks):
                    key = (writes, output.index, state.index if state else 0, *(value.index for value in cut))
                    if key in tried:
                        continue
                    tried.add(key)
                    yield from read_region(group, cut, output, state, writes)


def _exit_pairs(exits: list[Exit]) -> list[tuple[Exit, Exit | None]]:
    """Results and states. Of three or more results what has the tokens of another is its state last of all: the
    transformed keys and values of chunks (w and u) leave beside what is made of them.
    """
    exits = [item for item in exits if item.chain]
    if len(exits) == 1:
        return [(exits[0], None)]
    first = exits[:MAX_EXITS]
    pairs: list[tuple[Exit, Exit | None]] = [*permutations(first, 2), *((item, None) for item in first)]
    return sorted(pairs, key=lambda pair: _has_tokens_of(*pair)) if len(exits) > 2 else pairs


def _has_tokens_of(output: Exit, state: Exit | None) -> bool:
    """True by the sizes, which those of a state may be by chance; rows of one token have none."""
    others = output.chain[-1].shape[:-1]
    return state is not None and len(others) > 2 and state.chain[-1].shape[:-1] == others


def _carried_on(exit_: Exit, *, last_first: bool) -> list[Value]:
    """Separators in the order to try: runs of layouts, casts, constant factors and sums with what an empty state gives,
    each from its latest value.
    """
    runs: list[list[Value]] = []
    for value in exit_.chain:
        op = value.op
        assert op is not None
        data = [read for read in op.reads if not read.const]
        moves = op.name in DATA_MOVEMENT or op.name in ("mul", "div", "neg")
        if op.name == "add" and len(data) == 2:
            data, moves = [read for read in data if not _is_zero(read)], True
        simple = moves and len(data) == 1
        if runs and simple and data[0] is runs[-1][-1]:
            runs[-1].append(value)
        else:
            runs.append([value])
    order = runs[::-1][:MAX_RUNS] if last_first else runs[:MAX_RUNS]
    return [value for run in order for value in reversed(run) if value.node is not None]


def _is_zero(value: Value) -> bool:
    """A product with zeros: what the first chunk reads of the state that it begins with."""
    op = root(value).op
    factors = [read for read in op.reads if read.const] if op is not None and op.name in CONTRACTIONS else []
    try:
        return any(not constant(factor).any() for factor in factors)
    except EvaluationError:
        return False


def _cuts(
    above: Above, output: Value, state: Value | None, effort: Effort, looks: Looks
) -> Iterator[tuple[int, list[Value]]]:
    """Writes a token, and minimum cuts for each size K could have, then the same pushed towards the region."""
    group, sizes = above.group, sizes_of(output)
    if sum(sizes.values()) > 4:
        return
    seen: set[tuple[int, ...]] = set()
    targets = (output,) if state is None else (output, state)
    for look in looks(output, state, key_sizes(group, sizes, state)):
        has_role = role_test(look.readings)
        for way in look.ways:
            setting = above.under(way, targets)
            if setting is None:
                continue
            if not effort.take(group):
                return
            eligible = may_have_role(sizes, look, has_role, way, setting.joined)
            surroundings = above.surroundings(targets, setting.barriers, setting.casts)
            cuttable = surroundings.cuttable(eligible)
            attempt = targets, look.writes, setting.barriers, setting.casts, cuttable
            if attempt in above.tried:  # another size or reading need not make another value a role
                continue
            above.tried.add(attempt)
            try:
                cut, late = surroundings.minimum_cut(cuttable)
            except NoCut:
                continue
            pushed = (_pushed(cut, group, eligible, past_gates=past) for past in (False, True))
            for variant in (cut, *pushed, late):
                key = (look.writes, *(value.index for value in variant))
                if key not in seen:
                    seen.add(key)
                    yield look.writes, variant


def _pushed(cut: list[Value], group: Group, eligible: Callable[[Value], bool], *, past_gates: bool) -> list[Value]:
    """The cut moved past operators that read nothing else (a constant factor, a sign), up to the first branch.

    ``past_gates``: past exponentials too, which leaves a gate as a factor, and what only looked like a gate as it is.
    """
    moved: list[Value] = []
    for value in cut:
        while True:
            users = list(dict.fromkeys(value.users))  # b * b reads it twice
            ahead = [user for user in users if user not in group.ops and is_soft(user)]
            per_head = sum(sizes_of(value).values()) < 2  # such an exponential is a decay or a rate, not a gate
            if len(users) != 1 or len(ahead) != 1 or (ahead[0].name == "exp" and not per_head and not past_gates):
                break
            data = {read for read in ahead[0].reads if not read.const}
            if len(data) != 1 or not eligible(ahead[0].out):
                break
            value = ahead[0].out
        moved.append(value)
    return moved


def read_region(
    group: Group, cut: list[Value], output: Value, state: Value | None, writes: int
) -> Iterator[RecurrenceCandidate | Obstacle]:
    stop = set(cut)
    outputs = [output] if state is None else [output, state]
    ops = ancestors(outputs, stop.__contains__)
    anchor = next((anchor for anchor in group.anchors if anchor in ops), None)
    if anchor is None:
        return
    found = Bindings(cut, output, state, ops, writes)
    if found:
        core = ops & group.ops
        core |= {op for op in ops - core if is_rounded_decay(op)}
        obstacle = _obstacle(ops, group, outputs) or rounding(core, ops, cut, outputs)
        if obstacle and writes > 1:  # much that is no recurrence reads as several writes: nobody's near miss
            return
        candidate = Candidate(anchor, ops, cut, outputs, found, core=core)
        if obstacle and obstacle.code == "escape":
            obstacle = replace(obstacle, candidate=candidate)
        yield obstacle or candidate


def _obstacle(ops: set[Op], group: Group, outputs: list[Value]) -> Obstacle | None:
    """What forbids a rewrite of the region whatever it computes."""
    for op in sorted(ops, key=lambda o: o.outs[0].index):
        if op.out.const:
            continue
        if not is_soft(op):
            return Obstacle("operator", f"the region contains {op.name}, which probes cannot judge", op)
        try:
            small = _small_constant(op)
        except EvaluationError as error:
            return Obstacle("constant", f"the region adds a constant that cannot be computed here ({error})", op)
        if small:
            return Obstacle("constant", f"the region adds {small:g}, too small for probes to judge", op)
    return _escape(ops, group, outputs)


def _escape(ops: set[Op], group: Group, outputs: list[Value]) -> Obstacle | None:
    """Values of the region that are read outside it, if the op would save no more than three fifths of the work: what
    makes them (the transformed keys of all chunks) has to be computed all the same.
    """
    core = ops & group.ops
    read = [value for op in core for value in op.outs if value not in outputs]
    escaping = [(value, user) for value in read for user in value.users if user not in ops and not value.const]
    if not escaping:
        return None
    left = ancestors([value for value, _ in escaping], lambda value: value.op not in ops)
    made, whole = (sum(map(_work, part.intersection(group.anchors))) for part in (left, core))
    if 5 * made < 2 * whole:
        return None
    value, user = min(escaping, key=lambda pair: pair[0].index)
    share = f"making what is read so is {made / max(whole, 1):.0%} of its work"
    reason = f"an intermediate value of the region is read by {user.name} outside it: {share}"
    return Obstacle("escape", reason, value.op)


def _work(op: Op) -> int:
    """Multiplications of a product, numbers that a sum reads, numbers that another operator makes."""
    if op.name in CONTRACTIONS:
        return math.prod(op.out.shape) * op.reads[-2].shape[-1]
    return max(math.prod(value.shape) for value in (*op.reads, *op.outs))


def _small_constant(op: Op) -> float:
    """The smallest number the operator adds to data, if it is small enough to hide from probes (0 otherwise)."""
    if op.name not in ("add", "sub", "rsub"):
        return 0.0
    for arg in op.args[:2]:
        if isinstance(arg, (int, float)):
            sizes = torch.tensor([float(arg)], dtype=torch.float64).abs()
        elif isinstance(arg, Value) and arg.const:
            sizes = constant(arg).double().abs()
        else:
            continue
        hidden = sizes[(sizes > 0) & (sizes < SMALLEST_VISIBLE)]
        if hidden.numel():
            return float(hidden.min())
    return 0.0
