"""Which ATen operators a linear-attention region may consist of, by what they do.

Everything here is analytic (sums, products, exponentials) or moves data by fixed indices, so random probes decide
equality. Operators with a threshold on data (where, clamp, max, compare, rounding) are deliberately absent, and
selections pass ``regions.is_soft`` only with a mask that is the same on every call. A region that holds anything else
declines, unless a rule under ``patterns/absorb`` consumes it.
"""

from __future__ import annotations

import torch

LAYOUT = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t unsqueeze squeeze expand alias detach clone contiguous "
    "_to_copy lift_fresh".split()
)
"""Operators that keep every element: rearrangements, copies and casts."""

ORDERED = frozenset("view _unsafe_view _reshape_alias unsqueeze squeeze alias detach clone contiguous".split())
"""Operators that keep every element as it is, and the order they are counted in."""

INDEXED = frozenset("index index_select gather index_put index_copy index_add scatter scatter_add".split())
"""Operators that pick or place by index tensors."""

PICKING = frozenset("select slice split split_with_sizes unbind unfold diagonal flip index index_select gather".split())
"""Operators that take elements of one tensor by fixed indices."""

PLACING = frozenset(
    "select_scatter slice_scatter diagonal_scatter cat stack index_put index_copy index_add scatter scatter_add "
    "constant_pad_nd repeat diag_embed".split()
)
"""Operators that put tensors side by side or into a larger one."""

MAKERS = frozenset(
    "zeros ones full empty eye arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "scalar_tensor linspace tril_indices triu_indices new_empty_strided empty_strided".split()
)
"""Operators that make tensors from sizes and numbers."""

SELECTIONS = frozenset("where masked_fill tril triu".split())
"""Operators that keep some elements and replace the others."""

CONTRACTIONS = frozenset("bmm baddbmm mm addmm mv dot".split())
SCANS = frozenset("cumsum cumprod".split())
SOLVES = frozenset(
    "linalg_solve_triangular _linalg_solve_ex linalg_inv_ex linalg_lu_factor_ex linalg_lu_solve linalg_lu".split()
)
POINTWISE = frozenset("add sub rsub mul div neg exp exp2 reciprocal pow square addcmul addcdiv lerp".split())

REGION = (
    LAYOUT
    | PICKING
    | PLACING
    | MAKERS
    | SELECTIONS
    | CONTRACTIONS
    | SCANS
    | SOLVES
    | POINTWISE
    | frozenset({"sum", "prod"})
)


def is_float8(dtype: torch.dtype) -> bool:
    """8-bit floating point: no operand of an op, and torch knows no dtype that it and another promote to."""
    return dtype.is_floating_point and dtype.itemsize == 1
