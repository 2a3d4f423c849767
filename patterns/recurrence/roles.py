"""The recurrence's roles and axes: which a tensor of the graph could have by its sizes alone, never by a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isclose, log

from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.evaluate import PRECISE
from kdacompile.patterns.engine.match import Binding, Candidate, Match, by_node
from kdacompile.patterns.engine.placement import Placement, Sizes, has_labelings, labelings, oddity
from kdacompile.patterns.recurrence.definition import Reads
from kdacompile.patterns.recurrence.family import pattern_of

AXES = {
    "q": "BTGK",
    "k": "BTGK",
    "v": "BTHV",
    "g": "BTHK",
    "rate": "H",
    "beta": "BTH",
    "A_log": "H",
    "dt_bias": "HK",
    "initial_state": "BHKV",
    "u": "HK",
    "o": "BTHV",
    "final_state": "BHKV",
}
"""The recurrence's own order of dimensions, per role. G counts key heads (H is a multiple of it); ``rate`` is a
factor of the log gate per head (Mamba-2's A, where g = dt * A), ``u`` the bonus with which a token reads its own write
(RWKV-5 and 6), and the state as it was before.

Where a token has several writes (DeltaProduct), N counts tokens, R the writes of one, and T = N R all of them."""

READ = ("q", "g", "o")
"""Roles with one row a token, however many writes it has. Those of k, v and beta are in a dimension of their own, or
one after the other."""

MAX_WRITES = 16
"""Writes a token may have."""

# Dimensions a role may lack although they are larger than one: the tensor is then the same all along them.
BROADCAST = {"g": "BTHK", "beta": "H", "initial_state": "B", "u": "HK"}


def place(role: str, value: Value, axes: str) -> Placement:
    tokens = "NR" if "R" in axes else "N" if "N" in axes else "T"
    return Placement(role, value, axes, AXES[role].replace("T", tokens))


def in_role(placement: Placement, role: str) -> Placement:
    """The same tensor in another role."""
    return replace(placement, role=role, order=AXES[role])


def rows(placement: Placement, tensor: Tensor) -> Tensor:
    """The graph's tensor in the role's own order, the writes of all tokens one after the other."""
    own = placement.to_canonical(tensor)
    return own.flatten(1, 2) if "R" in placement.order else own


@dataclass(frozen=True, kw_only=True)
class Recurrence(Binding):
    """The binding of a region that could be the recurrence, and the options of the op that computes it."""

    gate: str
    """none, head, token or channel."""
    delta: bool
    reads: Reads = "after"
    gate_rate: float = 1.0
    """The log gate as a multiple of the tensor in role g (log 2 for a gate that goes through ``exp2``)."""
    decay: tuple[float, ...] = ()
    """Decay factors per head that the graph computes from constants alone."""
    rounded: bool = False
    """Whether those were read off tables that are rounded to their dtype."""
    gate_fn: str = "log"
    """What the tensor in role g is: the decay's logarithm ("log"), the decay itself ("factor"), or the logit of an
    activation that the op computes.
    """
    gate_scale: float = 1.0
    sigmoid_beta: bool = False
    qk_l2norm_eps: float = 0.0
    penalty: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return pattern_of(self.gate, delta=self.delta).name

    @property
    def permuted(self) -> int:
        """How many tensors must be permuted: where heads or batch are one, each can be taken for the other."""
        return sum(placement.permuted for placement in (*self.inputs.values(), *self.ends))

    @property
    def writes(self) -> int:
        """Writes a token: more than one are DeltaProduct's."""
        return self.sizes.get("R", 1)

    @property
    def tokens(self) -> int:
        return self.sizes["T"] // self.writes

    def in_other_orders(self) -> list[Recurrence]:
        """This, and with tokens that read the state earlier; between decay and write where the op's result, or its
        query, can be decayed for that.
        """
        if self.reads != "after" or self.tokens == 1 or self.writes > 1:
            return [self]
        between = self.gate != "channel" or self.sizes["G"] == self.sizes["H"]
        return [self, self.with_(reads="before"), *([self.with_(reads="between")] if between else [])]

    def backwards(self) -> Recurrence:
        """The same binding with the last token first."""
        inputs = {role: replace(placement, backwards=True) for role, placement in self.inputs.items()}
        return self.with_(inputs=inputs, output=replace(self.output, backwards=True))

    def assignment(self, who: Callable[[Value], object] = by_node) -> tuple[object, ...]:
        return super().assignment(who), self.delta, self.reads, self.gate_fn, self.gate_rate

    def key(self) -> tuple[object, ...]:
        gate = self.gate, self.gate_scale, self.sigmoid_beta, len(self.decay) if self.rounded else self.decay
        options = self.qk_l2norm_eps, self.output.backwards
        written = "*" in "".join(placement.axes for placement in self.inputs.values()) or "A_log" in self.inputs
        fixed = (self.sizes["H"], self.sizes["K"]) if written else ()
        return self.assignment(), gate, options, fixed, self.writes, self.sizes["T"] == 1

    def same_as(self, other: Binding) -> bool:
        """Decays read off rounded tables come out slightly different at each length, a fitted scale by rounding."""
        if not isinstance(other, Recurrence) or self.key() != other.key():
            return False
        if not isclose(self.scale, other.scale, rel_tol=PRECISE):
            return False
        return all(isclose(log(a), log(b), rel_tol=1e-4) for a, b in zip(self.decay, other.decay, strict=True))


RecurrenceCandidate = Candidate[Recurrence]
RecurrenceMatch = Match[Recurrence]


def labelings_of(value: Value, role: str, sizes: dict[str, int]) -> Sequence[tuple[str, dict[str, int]]]:
    """Axes for each dimension of ``value`` in ``role`` that agree with the sizes known so far, and all sizes."""
    if 0 in value.shape:
        return ()
    return labelings_of_shape(value.shape, value.uniform, role, tuple(sizes.items()))


@lru_cache(maxsize=1 << 14)
def labelings_of_shape(
    shape: tuple[int, ...], uniform: frozenset[int], role: str, sizes: Sizes
) -> Sequence[tuple[str, dict[str, int]]]:
    orders, optional = _orders(role, sizes)
    return [found for order in orders for found in labelings(shape, uniform, order, sizes, optional)]


def fits_shape(shape: tuple[int, ...], uniform: frozenset[int], role: str, sizes: Sizes) -> bool:
    """Whether there are such axes."""
    orders, optional = _orders(role, sizes)
    return any(has_labelings(shape, uniform, order, sizes, optional) for order in orders)


def _orders(role: str, sizes: Sizes) -> tuple[list[str], str]:
    """The orders of axes that a tensor in this role may have, and which of them it may lack."""
    optional = BROADCAST.get(role, "")
    if all(axis != "N" for axis, _ in sizes):
        return [AXES[role]], optional
    tokens = ("N",) if role in READ else ("T", "NR")
    orders = [AXES[role].replace("T", each) for each in (tokens if "T" in AXES[role] else "T")]
    return orders, optional.replace("T", "N")


def with_writes(axes: str, sizes: dict[str, int], writes: int) -> tuple[str, dict[str, int]]:
    """A reading of the output, with so many writes a token."""
    tokens = sizes.get("T", 1)
    return axes.replace("T", "N"), {**sizes, "N": tokens, "R": writes, "T": tokens * writes}


def writes_of(values: Iterable[Value], sizes: dict[str, int]) -> list[int]:
    """How many writes a token could have: some of the values could be the keys, others their values."""
    tokens = sizes.get("T", 1)
    shapes = {(value.shape, value.uniform) for value in values}
    each = {size for shape, _ in shapes for size in shape}
    found = {size // tokens for size in each if size % tokens == 0} | each

    def fits(role: str, writes: int) -> bool:
        known = tuple(with_writes("", sizes, writes)[1].items())
        every = (labelings_of_shape(shape, uniform, role, known) for shape, uniform in shapes)
        return any("T" in axes or "R" in axes for found in every for axes, _ in found)

    return [n for n in sorted(found) if 1 < n <= MAX_WRITES and fits("k", n) and fits("v", n)]


INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "rate", "u")


def frames(output: Value, state: Value | None, key_size: int, *, usual: bool, writes: int = 1) -> list[dict[str, int]]:
    """Sizes of the axes, K included, under the readings of the results that come nearest to what people write, or
    under all others.
    """
    found = [(oddity(axes), sizes) for axes, sizes in labelings_of(output, "o", {})]
    if state is not None:
        found = [
            (odd + oddity(axes), known)
            for odd, sizes in found
            for axes, known in labelings_of(state, "final_state", sizes)
        ]
    least = min((odd for odd, _ in found), default=0)
    near = [{**sizes, "K": sizes.get("K", key_size)} for odd, sizes in found if (odd == least) == usual]
    return near if writes == 1 else [with_writes("", sizes, writes)[1] for sizes in near]


def role_test(readings: Sequence[dict[str, int]]) -> Callable[[Value], bool]:
    """Tells whether a value could be any input at all under one of the readings; each shape is looked at once."""
    known: dict[tuple[tuple[int, ...], frozenset[int]], bool] = {}

    def has_role(value: Value) -> bool:
        key = value.shape, value.uniform
        if key not in known:
            known[key] = any(labelings_of(value, role, sizes) for role in INPUTS for sizes in readings)
        return known[key]

    return has_role
