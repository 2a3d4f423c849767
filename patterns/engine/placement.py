"""A tensor of the graph in a role: which dimension is which axis of the role, and how to get from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from torch import Tensor

from kdacompile.graph.ir import Value

Steps = list[tuple[str, tuple[object, ...]]]
"""Tensor methods with their arguments, one after the other."""


@dataclass(frozen=True)
class Placement:
    """``axes`` names the tensor's dimensions: '.' for size one, '=' for one that is uniform, '*' for H and K merged;
    ``order`` is the role's own order of them.
    """

    role: str
    value: Value
    axes: str
    order: str
    columns: tuple[int, int] | None = None
    """The columns that are meant, of a pool of pages."""
    backwards: bool = field(default=False, kw_only=True)
    """The last token comes first."""

    def steps(self, sizes: dict[str, int]) -> Steps:
        """What turns the graph's tensor into the role's own order, size one for axes it lacks."""
        steps: Steps = []
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

    def _turn(self) -> Steps:
        """In the role's own order of dimensions."""
        return [("flip", (self.order.index("T"),))] if self.backwards and "T" in self.axes else []

    def back_steps(self) -> Steps:
        """What lays a canonical tensor out as the graph has it."""
        order, axes = self.order, _filled(self.axes, self.order)
        steps = self._turn()
        steps += [("squeeze", (index,)) for index in reversed(range(len(order))) if order[index] not in axes]
        present = [axis for axis in order if axis in axes]
        permutation = [present.index(axis) for axis in axes if axis not in ".="]
        if permutation != sorted(permutation):
            steps.append(("permute", tuple(permutation)))
        return [*steps, *(("unsqueeze", (index,)) for index, axis in enumerate(axes) if axis in ".=")]

    @property
    def permuted(self) -> bool:
        """Whether the dimensions stand in another order than the role's own."""
        return bool(_permutation(self.axes, self.order))

    def to_canonical(self, tensor: Tensor) -> Tensor:
        for name, args in self.steps({}):
            tensor = getattr(tensor, name)(*args)
        return tensor

    def from_canonical(self, tensor: Tensor) -> Tensor:
        """The inverse of ``to_canonical``; along axes the tensor lacks, index 0 is taken."""
        merged = self.axes.find("*")
        apart = self if merged < 0 else replace(self, axes=self.axes.replace("*", "HK"))
        for index, axis in enumerate(self.order):
            if axis not in apart.axes:
                tensor = tensor.narrow(index, 0, 1)
        for name, args in apart.back_steps():
            tensor = getattr(tensor, name)(*args)
        tensor = tensor if merged < 0 else tensor.flatten(merged, merged + 1)
        grown = [self.value.shape[i] if axis == "=" else -1 for i, axis in enumerate(self.axes)]
        return tensor.expand(grown) if "=" in self.axes else tensor

    def run_shape(self, sizes: dict[str, int]) -> list[int]:
        """Shape in a run with ``sizes``; uniform dimensions count one (they are expanded afterwards)."""
        return [1 if axis in ".=" else sizes[axis] for axis in self.axes]

    def key(self, who: Callable[[Value], object]) -> tuple[object, ...]:
        """The same for the same tensor in the same role, whatever the sizes; ``who`` it is."""
        return self.role, who(self.value), self.axes, self.columns


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


# -- which dimension could be which axis ------------------------------------------------------------------------------

Sizes = tuple[tuple[str, int], ...]
"""The size behind every axis, as far as it is known."""


def labelings(
    shape: tuple[int, ...], uniform: frozenset[int], order: str, sizes: Sizes, optional: str = ""
) -> Sequence[tuple[str, dict[str, int]]]:
    """An axis of ``order`` for each dimension, as ``Placement.axes`` has it, with all sizes that are then known.

    ``uniform`` dimensions have none. ``optional`` axes may be lacking although they are larger than one: the tensor is
    then the same all along them. G counts key heads, of which H (heads) is a multiple; an empty tensor has none.
    """
    given, read = dict(sizes), _read(order, sizes)
    return [(axes, {**given, **found}) for axes, found in _labelings(shape, uniform, order, read, optional)]


def has_labelings(
    shape: tuple[int, ...], uniform: frozenset[int], order: str, sizes: Sizes, optional: str = ""
) -> bool:
    """Whether there are any, which is asked more often than what they are."""
    return bool(_labelings(shape, uniform, order, _read(order, sizes), optional))


def _read(order: str, sizes: Sizes) -> Sizes:
    """The sizes that matter to an order of axes."""
    return tuple(item for item in sizes if item[0] in order or item[0] in "GH")


@lru_cache(maxsize=1 << 14)
def _labelings(
    shape: tuple[int, ...], uniform: frozenset[int], order: str, sizes: Sizes, optional: str
) -> Sequence[tuple[str, dict[str, int]]]:
    """Asked again and again of tensors of few shapes, with the sizes that matter: the axes, and the sizes they have."""
    dims = [(i, size) for i, size in enumerate(shape) if size != 1 and i not in uniform]
    if len(dims) > len(order):
        return ()
    given = dict(sizes)
    fitting = [[axis for axis in order if given.get(axis, size) == size] for _, size in dims]
    found: list[tuple[str, dict[str, int]]] = []
    for axes in _choices(fitting):
        known = {**given, **{axis: size for axis, (_, size) in zip(axes, dims, strict=True)}}
        missing = [axis for axis in order if axis not in axes]
        if any(axis not in optional and known.setdefault(axis, 1) != 1 for axis in missing):
            continue
        if "H" in known and "G" in known and (not known["G"] or known["H"] % known["G"]):
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


_USUAL = "BTHK BHTK BTHV BHTV BHKV BHVK BTHD BHTD BHTS BTHS BTH BHT BCR BCD BCE".split()


@cache
def oddity(axes: str) -> int:
    """0 for the layouts people write, more for the rest.

    Sizes of one keep their place: in ``[1, T, 1, K]`` the batch and the heads are one, nothing else is.
    """
    named = axes.replace("G", "H").replace("=", ".")
    return 0 if any(_fits(named, usual) for usual in _USUAL) else 3


def _fits(axes: str, usual: str) -> bool:
    if len(axes) == len(usual):
        return all(axis in (".", place) for axis, place in zip(axes, usual, strict=True))
    bare = axes.replace(".", "")
    return "".join(axis for axis in usual if axis in bare) == bare and not axes.startswith(".B")
