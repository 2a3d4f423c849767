"""The recurrence's roles and axes: which a tensor of the graph could have by its sizes alone, never by a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from torch import Tensor

from kdacompile.graph.ir import Value

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
    "o": "BTHV",
    "final_state": "BHKV",
}
"""The recurrence's own order of dimensions, per role. G counts key heads (H is a multiple of it); ``rate`` is a
factor of the log gate per head (Mamba-2's A, where g = dt * A)."""

# Dimensions a role may lack although they are larger than one: the tensor is then the same all along them.
BROADCAST = {"g": "BTHK", "beta": "H", "initial_state": "B"}


@dataclass(frozen=True)
class Placement:
    """A tensor of the graph in a role; ``axes`` names its dimensions ('.' for size one, '=' for one that is uniform,
    '*' for H and K merged)."""

    role: str
    value: Value
    axes: str
    backwards: bool = field(default=False, kw_only=True)
    """The last token comes first."""

    @property
    def order(self) -> str:
        """The role's own order of dimensions."""
        return AXES[self.role]

    def steps(self, sizes: dict[str, int]) -> list[tuple[str, tuple[object, ...]]]:
        """Tensor methods that turn the graph's tensor into the role's own order, size one for axes it lacks."""
        steps: list[tuple[str, tuple[object, ...]]] = []
        axes = self.axes
        if "*" in axes:
            steps.append(("unflatten", (axes.index("*"), (sizes["H"], sizes["K"]))))
            axes = axes.replace("*", "HK")
        axes = _filled(axes, self.order)
        for index in reversed(range(len(axes))):
            if axes[index] in ".=":
                steps.append(("select", (index, 0)))
        axes = axes.replace(".", "").replace("=", "")
        permutation = _permutation(axes, self.order)
        if permutation:
            steps.append(("permute", permutation))
        missing = [i for i, axis in enumerate(self.order) if axis not in axes]
        return [*steps, *(("unsqueeze", (index,)) for index in missing), *self._turn()]

    def _turn(self) -> list[tuple[str, tuple[object, ...]]]:
        """In the role's own order of dimensions."""
        return [("flip", (self.order.index("T"),))] if self.backwards and "T" in self.axes else []

    def back_steps(self) -> list[tuple[str, tuple[object, ...]]]:
        """Tensor methods that lay a canonical tensor out as the graph has it."""
        order, axes = self.order, _filled(self.axes, self.order)
        steps = self._turn()
        steps += [("squeeze", (index,)) for index in reversed(range(len(order))) if order[index] not in axes]
        present = [axis for axis in order if axis in axes]
        permutation = [present.index(axis) for axis in axes if axis not in ".="]
        if permutation != sorted(permutation):
            steps.append(("permute", tuple(permutation)))
        return [*steps, *(("unsqueeze", (index,)) for index, axis in enumerate(axes) if axis in ".=")]

    def to_canonical(self, tensor: Tensor) -> Tensor:
        for name, args in self.steps({}):
            tensor = getattr(tensor, name)(*args)
        return tensor

    def from_canonical(self, tensor: Tensor) -> Tensor:
        """The inverse of ``to_canonical``; along axes the tensor lacks, index 0 is taken."""
        for index, axis in enumerate(self.order):
            if axis not in self.axes:
                tensor = tensor.narrow(index, 0, 1)
        for name, args in self.back_steps():
            tensor = getattr(tensor, name)(*args)
        grown = [self.value.shape[i] if axis == "=" else -1 for i, axis in enumerate(self.axes)]
        return tensor.expand(grown) if "=" in self.axes else tensor

    def run_shape(self, sizes: dict[str, int]) -> list[int]:
        """Shape in a run with ``sizes``; uniform dimensions count one (they are expanded afterwards)."""
        return [1 if axis in ".=" else sizes[axis] for axis in self.axes]


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
        return sum(bool(_permutation(placement.axes, placement.order)) for placement in (*self.inputs, *ends))

    def with_(self, **changes: object) -> Hypothesis:
        return replace(self, **changes)  # type: ignore[arg-type]

    def backwards(self) -> Hypothesis:
        """The same claim with the last token first."""
        inputs = tuple(replace(placement, backwards=True) for placement in self.inputs)
        return self.with_(inputs=inputs, output=replace(self.output, backwards=True))


@cache
def _permutation(axes: str, order: str) -> tuple[int, ...]:
    """How a tensor with these axes must be permuted to be in the role's own order; empty if it is."""
    bare = _filled(axes, order).replace(".", "").replace("=", "")
    found = tuple(bare.index(axis) for axis in order if axis in bare)
    return () if list(found) == sorted(found) else found


def _filled(axes: str, order: str) -> str:
    """``axes`` with what is missing of a role's axes in place of dimensions of size one, where there are any."""
    for axis in order:
        if axis not in axes:
            axes = axes.replace(".", axis, 1)
    return axes


def labelings(value: Value, role: str, sizes: dict[str, int]) -> Sequence[tuple[str, dict[str, int]]]:
    """Axes for each dimension of ``value`` in ``role`` that agree with the sizes known so far, and all sizes."""
    return labelings_of(value.shape, value.uniform, role, tuple(sizes.items()))


@lru_cache(maxsize=1 << 14)
def labelings_of(
    shape: tuple[int, ...], uniform: frozenset[int], role: str, sizes: tuple[tuple[str, int], ...]
) -> Sequence[tuple[str, dict[str, int]]]:
    """Asked again and again of tensors of few shapes."""
    dims = [(i, size) for i, size in enumerate(shape) if size != 1 and i not in uniform]
    order = AXES[role]
    if len(dims) > len(order) or 0 in shape:
        return ()
    given = dict(sizes)
    fitting = [[axis for axis in order if given.get(axis, size) == size] for _, size in dims]
    found: list[tuple[str, dict[str, int]]] = []
    for axes in _choices(fitting):
        known = {**given, **{axis: size for axis, (_, size) in zip(axes, dims, strict=True)}}
        missing = [axis for axis in order if axis not in axes]
        allowed = BROADCAST.get(role, "")
        if any(axis not in allowed and known.setdefault(axis, 1) != 1 for axis in missing):
            continue
        if "H" in known and "G" in known and known["H"] % known["G"]:
            continue
        text = ["=" if i in uniform else "." for i in range(len(shape))]
        for axis, (i, _) in zip(axes, dims, strict=True):
            text[i] = axis
        found.append(("".join(text), known))
    return tuple(found)


def _choices(fitting: Sequence[Sequence[str]], taken: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """One axis for each dimension, none twice."""
    if len(taken) == len(fitting):
        yield taken
        return
    for axis in fitting[len(taken)]:
        if axis not in taken:
            yield from _choices(fitting, (*taken, axis))


INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "rate")


def frames(output: Value, state: Value | None, key_size: int, *, usual: bool) -> list[dict[str, int]]:
    """Sizes of the axes, K included, under the readings of the results that come nearest to what people write, or
    under all others.
    """
    found = [(oddity(axes), sizes) for axes, sizes in labelings(output, "o", {})]
    if state is not None:
        found = [
            (odd + oddity(axes), known)
            for odd, sizes in found
            for axes, known in labelings(state, "final_state", sizes)
        ]
    least = min((odd for odd, _ in found), default=0)
    return [{**sizes, "K": sizes.get("K", key_size)} for odd, sizes in found if (odd == least) == usual]


def role_test(readings: Sequence[dict[str, int]]) -> Callable[[Value], bool]:
    """Tells whether a value could be any input at all under one of the readings; each shape is looked at once."""
    known: dict[tuple[tuple[int, ...], frozenset[int]], bool] = {}

    def has_role(value: Value) -> bool:
        key = value.shape, value.uniform
        if key not in known:
            known[key] = any(labelings(value, role, sizes) for role in INPUTS for sizes in readings)
        return known[key]

    return has_role


_USUAL = ("BTHK", "BHTK", "BTHV", "BHTV", "BHKV", "BHVK", "BTH", "BHT")


@cache
def oddity(axes: str) -> int:
    """0 for the layouts people write, more for the rest."""
    bare = axes.replace(".", "").replace("=", "").replace("G", "H")
    for usual in _USUAL:
        if "".join(axis for axis in usual if axis in bare) == bare:
            return 0
    return 3
