"""Who could be who in one region: every assignment of axes to its tensors that the sizes allow, usual layouts first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby, islice, product

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.placement import Placement, labelings, oddity
from kdacompile.patterns.mla.definition import MASKS, WEIGHTS, Hiding, LatentAttention, order_of, place
from kdacompile.patterns.mla.masks import Masks, aligned

MERGED = {"*TS": (0, "BHTS"), "B*S": (1, "BTHS"), "B+S": (1, "BHTS")}
"""Layouts of scores with heads merged with the batch or the queries: which dimension it is, and the layout it was."""


def labels(value: Value, role: str, sizes: dict[str, int]) -> Iterator[str]:
    """Axes for the dimensions of ``value`` in ``role``: all that have more than one entry, and no others.

    A rotated key may have been expanded over heads before: ``=`` where it is the same for all of them.
    """
    order, uniform = order_of(role, value), frozenset[int]()
    if role == "k_rope" and sum(n != 1 for n in value.shape) == sum(sizes[axis] != 1 for axis in order) + 1:
        uniform = frozenset([i for i in sorted(value.uniform) if value.shape[i] == sizes["H"]][:1])
    return (axes for axes, _ in labelings(value.shape, uniform, order, tuple(sizes.items())))


def _merged(text: str, apart: str, sizes: dict[str, int]) -> tuple[int, ...]:
    both = math.prod(sizes[axis] for axis in apart if axis not in text)
    return tuple(sizes.get(axis, both) for axis in text)


def bindings(
    tensors: dict[str, Value], output: Value, scores: Value, captured: dict[str, int], masks: Masks
) -> Iterator[LatentAttention]:
    """Every assignment of axes the sizes allow; ``scores``: the softmax's input without sinks."""
    sizes = {**captured, "W": 0, "Y": 0}
    options: list[list[Placement]] = []
    for role, value in tensors.items():
        if role in MASKS:
            continue
        if role in WEIGHTS:
            sizes["W"] = math.prod(value.shape) // sizes["R"]
            sizes["Y"] = sizes["W"] // sizes["H"]
        options.append([place(role, value, text) for text in labels(value, role, sizes)])
    outputs = [place("o", output, text) for text in labels(output, "o", sizes)]
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
                placed = {item.role: item for item in inputs if isinstance(item, Placement)}
                binding = _binding(placed, out, layout, captured, masks)
                if binding is not None:
                    yield binding.with_(rope_first=rope_first, values_first=values_first, stacked=stacked)


def _oddity_of_all(choice: tuple[Placement | str, ...]) -> int:
    return sum(oddity(item if isinstance(item, str) else item.axes) for item in choice)


def _binding(
    placed: dict[str, Placement],
    out: Placement | str,
    layout: Placement | str,
    sizes: dict[str, int],
    masks: Masks,
) -> LatentAttention | None:
    assert isinstance(out, Placement) and isinstance(layout, str)
    causal = masks.causal_in(layout, sizes)
    if causal is None:
        return None
    for role, mask in masks.operands.items():
        axes = aligned(mask.value, layout)
        if axes is None:
            return None
        placed = {**placed, role: place(role, mask.value, axes)}
    hidings = tuple(Hiding(role, mask.keeps, mask.fill) for role, mask in masks.operands.items())
    return LatentAttention(inputs=placed, output=out, sizes=sizes, scores=layout, causal=causal, masks=hidings)
