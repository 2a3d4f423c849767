"""Claims about one region: every assignment of letters to its tensors that the sizes allow, usual layouts first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, permutations, product

from kdacompile.patterns.ir import Value
from kdacompile.patterns.mla import LETTERS, Claim, MlaPlacement
from kdacompile.patterns.mla_masks import MaskRole

USUAL = ("BTHK", "BHTK", "BTHV", "BHTV", "BHTS", "BTHS", "BTHD", "BHTD")


def labels(value: Value, role: str, sizes: dict[str, int]) -> Iterator[str]:
    """Letters for the dimensions of ``value`` in ``role``: all that have more than one entry, and no others."""
    order = LETTERS[role]
    dims = [(i, size) for i, size in enumerate(value.shape) if size != 1]
    wanted = [letter for letter in order if sizes[letter] != 1]
    if len(dims) != len(wanted):
        return
    for letters in permutations(wanted):
        if all(sizes[letter] == size for letter, (_, size) in zip(letters, dims, strict=True)):
            text = ["."] * len(value.shape)
            for letter, (i, _) in zip(letters, dims, strict=True):
                text[i] = letter
            yield "".join(text)


def _oddity(letters: str) -> int:
    bare = letters.replace(".", "")
    usual = any("".join(letter for letter in order if letter in bare) == bare for order in USUAL)
    return 0 if usual or letters[0] == "B" else 1


def claims(
    tensors: dict[str, Value], output: Value, scores: Value, captured: dict[str, int], masks: MaskRole
) -> Iterator[Claim]:
    """Every assignment of letters the sizes allow; ``scores``: the softmax's input without sinks."""
    sizes = {**captured, "W": 0}
    options: list[list[MlaPlacement]] = []
    for role, value in tensors.items():
        if role == "mask":
            continue
        if role in ("w", "w_k", "w_v"):
            sizes["W"] = math.prod(value.shape) // sizes["R"]
        options.append([MlaPlacement(role, value, text) for text in labels(value, role, sizes)])
    outputs = [MlaPlacement("o", output, text) for text in labels(output, "o", sizes)]
    layouts = [text for text in labels(scores, "mask", sizes) if len(text) == len(scores.shape)]
    both = "w" in tensors
    choices = product(*options, outputs, layouts)
    ordered = sorted(islice(choices, 4096), key=lambda choice: sum(map(_oddity_of, choice)))
    for rope_first, values_first in product((False, True), (False, True) if both else (False,)):
        if rope_first and (not captured["D"] or "q_rope" in tensors):
            continue
        for choice in ordered:
            *inputs, out, layout = choice
            placed = {item.role: item for item in inputs if isinstance(item, MlaPlacement)}
            claim = _claim(placed, out, layout, captured, masks)
            if claim is not None:
                yield claim.with_(rope_first=rope_first, values_first=values_first)


def _oddity_of(item: MlaPlacement | str) -> int:
    return _oddity(item if isinstance(item, str) else item.letters)


def _claim(
    placed: dict[str, MlaPlacement],
    out: MlaPlacement | str,
    layout: MlaPlacement | str,
    sizes: dict[str, int],
    masks: MaskRole,
) -> Claim | None:
    assert isinstance(out, MlaPlacement) and isinstance(layout, str)
    causal = masks.causal_in(layout, sizes)
    if causal is None:
        return None
    if masks.value is not None:
        letters = masks.letters(layout)
        if letters is None:
            return None
        placed = {**placed, "mask": MlaPlacement("mask", masks.value, letters)}
    claim = Claim(placed, out, sizes, layout)
    return claim.with_(causal=causal, mask_keeps=masks.keeps, mask_fill=masks.fill)
