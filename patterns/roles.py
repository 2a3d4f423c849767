"""Who is who: every way the tensors entering and leaving a region could be the recurrence's q, k, v, g, beta and state.

Roles come from sizes and from how a tensor is used, never from names. What is still ambiguous after that (T equal to
K, two tensors of one shape) is listed most plausible first; the proof takes the first hypothesis that computes the
same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, groupby, islice
from typing import NamedTuple

from torch import Tensor

from kdacompile.patterns.gates import Units
from kdacompile.patterns.ir import Op, Value
from kdacompile.patterns.regions import is_anchor

LETTERS = {
    "q": "BTGK",
    "k": "BTGK",
    "v": "BTHV",
    "g": "BTHK",
    "rate": "H",
    "beta": "BTH",
    "A_log": "H",
    "dt_bias": "HK",
    "initial_state": "BHKV",
    "o": "BTHV",
    "final_state": "BHKV",
}
"""The recurrence's own order of dimensions, per role. G counts key heads (H is a multiple of it); ``rate`` is a
factor of the log gate per head (Mamba-2's A, where g = dt * A)."""

# Dimensions a role may lack although they are larger than one: the tensor is then the same all along them.
BROADCAST = {"g": "BTHK", "beta": "H", "initial_state": "B"}


@dataclass(frozen=True)
class Placement:
    """A tensor of the graph in a role; ``letters`` names its dimensions ('.' for size one, '=' for one that is uniform,
    '*' for H and K merged)."""

    role: str
    value: Value
    letters: str
    backwards: bool = field(default=False, kw_only=True)
    """The last token comes first."""

    @property
    def order(self) -> str:
        """The role's own order of dimensions."""
        return LETTERS[self.role]

    def steps(self, sizes: dict[str, int]) -> list[tuple[str, tuple[object, ...]]]:
        """Tensor methods that turn the graph's tensor into the role's own order, size one for letters it lacks."""
        steps: list[tuple[str, tuple[object, ...]]] = []
        letters = self.letters
        if "*" in letters:
            steps.append(("unflatten", (letters.index("*"), (sizes["H"], sizes["K"]))))
            letters = letters.replace("*", "HK")
        letters = _filled(letters, self.order)
        for index in reversed(range(len(letters))):
            if letters[index] in ".=":
                steps.append(("select", (index, 0)))
        letters = letters.replace(".", "").replace("=", "")
        permutation = _permutation(letters, self.order)
        if permutation:
            steps.append(("permute", permutation))
        missing = [i for i, letter in enumerate(self.order) if letter not in letters]
        return [*steps, *(("unsqueeze", (index,)) for index in missing), *self._turn()]

    def _turn(self) -> list[tuple[str, tuple[object, ...]]]:
        """In the role's own order of dimensions."""
        return [("flip", (self.order.index("T"),))] if self.backwards and "T" in self.letters else []

    def back_steps(self) -> list[tuple[str, tuple[object, ...]]]:
        """Tensor methods that lay a canonical tensor out as the graph has it."""
        order, letters = self.order, _filled(self.letters, self.order)
        steps = self._turn()
        steps += [("squeeze", (index,)) for index in reversed(range(len(order))) if order[index] not in letters]
        present = [letter for letter in order if letter in letters]
        permutation = [present.index(letter) for letter in letters if letter not in ".="]
        if permutation != sorted(permutation):
            steps.append(("permute", tuple(permutation)))
        return [*steps, *(("unsqueeze", (index,)) for index, letter in enumerate(letters) if letter in ".=")]

    def to_canonical(self, tensor: Tensor) -> Tensor:
        for name, args in self.steps({}):
            tensor = getattr(tensor, name)(*args)
        return tensor

    def from_canonical(self, tensor: Tensor) -> Tensor:
        """The inverse of ``to_canonical``; along letters the tensor lacks, index 0 is taken."""
        for index, letter in enumerate(self.order):
            if letter not in self.letters:
                tensor = tensor.narrow(index, 0, 1)
        for name, args in self.back_steps():
            tensor = getattr(tensor, name)(*args)
        grown = [self.value.shape[i] if letter == "=" else -1 for i, letter in enumerate(self.letters)]
        return tensor.expand(grown) if "=" in self.letters else tensor

    def run_shape(self, sizes: dict[str, int]) -> list[int]:
        """Shape in a run with ``sizes``; uniform dimensions count one (they are expanded afterwards)."""
        return [1 if letter in ".=" else sizes[letter] for letter in self.letters]


@dataclass(frozen=True)
class Hypothesis:
    """The claim "this region is that recurrence", not yet proven."""

    inputs: tuple[Placement, ...]
    output: Placement
    final_state: Placement | None
    sizes: dict[str, int]
    gate: str
    gate_form: str
    delta: bool
    gate_rate: float = 1.0
    """The log gate as a multiple of the tensor in role g (log 2 for a gate that goes through ``exp2``)."""
    scale: float = 1.0
    decay: tuple[float, ...] = ()
    """Decay factors per head that the graph computes from constants alone."""
    penalty: int = field(default=0, compare=False)

    def role(self, name: str) -> Placement | None:
        return next((p for p in self.inputs if p.role == name), None)

    @property
    def moved(self) -> int:
        """How many tensors must be permuted: where heads or batch are one, each can be taken for the other."""
        ends = (self.output,) if self.final_state is None else (self.output, self.final_state)
        return sum(bool(_permutation(placement.letters, placement.order)) for placement in (*self.inputs, *ends))

    def with_(self, **changes: object) -> Hypothesis:
        return replace(self, **changes)  # type: ignore[arg-type]

    def backwards(self) -> Hypothesis:
        """The same claim with the last token first."""
        inputs = tuple(replace(placement, backwards=True) for placement in self.inputs)
        return self.with_(inputs=inputs, output=replace(self.output, backwards=True))


@cache
def _permutation(letters: str, order: str) -> tuple[int, ...]:
    """How a tensor with these letters must be permuted to be in the role's own order; empty if it is."""
    bare = _filled(letters, order).replace(".", "").replace("=", "")
    found = tuple(bare.index(letter) for letter in order if letter in bare)
    return () if list(found) == sorted(found) else found


def _filled(letters: str, order: str) -> str:
    """``letters`` with what is missing of a role's letters in place of dimensions of size one, where there are any."""
    for letter in order:
        if letter not in letters:
            letters = letters.replace(".", letter, 1)
    return letters


def _labelings(value: Value, role: str, sizes: dict[str, int]) -> Sequence[tuple[str, dict[str, int]]]:
    """Letters for each dimension of ``value`` in ``role`` that agree with the sizes known so far, and all sizes."""
    return _labelings_of(value.shape, value.uniform, role, tuple(sizes.items()))


@lru_cache(maxsize=1 << 14)
def _labelings_of(
    shape: tuple[int, ...], uniform: frozenset[int], role: str, sizes: tuple[tuple[str, int], ...]
) -> Sequence[tuple[str, dict[str, int]]]:
    """Asked again and again of tensors of few shapes."""
    dims = [(i, size) for i, size in enumerate(shape) if size != 1 and i not in uniform]
    order = LETTERS[role]
    if len(dims) > len(order) or 0 in shape:
        return ()
    given = dict(sizes)
    fitting = [[letter for letter in order if given.get(letter, size) == size] for _, size in dims]
    found: list[tuple[str, dict[str, int]]] = []
    for letters in _choices(fitting):
        known = {**given, **{letter: size for letter, (_, size) in zip(letters, dims, strict=True)}}
        missing = [letter for letter in order if letter not in letters]
        allowed = BROADCAST.get(role, "")
        if any(letter not in allowed and known.setdefault(letter, 1) != 1 for letter in missing):
            continue
        if "H" in known and "G" in known and known["H"] % known["G"]:
            continue
        text = ["=" if i in uniform else "." for i in range(len(shape))]
        for letter, (i, _) in zip(letters, dims, strict=True):
            text[i] = letter
        found.append(("".join(text), known))
    return tuple(found)


def _choices(fitting: Sequence[Sequence[str]], taken: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """One letter for each dimension, none twice."""
    if len(taken) == len(fitting):
        yield taken
        return
    for letter in fitting[len(taken)]:
        if letter not in taken:
            yield from _choices(fitting, (*taken, letter))


INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "rate")
MAIN = frozenset({"q", "k", "v"})


def frames(output: Value, state: Value | None, key_size: int, *, usual: bool) -> list[dict[str, int]]:
    """Sizes of the letters, K included, under the readings of the results that come nearest to what people write, or
    under all others.
    """
    found = [(_oddity(letters), sizes) for letters, sizes in _labelings(output, "o", {})]
    if state is not None:
        found = [
            (odd + _oddity(letters), known)
            for odd, sizes in found
            for letters, known in _labelings(state, "final_state", sizes)
        ]
    least = min((odd for odd, _ in found), default=0)
    return [{**sizes, "K": sizes.get("K", key_size)} for odd, sizes in found if (odd == least) == usual]


def role_test(readings: Sequence[dict[str, int]]) -> Callable[[Value], bool]:
    """Tells whether a value could be any input at all under one of the readings; each shape is looked at once."""
    known: dict[tuple[tuple[int, ...], frozenset[int]], bool] = {}

    def has_role(value: Value) -> bool:
        key = value.shape, value.uniform
        if key not in known:
            known[key] = any(_labelings(value, role, sizes) for role in INPUTS for sizes in readings)
        return known[key]

    return has_role


_USUAL = ("BTHK", "BHTK", "BTHV", "BHTV", "BHKV", "BHVK", "BTH", "BHT")


@cache
def _oddity(letters: str) -> int:
    """0 for the layouts people write, more for the rest."""
    bare = letters.replace(".", "").replace("=", "").replace("G", "H")
    for usual in _USUAL:
        if "".join(letter for letter in usual if letter in bare) == bare:
            return 0
    return 3


def _gate_kind(placement: Placement | None, sizes: dict[str, int]) -> str:
    if placement is None:
        return "none"
    if "K" in placement.letters and sizes["K"] > 1:
        return "channel"
    if "T" in placement.letters or "B" in placement.letters:
        return "token"
    per_head = "H" in placement.letters and "." not in placement.letters.split("H")[0]
    return "head" if per_head or sizes["T"] > 1 else "token"


MAX_HYPOTHESES = 240
"""Claims looked at before a region is given up."""


class Hypotheses:
    """Consistent role assignments, most plausible first; true if there is one. They are looked for when they are asked
    for: a proof often takes one of the first, and a region like another that was proven needs none.
    """

    def __init__(self, cut: Sequence[Value], output: Value, state: Value | None, region: set[Op]) -> None:
        self.cut = cut
        self.units = Units(region)
        self.gates = {value: bool(self.units(value)) for value in cut}
        self.readings = [
            (cost, partial)
            for cost, partial in _readings(output, state)
            if _may_lead_on(cut, self.gates, set(), partial.sizes)
        ]
        found = islice(self._by_penalty(), MAX_HYPOTHESES)
        equal = groupby(found, key=lambda hypothesis: hypothesis.penalty)
        self.coming = (h for _, group in equal for h in sorted(group, key=lambda hypothesis: hypothesis.moved))
        self.known: list[Hypothesis] = []

    def __bool__(self) -> bool:
        return any(self._leads_on(partial, cost) for cost, partial in self.readings)

    def __iter__(self) -> Iterator[Hypothesis]:
        for place in count():
            if place == len(self.known):
                self.known.extend(islice(self.coming, 1))
            if place == len(self.known):
                return
            yield self.known[place]

    def _leads_on(self, partial: _Partial | Hypothesis, penalty: int) -> bool:
        """True if there is a hypothesis beyond this one: whichever is met first will do."""
        return isinstance(partial, Hypothesis) or any(
            self._leads_on(further, penalty + cost) for cost, further in self._onward(partial, penalty)
        )

    def _by_penalty(self) -> Iterator[Hypothesis]:
        """Cheapest first: where all sizes are equal there are millions of assignments, and the first are wanted."""
        # Ties go to the path that was found first, so that the order is that of a sorted full list.
        queue: list[tuple[int, tuple[int, ...], _Partial | Hypothesis]] = [
            (cost, (place,), partial) for place, (cost, partial) in enumerate(self.readings)
        ]
        heapify(queue)
        while queue:
            penalty, path, item = heappop(queue)
            if isinstance(item, Hypothesis):
                yield item
                continue
            for place, (cost, found) in enumerate(self._onward(item, penalty)):
                heappush(queue, (penalty + cost, (*path, place), found))

    def _onward(self, partial: _Partial, penalty: int) -> Iterator[tuple[int, _Partial | Hypothesis]]:
        """What follows from roles for some of the cut, with what it adds to the penalty."""
        if partial.seen < len(self.cut):
            yield from _with_one_more(partial, self.cut, self.gates)
        else:
            complete = _complete(partial.inputs, partial.ends, partial.sizes, penalty, self.units)
            yield from ((hypothesis.penalty - penalty, hypothesis) for hypothesis in complete)


class _Partial(NamedTuple):
    """Roles for the first tensors of a cut, and for the results."""

    inputs: tuple[Placement, ...]
    ends: tuple[Placement, ...]
    sizes: dict[str, int]
    seen: int = 0
    """Tensors of the cut that have a role."""


def _readings(output: Value, state: Value | None) -> Iterator[tuple[int, _Partial]]:
    """Every reading of the results, with its penalty."""
    for letters, sizes in _labelings(output, "o", {}):
        start = Placement("o", output, letters)
        if state is None:
            yield _oddity(letters), _Partial((), (start,), sizes)
            continue
        for state_letters, known in _labelings(state, "final_state", sizes):
            ends = (start, Placement("final_state", state, state_letters))
            yield _oddity(letters) + _oddity(state_letters), _Partial((), ends, known)


def _with_one_more(partial: _Partial, cut: Sequence[Value], gates: dict[Value, bool]) -> Iterator[tuple[int, _Partial]]:
    """Every role of the next tensor of the cut, with what it adds to the penalty."""
    value, others = cut[partial.seen], cut[partial.seen + 1 :]
    used = {placement.role for placement in partial.inputs}
    if len(MAIN - used) > len(cut) - partial.seen:
        return
    for role in _open_roles(gates[value], used):
        for letters, known in _labelings(value, role, partial.sizes):
            if not _may_lead_on(others, gates, {*used, role}, known):
                continue
            cost = _oddity(letters) + (2 if role == "g" and not gates[value] else 0)
            taken = (*partial.inputs, Placement(role, value, letters))
            yield cost, _Partial(taken, partial.ends, known, partial.seen + 1)
            if role == "g" and not gates[value] and "beta" not in used and "K" not in letters:
                both = (*taken, Placement("beta", value, letters))  # a step size: dt
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
    return frozenset(role for role in INPUTS if _labelings_of(shape, uniform, role, sizes))


def _open_roles(is_gate: bool, used: set[str]) -> list[str]:
    return [role for role in INPUTS if role not in used and (role == "g" or not is_gate)]


def _erases(region: set[Op]) -> bool:
    """True if there is more than one write and one read. The first token after an empty state looks the same with a
    delta term and without: its text tells which was meant.
    """
    return sum(map(is_anchor, region)) > 2


def _complete(
    inputs: tuple[Placement, ...],
    ends: tuple[Placement, ...],
    sizes: dict[str, int],
    penalty: int,
    units: Units,
) -> Iterator[Hypothesis]:
    by_role = {placement.role: placement for placement in inputs}
    if not set(by_role) >= MAIN:
        return
    if "rate" in by_role and "g" not in by_role:
        return
    main = (by_role["q"], by_role["k"], by_role["v"], ends[0])
    orders = {p.letters.replace("V", "K").replace("G", "H").replace(".", "") for p in main}
    penalty += len(orders) - 1
    gate, factor = by_role.get("g"), by_role.get("rate")
    rates = units(gate.value, factor and factor.value) if gate else [1.0]
    form = "log" if rates or factor else "factor"
    output, final = ends[0], ends[1] if len(ends) > 1 else None
    first = sizes.get("T", 1) > 1 or "initial_state" in by_role or _erases(units.region)
    for turn, rate in enumerate(rates or [1.0]):
        for delta in (first, not first):
            yield Hypothesis(
                inputs,
                output,
                final,
                {**dict.fromkeys("BTHGKV", 1), **sizes},
                _gate_kind(gate, sizes),
                form,
                delta,
                rate,
                penalty=penalty + turn,
            )
