"""How the inputs of a region are told: values that could have a role under readings of its results.

Several ways are tried, and several readings together or alone; ``candidates.py`` cuts regions where these values are.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import is_float8
from kdacompile.patterns.recurrence.cuts import Surroundings, is_rounded_decay
from kdacompile.patterns.recurrence.regions import Group, is_soft
from kdacompile.patterns.recurrence.roles import frames, writes_of


def sizes_of(value: Value) -> Counter[int]:
    return Counter(size for dim, size in enumerate(value.shape) if size != 1 and dim not in value.uniform)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How values are told that could have a role."""

    raw_state: bool = True
    """A decayed state is no state (one-token steps)."""
    grouped: bool = True
    """Keys may have a divisor of the heads."""
    apart: bool = False
    """Offsets end the region."""
    parted: bool = False
    """Numbers per head that were joined are told apart."""
    rounded: bool = False
    """Exponentials may be rounded to the dtype of the results, before any product too."""


USUAL_WAYS = (
    Way(),
    Way(grouped=False),
    Way(raw_state=False, grouped=False),
    Way(apart=True),
    Way(parted=True),
    Way(rounded=True),
)
OTHER_WAYS = USUAL_WAYS[:1]
"""Under readings of the results that nobody writes."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Readings of the results under which roles are looked for together: all usual ones, all others, or one alone."""

    usual: bool
    key_size: int
    readings: list[dict[str, int]]
    writes: int = 1

    @property
    def ways(self) -> tuple[Way, ...]:
        if not self.readings:
            return ()
        return USUAL_WAYS if self.usual else OTHER_WAYS


Looks = Callable[[Value, Value | None, list[int]], Iterator[Look]]
"""For an output and a state, and the sizes K that keys could have."""


class Setting(NamedTuple):
    """Where a region ends early, what is told apart of its operands, and which roundings are inside."""

    barriers: frozenset[Op]
    joined: frozenset[Value]
    casts: frozenset[Op]


Attempt = tuple[tuple[Value, ...], int, frozenset[Op], frozenset[Op], tuple[int, ...]]
"""A cut that was looked for: its results, writes a token, barriers, casts, and the numbers of possible inputs."""


class Above:
    """What lies above the results of one group, looked for once: it has many pairs of results, and each many cuts."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.outside = functools.cache(functools.partial(_outside, group))
        self.offsets = functools.cache(lambda target: _offsets(self.outside(target)))
        self.joined = functools.cache(lambda target: _joined(self.outside(target)))
        self.rounded = functools.cache(lambda target: _rounded(self.outside(target), target.dtype))
        self.surroundings = functools.cache(self._surroundings)
        self.tried: set[Attempt] = set()

    def under(self, way: Way, targets: tuple[Value, ...]) -> Setting | None:
        """None if there is nothing that the way tells otherwise."""
        barriers = frozenset[Op]().union(*map(self.offsets, targets)) if way.apart else frozenset[Op]()
        joined = self.joined(targets[0]) if way.parted else frozenset[Value]()
        casts = self.rounded(targets[0]) if way.rounded else frozenset[Op]()
        if (way.apart and not barriers) or (way.parted and not joined) or (way.rounded and not casts):
            return None
        return Setting(barriers, joined, casts)

    def _surroundings(self, targets: tuple[Value, ...], barriers: frozenset[Op], casts: frozenset[Op]) -> Surroundings:
        return Surroundings(targets, self.group.ops, barriers, casts)


def one_write(output: Value, state: Value | None, key_sizes: list[int]) -> Iterator[Look]:
    """One write a token."""
    for usual, key_size in product((True, False), key_sizes):
        readings = frames(output, state, key_size, usual=usual)
        yield Look(usual=usual, key_size=key_size, readings=readings)


def several(values: set[Value], output: Value, state: Value | None, key_sizes: list[int]) -> Iterator[Look]:
    """Several writes a token, as far as tensors above the region have as many: of these the keys are some."""
    for key_size in key_sizes:
        readings = frames(output, state, key_size, usual=True)
        for writes in dict.fromkeys(writes for sizes in readings for writes in writes_of(values, sizes)):
            written = frames(output, state, key_size, usual=True, writes=writes)
            yield Look(usual=True, key_size=key_size, readings=written, writes=writes)


def each_alone(output: Value, state: Value | None, key_sizes: list[int]) -> Iterator[Look]:
    """Each usual reading by itself: what has a role under one alone may hide the cut of another."""
    for key_size in key_sizes:
        readings = frames(output, state, key_size, usual=True)
        for reading in readings if len(readings) > 1 else ():
            yield Look(usual=True, key_size=key_size, readings=[reading])


def _outside(group: Group, target: Value) -> Collection[Op]:
    """The operators upstream that soft ones lead from, but for the group's."""
    above = ancestors([target], lambda value: value.op is not None and not value.const and not is_soft(value.op))
    return above - group.ops


