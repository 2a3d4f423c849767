"""Sets of ATen operators by what they do, read off the table of operators (``traits.py``)."""

from __future__ import annotations

import torch

from kdacompile.patterns.engine.traits import TRAITS, laid_out, of_kind

LAYOUT = of_kind("layout")
"""Operators that keep every element: rearrangements, copies and casts."""

AS_IS, VIEWS, TURNS = laid_out("as is"), laid_out("regroup"), laid_out("turn")

ORDERED = AS_IS | VIEWS
"""Operators that keep every element as it is, and the order they are counted in."""

SPREAD = ORDERED | laid_out("expand")
"""Those, and what repeats elements."""

INDEXED = frozenset(name for name, trait in TRAITS.items() if trait.raw and trait.kind in ("pick", "place"))
"""Operators that pick or place by index tensors."""

ADDING = frozenset(name for name, trait in TRAITS.items() if trait.adds)
"""Those that may add what they place to what is there."""

PICKING = of_kind("pick")
"""Operators that take elements of one tensor by fixed indices."""

PLACING = of_kind("place")
"""Operators that put tensors side by side or into a larger one."""

DATA_MOVEMENT = LAYOUT | PICKING | PLACING
"""Operators that compute nothing: they lay out, cast, cut, join or put into a buffer."""

MAKERS = of_kind("make")
"""Operators that make tensors from sizes and numbers."""

SELECTIONS = of_kind("select")
"""Operators that keep some elements and replace the others."""

CONTRACTIONS = of_kind("product")

ADDED_PRODUCTS = frozenset(name for name in CONTRACTIONS if TRAITS[name].linear == "added")
"""Products that are added to their first operand."""

SCANS = of_kind("scan")
SOLVES = of_kind("solve")
SOFTMAXES = of_kind("softmax")
RANDOM = of_kind("random")

ELEMENTWISE = of_kind("pointwise") | {"where"}
"""Operators that make each element of those at its place, or at the only place along a dimension."""

REDUCTIONS = of_kind("reduction", "softmax")
"""Operators whose results hang on all elements along a dimension."""

REGION = frozenset(name for name, trait in TRAITS.items() if not trait.outside)
"""What a region of linear attention may consist of."""

ATTENTION = REGION | {name for name, trait in TRAITS.items() if trait.attention}
"""What a region of latent attention may consist of."""


def is_float8(dtype: torch.dtype) -> bool:
    """8-bit floating point: no operand of an op, and torch knows no dtype that it and another promote to."""
    return dtype.is_floating_point and dtype.itemsize == 1
