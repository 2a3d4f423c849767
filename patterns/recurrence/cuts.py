"""Where a region begins: the smallest set of values that everything entering the region passes through.

Linear attention has few inputs (q, k, v, a gate, beta, a state), however many tensors are derived from them on the way
in (``k * beta``, ``v * beta``, padded, chunked, scaled copies). So the inputs are a minimum vertex cut between what
the region must not look behind and the region itself; of several minimum cuts the earliest comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import torch

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, is_float8
from kdacompile.patterns.recurrence.regions import is_soft
from kdacompile.patterns.recurrence.roles import INPUTS

MAX_INPUTS = len(INPUTS)


class NoCut(Exception):
    """No small set of eligible values separates the region from its surroundings."""


def _rounds(op: Op) -> bool:
    """True for casts to less precision: the proof runs in float64 and cannot see them, so a region ends there."""
    if op.name != "_to_copy" or not op.reads:
        return False
    source, target = op.reads[0].dtype, op.out.dtype
    if is_float8(source) or is_float8(target):  # torch has no rules for what these promote to
        return source != target and not (is_float8(source) and target in _HOLD_FLOAT8)
    return torch.promote_types(source, target) != target and not _is_nothing(op.reads[0])


def _is_nothing(value: Value) -> bool:
    """True for what is read of a state that is empty yet: there is nothing to round."""
    op = root(value).op
    while op is not None and op.name in ("sum", "mul", "div", "neg") and sum(not read.const for read in op.reads) == 1:
        if op.name == "mul" and _has_zeros(op):
            return True
        op = root(next(read for read in op.reads if not read.const)).op
    return op is not None and op.name in CONTRACTIONS and _has_zeros(op)


def _has_zeros(op: Op) -> bool:
    with contextlib.suppress(EvaluationError):
        return any(read.const and not constant(read).any() for read in op.reads)
    return False


def is_rounded_decay(op: Op) -> bool:
    """True for a cast of an exponential to less precision."""
    made = root(op.reads[0]).op if op.reads and not op.out.const and _rounds(op) else None
    return made is not None and made.name in ("exp", "exp2")


_HOLD_FLOAT8 = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that have every value of every 8-bit one; float16 lacks those of ``float8_e8m0fnu``."""


class Surroundings:
    """What a region that yields ``targets`` could begin with: every value above them that soft operators lead from.

    ``core`` are the operators that surely belong to the region, which does not reach above ``barriers``, nor above what
    rounds, but for ``casts``. Values are numbered here: a group is searched for many cuts, and hashing each value on
    each path is most of their cost.
    """

    def __init__(
        self,
        targets: Sequence[Value],
        core: Collection[Op],
        barriers: Collection[Op] = (),
        casts: Collection[Op] = (),
    ) -> None:
        self.values: list[Value] = []
        self.parents: list[list[int]] = []
        self.readers: list[list[int]] = []
        self.sources: list[int] = []
        """Values that nothing soft computes."""
        self.free: list[int] = []
        """Values outside the core: those that may be cut."""
        above = self._walk(targets, {*core, *casts}, barriers)
        number = {value: i for i, value in enumerate(above)}
        self.values = list(above)
        self.parents = [[number[parent] for parent in parents] for parents in above.values()]
        self.readers = [[] for _ in self.values]
        for i, parents in enumerate(self.parents):
            for parent in parents:
                self.readers[parent].append(i)
        self.sources = [i for i, parents in enumerate(self.parents) if not parents]
        self.free = [i for i, value in enumerate(self.values) if value.op is None or value.op not in core]
        self.targets = {number[target] for target in targets}

    def _walk(
        self, targets: Sequence[Value], core: Collection[Op], barriers: Collection[Op]
    ) -> dict[Value, list[Value]]:
        """Values above ``targets`` with what they are computed from."""
        above: dict[Value, list[Value]] = {}
        stack = list(targets)
        while stack:
            value = stack.pop()
            if value in above:
                continue
            op = value.op
            if op is None or op in barriers or not (op in core or (is_soft(op) and not _rounds(op))):
                above[value] = []
                continue
            above[value] = [read for read in dict.fromkeys(op.reads) if not read.const]
            stack.extend(above[value])
        return above

    def cuttable(self, eligible: Callable[[Value], bool]) -> tuple[int, ...]:
        """The numbers of the values that may be cut, as far as they are ``eligible``."""
        return tuple(i for i in self.free if eligible(self.values[i]))

    def minimum_cut(self, cuttable: tuple[int, ...]) -> tuple[list[Value], list[Value]]:
        """The earliest and the latest minimum cut of values with these numbers. Raises ``NoCut``."""
        flow = _Flow(self, [False] * len(self.values))
        for i in cuttable:
            flow.cuttable[i] = True
        for _ in range(MAX_INPUTS + 1):
            reached = flow.augment()
            if reached is not None:
                return self._in_order(flow.cut(reached)), self._in_order(flow.latest())
        raise NoCut(f"more than {MAX_INPUTS} tensors enter the region")

    def _in_order(self, cut: list[int]) -> list[Value]:
        return sorted((self.values[i] for i in cut), key=lambda value: value.index)