def _offsets(ops: Collection[Op]) -> frozenset[Op]:
    """``c - x`` upstream: one tensor may enter as two, as the gate and as the key that the gate leaves over (HGRN2)."""
    return frozenset(
        op
        for op in ops
        if op.name in ("sub", "rsub", "add") and not op.out.const and sum(not read.const for read in op.reads) == 1
    )


def _joined(ops: Collection[Op]) -> frozenset[Value]:
    """Numbers per head that were joined of several tensors upstream: powers of the decay, and a token's own factor
    (RWKV-5). They are one value in the place of two.
    """
    joins = (op for op in ops if op.name == "cat" and len(op.out.shape) == 2 and not op.out.const)
    return frozenset(op.out for op in joins if sum(not read.const for read in op.reads) > 1)


def _rounded(ops: Collection[Op], dtype: torch.dtype) -> frozenset[Op]:
    """Exponentials upstream that are rounded to the dtype of the result: decays of a whole chunk, in a model of 16
    bits. Those that depend on a product belong to the group.
    """
    return frozenset(op for op in ops if is_rounded_decay(op) and op.out.dtype == dtype)


def may_have_role(
    sizes: Counter[int], look: Look, has_role: Callable[[Value], bool], way: Way, joined: Collection[Value]
) -> Callable[[Value], bool]:
    """Values that could have a role beside an output of these ``sizes``: by their own, and because some reading of the
    results allows one. None that was ``joined``.
    """
    writes = look.writes
    more = Counter({size for each in look.readings for size in (each["T"], writes)} if writes > 1 else ())
    allowed = sizes + Counter([look.key_size])
    step = sum(sizes.values()) < 4
    known: dict[tuple[tuple[int, ...], frozenset[int]], bool] = {}

    def fits(value: Value) -> bool:
        odd = list((sizes_of(value) - allowed - more).elements())
        if odd and not (way.grouped and len(odd) == 1 and odd[0] and any(size % odd[0] == 0 for size in sizes)):
            return False
        return has_role(value)

    def eligible(value: Value) -> bool:
        if joined and root(value) in joined:
            return False
        if value.node is None or 0 in value.shape or not value.dtype.is_floating_point or is_float8(value.dtype):
            return False
        key = value.shape, value.uniform
        if key not in known:
            known[key] = fits(value)
        if not known[key] or not (way.raw_state and step and value.op is not None and value.op.name in ("mul", "lerp")):
            return known[key]
        return sizes_of(value) != allowed

    return eligible


def key_sizes(group: Group, sizes: Counter[int], state: Value | None) -> list[int]:
    if state is not None:
        extra = list((sizes_of(state) - sizes).keys())
        return extra or sorted(sizes_of(state), reverse=True)
    seen = Counter(
        size
        for anchor in group.anchors[:8]
        for read in anchor.reads
        if not read.const
        for size in read.shape
        if size != 1
    )
    known = [size for size, _ in sizes.most_common()]
    return list(dict.fromkeys([*known[::-1], *(size for size, _ in seen.most_common(8))]))
