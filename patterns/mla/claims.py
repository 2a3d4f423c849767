"""Claims about one region: every assignment of axes to its tensors that the sizes allow, usual layouts first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, islice, permutations, product

from kdacompile.graph.ir import Value
from kdacompile.patterns.mla.definition import MASKS, WEIGHTS, Claim, Hiding, MlaPlacement, order_of
from kdacompile.patterns.mla.masks import Masks, aligned

MERGED = {"*TS": (0, "BHTS"), "B*S": (1, "BTHS"), "B+S": (1, "BHTS")}
"""Layouts of scores with heads merged with the batch or the queries: which dimension it is, and the layout it was."""

USUAL = ("BTHK", "BHTK", "BTHV", "BHTV", "BHTS", "BTHS", "BTHD", "BHTD")


def labels(value: Value, role: str, sizes: dict[str, int]) -> Iterator[str]:
    """Axes for the dimensions of ``value`` in ``role``: all that have more than one entry, and no others.

    A rotated key may have been expanded over heads before: ``=`` where it is the same for all of them.
    """
    order = order_of(role, value)
    dims = [(i, size) for i, size in enumerate(value.shape) if size != 1]
    wanted = [axis for axis in order if sizes[axis] != 1]
    text = ["."] * len(value.shape)
    if role == "k_rope" and len(dims) == len(wanted) + 1:
        same = next((i for i, size in dims if i in value.uniform and size == sizes["H"]), -1)
        dims = [(i, size) for i, size in dims if i != same]
        text = ["=" if i == same else "." for i in range(len(value.shape))]
    if len(dims) != len(wanted):
        return
    for axes in permutations(wanted):
        if all(sizes[axis] == size for axis, (_, size) in zip(axes, dims, strict=True)):
            for axis, (i, _) in zip(axes, dims, strict=True):
                text[i] = axis
            yield "".join(text)


def _merged(text: str, apart: str, sizes: dict[str, int]) -> tuple[int, ...]:
    both = math.prod(sizes[axis] for axis in apart if axis not in text)
    return tuple(sizes.get(axis, both) for axis in text)


def _oddity(axes: str) -> int:
    bare = axes.replace(".", "")
    usual = any("".join(axis for axis in order if axis in bare) == bare for order in USUAL)
    return 0 if usual else 1 if axes[0] == "B" else 2


def claims(
    tensors: dict[str, Value], output: Value, scores: Value, captured: dict[str, int], masks: Masks
) -> Iterator[Claim]:
    """Every assignment of axes the sizes allow; ``scores``: the softmax's input without sinks."""
    sizes = {**captured, "W": 0, "Y": 0}
    options: list[list[MlaPlacement]] = []
    for role, value in tensors.items():
        if role in MASKS:
            continue
        if role in WEIGHTS:
            sizes["W"] = math.prod(value.shape) // sizes["R"]
            sizes["Y"] = sizes["W"] // sizes["H"]
        options.append([MlaPlacement(role, value, text) for text in labels(value, role, sizes)])
    outputs = [MlaPlacement("o", output, text) for text in labels(output, "o", sizes)]
    layouts = list(labels(scores, "mask", sizes))
    if not layouts:
        layouts = [text for text, (_, apart) in MERGED.items() if scores.shape == _merged(text, apart, sizes)]
    merged = "w" in tensors and len(tensors["w"].shape) == 2
    choices = sorted(islice(product(*options, outputs, layouts), 4096), key=_oddity_of_all)
    both, either = (False, True), ((False, True) if "w" in tensors else (False,))
    for _, alike in groupby(choices, key=_oddity_of_all):
        group = list(alike)
        for stacked, rope_first, values_first in product(both if merged else (False,), both, either):
            if rope_first and (not captured["D"] or ("q_rope" in tensors and "cache" not in tensors)):
                continue
            for *inputs, out, layout in group:
                placed = {item.role: item for item in inputs if isinstance(item, MlaPlacement)}
                claim = _claim(placed, out, layout, captured, masks)
                if claim is not None:
                    yield claim.with_(rope_first=rope_first, values_first=values_first, stacked=stacked)


def _oddity_of_all(choice: tuple[MlaPlacement | str, ...]) -> int:
    return sum(map(_oddity_of, choice))


def _oddity_of(item: MlaPlacement | str) -> int:
    return _oddity(item if isinstance(item, str) else item.axes)


def _claim(
    placed: dict[str, MlaPlacement],
    out: MlaPlacement | str,
    layout: MlaPlacement | str,
    sizes: dict[str, int],
    masks: Masks,
) -> Claim | None:
    assert isinstance(out, MlaPlacement) and isinstance(layout, str)
    causal = masks.causal_in(layout, sizes)
    if causal is None:
        return None
    for role, mask in masks.operands.items():
        axes = aligned(mask.value, layout)
        if axes is None:
            return None
        placed = {**placed, role: MlaPlacement(role, mask.value, axes)}
    hidings = tuple(Hiding(role, mask.keeps, mask.fill) for role, mask in masks.operands.items())
    return Claim(placed, out, sizes, layout, causal=causal, masks=hidings)
