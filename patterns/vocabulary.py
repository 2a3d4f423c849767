"""Which ATen operators a linear-attention region may consist of, by what they do.

Everything here is analytic (sums, products, exponentials) or moves data by fixed indices, so random probes decide
equality. Operators with a threshold on data (where, clamp, max, compare, rounding) are deliberately absent: a region that
holds one declines unless a rule under ``patterns/absorb`` consumes it.
"""

from __future__ import annotations

VIEWS = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t unsqueeze squeeze expand alias detach select slice "
    "split split_with_sizes unbind diagonal lift_fresh".split()
)
"""Operators that only rearrange or pick elements of one tensor."""

LAYOUT = frozenset(
    "view _unsafe_view _reshape_alias permute transpose t unsqueeze squeeze expand alias detach clone contiguous "
    "_to_copy lift_fresh".split()
)
"""Operators that keep every element: rearrangements, copies and casts."""

PLACING = frozenset("select_scatter slice_scatter diagonal_scatter cat stack index_put constant_pad_nd".split())
"""Operators that put tensors side by side or into a larger one."""

MAKERS = frozenset(
    "zeros ones full empty eye arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty "
    "scalar_tensor linspace tril_indices triu_indices new_empty_strided empty_strided".split()
)
"""Operators that make tensors from sizes and numbers."""

ARITHMETIC = frozenset(
    "add sub rsub mul div neg exp exp2 sum cumsum bmm baddbmm mm addmm reciprocal pow tril triu flip index index_select repeat "
    "linalg_solve_triangular linalg_inv_ex where masked_fill roll mv dot addcmul _conj mean square logical_not log dist".split()
) - {"dist", "_conj", "roll", "mv", "dot", "mean", "log"}
"""Sums, products, exponentials, triangular solves and selections by a fixed mask."""

REGION = VIEWS | LAYOUT | PLACING | MAKERS | ARITHMETIC

CONTRACTIONS = frozenset({"bmm", "baddbmm", "mm", "addmm"})
SCANS = frozenset({"cumsum"})
SOLVES = frozenset({"linalg_solve_triangular", "linalg_inv_ex"})

UPSTREAM = frozenset(
    "rsqrt sqrt sigmoid softplus log_sigmoid_forward silu gt lt ge le log1p log linalg_vector_norm".split()
)
"""What the rules of ``patterns/absorb`` additionally understand, each in its own way."""

FLOAT_MASKS = frozenset({"masked_fill", "where"})
"""Selections whose condition must be the same on every call."""
