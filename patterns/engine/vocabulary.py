"""Sets of ATen operators by what they do, read off the table of operators (``traits.py``)."""

from __future__ import annotations

import torch

from kdacompile.patterns.engine.traits import TRAITS, of_kind

LAYOUT = of_kind("layout")
"""Operators that keep every element: rearrangements, copies and casts."""

ORDERED = frozenset(name for name, trait in TRAITS.items() if trait.ordered)
"""Operators that keep every element as it is, and the order they are counted in."""

INDEXED = frozenset("index index_select gather index_put index_copy index_add scatter scatter_add".split())
"""Operators that pick or place by index tensors."""

PICKING = of_kind("pick")
"""Operators that take elements of one tensor by fixed indices."""

PLACING = of_kind("place")
"""Operators that put tensors side by side or into a larger one."""

MAKERS = of_kind("make")
"""Operators that make tensors from sizes and numbers."""

SELECTIONS = of_kind("select")
"""Operators that keep some elements and replace the others."""

CONTRACTIONS = of_kind("product")
SCANS = of_kind("scan")
SOLVES = of_kind("solve")
SOFTMAXES = of_kind("softmax")
RANDOM = of_kind("random")

ELEMENTWISE = of_kind("pointwise") | {"where"}
"""Operators that make each element of those at its place, or at the only place along a dimension."""

REDUCTIONS = frozenset("sum prod mean amax amin max min logsumexp _softmax _log_softmax _safe_softmax".split())
"""Operators whose results hang on all elements along a dimension."""

REGION = frozenset(name for name, trait in TRAITS.items() if not trait.outside)
"""What a region of linear attention may consist of."""


def is_float8(dtype: torch.dtype) -> bool:
    """8-bit floating point: no operand of an op, and torch knows no dtype that it and another promote to."""
    return dtype.is_floating_point and dtype.itemsize == 1
