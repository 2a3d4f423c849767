"""Which dimension of a tensor could be which axis of a role, by sizes alone, never by a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

Sizes = tuple[tuple[str, int], ...]
"""The size behind every axis, as far as it is known."""


@lru_cache(maxsize=1 << 14)
def labelings(
    shape: tuple[int, ...], uniform: frozenset[int], order: str, sizes: Sizes, optional: str = ""
) -> Sequence[tuple[str, dict[str, int]]]:
    """An axis of ``order`` for each dimension, as ``Placement.axes`` has it, with all sizes that are then known.

    ``uniform`` dimensions have none. ``optional`` axes may be lacking although they are larger than one: the tensor is
    then the same all along them. G counts key heads, of which H (heads) is a multiple. Asked again and again of tensors
    of few shapes.
    """
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
