"""Who is who: every way the tensors entering and leaving a region could be the recurrence's q, k, v, g, beta and state.

Roles come from sizes (``roles.py``) and from how a tensor is used. What is still ambiguous after that (T equal to K,
two tensors of one shape) is listed most plausible first; the proof takes the first binding that computes the same
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, groupby, islice
from typing import NamedTuple

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.placement import Placement, oddity
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, SOLVES
from kdacompile.patterns.recurrence.regions import is_anchor
from kdacompile.patterns.recurrence.roles import (
    INPUTS,
    Recurrence,
    fits_shape,
    labelings_of,
    place,
    with_writes,
)

MAIN = frozenset({"q", "k", "v"})
ALIKE = str.maketrans({"V": "K", "G": "H", "N": "T", "R": None})
APART = {"u": {"beta", "rate"}, "beta": {"u"}, "rate": {"u"}}
"""Roles that no recurrence has beside a role."""
MAX_BINDINGS = 240
"""Bindings looked at before a region is given up."""
MAX_PARTIAL = 10_000
"""Steps on the way to them: where all sizes are equal, most ways of naming axes lead to no binding at all."""


def _gate_kind(placement: Placement | None, sizes: dict[str, int]) -> str:
    if placement is None:
        return "none"
    if "K" in placement.axes and sizes["K"] > 1:
        return "channel"
    if set("TNB") & set(placement.axes):
        return "token"
    per_head = "H" in placement.axes and "." not in placement.axes.split("H")[0]
    return "head" if per_head or sizes["T"] > 1 else "token"


class Bindings:
    """Consistent role assignments, most plausible first; true if there is one. They are looked for when they are asked
    for: a proof often takes one of the first, and a region like another that was proven needs none.
    """

    def __init__(self, cut: Sequence[Value], output: Value, state: Value | None, region: set[Op], writes: int) -> None:
        self.cut = cut
        self.units = Units(region)
        self.gates = {value: bool(self.units(value)) for value in cut}
        self.readings = [
            (cost, partial)
            for cost, partial in _readings(output, state, writes)
            if _may_lead_on(cut, self.gates, set(), partial.sizes)
        ]
        found = islice(self._by_penalty(), MAX_BINDINGS)
        equal = groupby(found, key=lambda binding: binding.penalty)
        self.coming = (h for _, group in equal for h in sorted(group, key=lambda binding: binding.permuted))
        self.known: list[Recurrence] = []
        self.dead_ends: set[Hashable] = set()

    def __bool__(self) -> bool:
        return any(self._leads_on(partial, cost) for cost, partial in self.readings)

    def __iter__(self) -> Iterator[Recurrence]:
        for known in count():
            if known == len(self.known):
                self.known.extend(islice(self.coming, 1))
            if known == len(self.known):
                return
            yield self.known[known]

    def _leads_on(self, partial: _Partial | Recurrence, penalty: int) -> bool:
        """True if there is a binding beyond this one: whichever is met first will do.

        What can follow depends on the roles that are taken and the sizes that are known, however they came to be. Where
        all sizes are equal, ways that lead nowhere are many, and their kinds are few.
        """
        if isinstance(partial, Recurrence):
            return True
        if partial.kind not in self.dead_ends:
            if any(self._leads_on(further, total) for total, further in self._onward(partial, penalty)):
                return True
            self.dead_ends.add(partial.kind)
        return False

    def _by_penalty(self) -> Iterator[Recurrence]:
        """Cheapest first: where all sizes are equal there are millions of assignments, and the first are wanted."""
        # Ties go to the path that was found first, so that the order is that of a sorted full list.
        queue: list[tuple[int, tuple[int, ...], _Partial | Recurrence]] = [
            (cost, (rank,), partial) for rank, (cost, partial) in enumerate(self.readings)
        ]
        heapify(queue)
        for _ in range(MAX_PARTIAL):
            if not queue:
                return
            penalty, path, item = heappop(queue)
            if isinstance(item, Recurrence):
                yield item
                continue
            for rank, (total, found) in enumerate(self._onward(item, penalty)):
                heappush(queue, (total, (*path, rank), found))

    def _onward(self, partial: _Partial, penalty: int) -> Iterator[tuple[int, _Partial | Recurrence]]:
        """What follows from roles for some of the cut, each with its penalty."""
        if partial.seen < len(self.cut):
            for cost, further in _with_one_more(partial, self.cut, self.gates):
                yield penalty + cost, further
        else:
            for binding in _complete(partial.inputs, partial.ends, partial.sizes, penalty, self.units):
                yield binding.penalty, binding


class _Partial(NamedTuple):
    """Roles for the first tensors of a cut, and for the results."""

    inputs: tuple[Placement, ...]
    ends: tuple[Placement, ...]
    sizes: dict[str, int]
    seen: int = 0
    """Tensors of the cut that have a role."""

    @property
    def kind(self) -> Hashable:
        roles = frozenset(placement.role for placement in self.inputs)
        return self.seen, roles, frozenset(self.sizes.items())


def _readings(output: Value, state: Value | None, writes: int) -> Iterator[tuple[int, _Partial]]:
    """Every reading of the results with so many writes a token, with its penalty."""
    for axes, sizes in labelings_of(output, "o", {}):
        odd = oddity(axes) + (0 if "V" in axes else 3)  # one head of V columns before V heads of one column
        if writes > 1:
            axes, sizes = with_writes(axes, sizes, writes)
        start = place("o", output, axes)
        if state is None:
            yield odd, _Partial((), (start,), sizes)
            continue
        for state_axes, known in labelings_of(state, "final_state", sizes):
            ends = (start, place("final_state", state, state_axes))
            yield odd + oddity(state_axes), _Partial((), ends, known)


def _with_one_more(partial: _Partial, cut: Sequence[Value], gates: dict[Value, bool]) -> Iterator[tuple[int, _Partial]]:
    """Every role of the next tensor of the cut, with what it adds to the penalty."""
    value, others = cut[partial.seen], cut[partial.seen + 1 :]
    used = {placement.role for placement in partial.inputs}
    if len(MAIN - used) > len(cut) - partial.seen:
        return
    for role in _open_roles(gates[value], used):
        for axes, known in labelings_of(value, role, partial.sizes):
            if not _may_lead_on(others, gates, {*used, role}, known):
                continue
            cost = oddity(axes) + (2 if role == "g" and not gates[value] else 0)
            taken = (*partial.inputs, place(role, value, axes))
            yield cost, _Partial(taken, partial.ends, known, partial.seen + 1)
            if role == "g" and not gates[value] and "beta" not in used and not {"K", "N"} & {*axes}:
                both = (*taken, place("beta", value, axes))  # a step size: dt
                yield cost, _Partial(both, partial.ends, known, partial.seen + 1)


def _may_lead_on(values: Sequence[Value], gates: dict[Value, bool], used: set[str], sizes: dict[str, int]) -> bool:
    """True if each of the values could still be something, and something could still be each of q, k and v.

    Without this look ahead, most of what is tried leads nowhere.
    """
    known, missing = tuple(sizes.items()), MAIN - used
    open_to: list[frozenset[str]] = []
    for value in values:
        fitting = _fitting_roles(value.shape, value.uniform, known).intersection(_open_roles(gates[value], used))
        if not fitting:
            return False
        missing -= fitting
        open_to.append(fitting)
    return not missing and len(frozenset[str]().union(*open_to)) >= len(open_to)


@lru_cache(maxsize=1 << 14)
def _fitting_roles(
    shape: tuple[int, ...], uniform: frozenset[int], sizes: tuple[tuple[str, int], ...]
) -> frozenset[str]:
    return frozenset(role for role in INPUTS if fits_shape(shape, uniform, role, sizes))


def _open_roles(is_gate: bool, used: set[str]) -> list[str]:
    return [
        role
        for role in INPUTS
        if role not in used and (role == "g" or not is_gate) and used.isdisjoint(APART.get(role, ()))
    ]


def _complete(
    inputs: tuple[Placement, ...],
    ends: tuple[Placement, ...],
    sizes: dict[str, int],
    penalty: int,
    units: Units,
) -> Iterator[Recurrence]:
    by_role = {placement.role: placement for placement in inputs}
    if not set(by_role) >= MAIN:
        return
    if "rate" in by_role and "g" not in by_role:
        return
    bonus, several = "u" in by_role, "R" in sizes
    if bonus and (several or sizes.get("G", 1) != sizes.get("H", 1)):
        return
    main = (by_role["q"], by_role["k"], by_role["v"], ends[0])
    orders = {p.axes.translate(ALIKE).replace(".", "") for p in main}
    penalty += len(orders) - 1
    gate, factor = by_role.get("g"), by_role.get("rate")
    rates = units(gate.value, factor and factor.value) if gate else [1.0]
    form = "log" if rates or factor else "factor"
    output, final = ends[0], ends[1] if len(ends) > 1 else None
    first = sizes.get("T", 1) > 1 or "initial_state" in by_role or units.erases
    kind = _gate_kind(gate, sizes)
    for turn, rate in enumerate(rates or [1.0]):
        for delta in (False,) if bonus else (first, not first):
            yield Recurrence(
                inputs=by_role,
                output=output,
                final_state=final,
                sizes={**dict.fromkeys("BTHGKV", 1), **sizes},
                gate="token" if (bonus or several) and kind == "head" else kind,
                gate_fn=form,
                delta=delta,
                reads="before" if bonus else "after",
                gate_rate=rate,
                penalty=penalty + turn,
            )


# -- which tensor is a log gate, and in which unit --------------------------------------------------------------------
# Most models take ``exp(g)``. Some keep the gate positive and take ``exp(-g)``, some count in powers of two
# (``exp2(g)``), some divide by a number before every step. The rate is read off the way from the tensor to the
# exponential; like every other part of a binding it is checked.

_EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2.0)}
_PRODUCTS = CONTRACTIONS | SOLVES | {"mul"}


class Units:
    """What is read off one region, once: ``gate_rates``, and whether it erases."""

    def __init__(self, region: set[Op]) -> None:
        self.region = region
        self.known: dict[tuple[Value, Value | None], list[float]] = {}

    @cached_property
    def erases(self) -> bool:
        """True if there is more than one write and one read. The first token after an empty state looks the same with a
        delta term and without: its text tells which was meant.
        """
        return sum(map(is_anchor, self.region)) > 2

    def __call__(self, value: Value, partner: Value | None = None) -> list[float]:
        if (value, partner) not in self.known:
            self.known[value, partner] = gate_rates(value, self.region, partner)
        return self.known[value, partner]


def gate_rates(value: Value, region: set[Op], partner: Value | None) -> list[float]:
    """The rates with which ``value`` may reach an exponential before it meets another activation in a product, most
    plausible first; none if it does not: it is no log gate. A product with ``partner`` (Mamba-2's A) does not count.

    Differences of summed gates enter with both signs (``exp(G_i - G_j)``): the order of a subtraction tells nothing.
    Where other signs differ too (``q exp(G)`` beside ``k exp(-G)``), either may be meant.
    """

    def readers(value: Value, rate: float) -> Iterator[tuple[Op, Value, float]]:
        return ((op, value, rate) for op in value.users if op in region)

    def onward(place: tuple[Op, Value, float]) -> Iterator[tuple[Op, Value, float]]:
        op, source, rate = place
        if op.name not in _EXPONENTIALS and (op.name not in _PRODUCTS or _keeps(op, source, partner)):
            for out in op.outs:
                yield from readers(out, rate * _times(op, source))

    met = reach(readers(value, 1.0), onward)
    found = {rate * _EXPONENTIALS[op.name] for op, _, rate in met if op.name in _EXPONENTIALS}
    size = min(map(abs, found), default=0.0)
    return [sign * size for sign in (1.0, -1.0) if any(rate * sign > 0 for rate in found)]


def _keeps(op: Op, source: Value, partner: Value | None) -> bool:
    """True if a product is with constants, or with the partner."""
    others = [read for read in op.reads if read is not source and not read.const]
    alone = sum(read is source for read in op.reads) == 1
    return alone and all(op.name == "mul" and root(read) is partner for read in others)


def _times(op: Op, source: Value) -> float:
    """By what number the operator multiplies ``source``; 1 where that is not one number."""
    if op.name in ("neg", "rsub"):
        return -1.0
    if op.name not in ("sub", "mul", "div"):
        return 1.0
    left, right = op.args[:2]
    if op.name == "sub":
        return -1.0 if right is source and isinstance(left, Value) and left.const else 1.0
    if left is not source or not isinstance(right, (int, float)) or right == 0:
        return 1.0
    return float(right) if op.name == "mul" else 1.0 / right