UNSEEN, START = -2, -1


class _Flow:
    """Units of flow from the sources to the targets, at most one through a cuttable value.

    A *side* is a value's upper (``2 i``) or lower (``2 i + 1``) half: cutting a value means not getting from one to
    the other.
    """

    def __init__(self, above: Surroundings, cuttable: list[bool]) -> None:
        self.above = above
        self.cuttable = cuttable
        self.through = [False] * len(cuttable)
        self.units: dict[tuple[int, int], int] = {}
        """How many run from a value to one that reads it."""

    def augment(self) -> list[bool] | None:
        """Push one more unit; when none fits, return which sides can be reached from the sources."""
        parents, readers, targets = self.above.parents, self.above.readers, self.above.targets
        came = [UNSEEN] * (2 * len(self.cuttable))
        stack = [2 * source for source in self.above.sources]
        for side in stack:
            came[side] = START
        while stack:
            side = stack.pop()
            value, below = divmod(side, 2)
            if below and value in targets:
                self._push(side, came)
                return None
            if below:
                onward = [2 * reader for reader in readers[value]]
                if not self.cuttable[value] or self.through[value]:
                    onward.append(side - 1)
            else:
                onward = [] if self.cuttable[value] and self.through[value] else [side + 1]
                # undo flow that enters this value
                onward += [2 * parent + 1 for parent in parents[value] if self.units.get((parent, value), 0) > 0]
            for other in onward:
                if came[other] == UNSEEN:
                    came[other] = side
                    stack.append(other)
        return [step != UNSEEN for step in came]

    def cut(self, reached: list[bool]) -> list[int]:
        return [i for i, can in enumerate(self.cuttable) if can and reached[2 * i] and not reached[2 * i + 1]]

    def latest(self) -> list[int]:
        """Once no more flow fits: the cut nearest to the targets, between what could still reach them and what not."""
        parents, readers = self.above.parents, self.above.readers

        def back(side: int) -> list[int]:
            value, below = divmod(side, 2)
            if below:
                own = [] if self.cuttable[value] and self.through[value] else [side - 1]
                return own + [2 * reader for reader in readers[value] if self.units.get((value, reader), 0) > 0]
            own = [side + 1] if not self.cuttable[value] or self.through[value] else []
            return own + [2 * parent + 1 for parent in parents[value]]

        reaching = set(reach([2 * target + 1 for target in self.above.targets], back))
        return [i for i, can in enumerate(self.cuttable) if can and 2 * i + 1 in reaching and 2 * i not in reaching]

    def _push(self, end: int, came: list[int]) -> None:
        path = [end]
        while came[path[-1]] != START:
            path.append(came[path[-1]])
        if not any(self.cuttable[side // 2] for side in path):
            raise NoCut("a tensor enters the region in a shape no role has")
        for side, origin in pairwise(path):
            value, other = side // 2, origin // 2
            if other == value:
                self.through[value] = self.cuttable[value] and side % 2 == 1
            elif origin % 2:
                self.units[other, value] = self.units.get((other, value), 0) + 1
            else:
                self.units[value, other] -= 1
