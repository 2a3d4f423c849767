"""The ATen operators that recognition knows, one line each: what kind it is, what it reads besides numbers, what it
means, whether a region may hold it.

What a region may hold is analytic (sums, products, exponentials) or moves data by fixed indices. Operators with a
threshold on data (clamp, max, compare, rounding) are ``outside``, and selections are part of a region only with a mask
that is the same on every call (``regions.is_soft``). A region that holds anything else declines, unless a rule under
``patterns/recurrence/absorb`` consumes it.

``linear`` says how the result depends on the operands: "all" on all of them together (a sum, or elements of each),
"each" on each of them while the others are held (a product), "first" on the first alone, "" in no such way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdacompile.patterns.engine import meanings as m
from kdacompile.patterns.engine.meanings import Rule


@dataclass(frozen=True)
class Trait:
    """What one operator is."""

    kind: str
    """layout (keeps every element), pick (takes some), place (puts tensors side by side or into a larger one), select
    (keeps some and replaces the others), make (needs no data), product, scan, solve, pointwise, reduction, softmax or
    random."""
    meaning: Rule | None = None
    """Over a prime field; None where the operator only moves elements, which is the same for any numbers."""
    linear: str = "all"
    raw: tuple[int, ...] = ()
    """Arguments that are masks or indices."""
    exponent: int | None = None
    """The argument that stands in an exponent."""
    layout: str = ""
    """Of what keeps every element: "as is", "regroup" (the order they are counted in stays), "turn" (dimensions change
    places), "expand" or "cast"."""
    adds: bool = False
    """Elements that are placed are added up: where several go to one place, or to what is there already."""
    outside: bool = False
    """No region of linear attention holds it."""
    attention: bool = False
    """One of latent attention does all the same."""
    steps: bool = False
    """Constant between thresholds, so that probes can miss what it does: no rule consumes it either."""


def _each(names: str, trait: Trait) -> dict[str, Trait]:
    return dict.fromkeys(names.split(), trait)


_ACTIVATION = Trait("pointwise", linear="", outside=True)

TRAITS: dict[str, Trait] = {
    # elements as they are, or cast
    **_each("alias detach clone contiguous lift_fresh", Trait("layout", layout="as is")),
    **_each("view _unsafe_view _reshape_alias unsqueeze squeeze", Trait("layout", layout="regroup")),
    **_each("permute transpose t", Trait("layout", layout="turn")),
    "expand": Trait("layout", layout="expand"),
    "_to_copy": Trait("layout", layout="cast"),
    # some elements of one tensor
    **_each("select slice split split_with_sizes unbind unfold diagonal flip", Trait("pick")),
    "index": Trait("pick", raw=(1,)),
    **_each("index_select gather", Trait("pick", raw=(2,))),
    # tensors side by side, or in a larger one
    **_each("select_scatter slice_scatter diagonal_scatter cat stack repeat diag_embed", Trait("place")),
    "constant_pad_nd": Trait("place", m.constant_pad_nd),
    "index_copy": Trait("place", raw=(2,)),
    "index_put": Trait("place", raw=(1,), adds=True),
    "scatter": Trait("place", m.scatter, raw=(2,)),
    **_each("index_add scatter_add", Trait("place", raw=(2,), adds=True)),
    # no data
    **_each(
        "zeros ones full empty eye arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
        "new_empty scalar_tensor linspace tril_indices triu_indices new_empty_strided empty_strided",
        Trait("make"),
    ),
    # some elements, and others in place of the rest
    "where": Trait("select", m.where, raw=(0,)),
    "masked_fill": Trait("select", m.masked_fill, raw=(1,)),
    "tril": Trait("select", m.tril),
    "triu": Trait("select", m.triu),
    # products of matrices and vectors
    **_each("bmm mm mv dot vdot", Trait("product", m.matmul, "each")),
    **_each("baddbmm addmm addmv", Trait("product", m.addmm, "added")),
    # along one dimension
    "cumsum": Trait("scan", m.cumsum),
    "cumprod": Trait("scan", m.cumprod, ""),
    "sum": Trait("reduction", m.sum_),
    "prod": Trait("reduction", m.prod, ""),
    # systems of equations: linear in the right-hand side
    "linalg_solve_triangular": Trait("solve", m.solve_triangular, "last"),
    "_linalg_solve_ex": Trait("solve", m.solve_ex, "last"),
    "linalg_inv_ex": Trait("solve", m.inv_ex, ""),
    "linalg_lu_factor_ex": Trait("solve", m.lu_factor_ex, ""),
    "linalg_lu_solve": Trait("solve", m.lu_solve, "last"),
    "linalg_lu": Trait("solve", None, ""),
    # element by element
    "add": Trait("pointwise", m.add),
    "sub": Trait("pointwise", m.sub),
    "rsub": Trait("pointwise", m.rsub),
    "neg": Trait("pointwise", m.neg),
    "mul": Trait("pointwise", m.mul, "each"),
    "div": Trait("pointwise", m.div, "first"),
    "reciprocal": Trait("pointwise", m.reciprocal, ""),
    "pow": Trait("pointwise", m.pow_, ""),
    "square": Trait("pointwise", m.square, ""),
    "exp": Trait("pointwise", m.exponential, "", exponent=0),
    "exp2": Trait("pointwise", m.exponential2, "", exponent=0),
    "addcmul": Trait("pointwise", m.addcmul, "added"),
    "addcdiv": Trait("pointwise", m.addcdiv, "added"),
    "lerp": Trait("pointwise", m.lerp, "blend"),
    **_each("log log1p sqrt rsqrt tanh sigmoid silu softplus log_sigmoid_forward logaddexp", _ACTIVATION),
    **_each("relu abs maximum minimum clamp clamp_min clamp_max gt lt ge le", _ACTIVATION),
    **_each("round floor ceil trunc sign nan_to_num eq ne", replace(_ACTIVATION, steps=True)),
    # what weighs tokens against each other, and what no two calls have in common
    **_each("_softmax _safe_softmax", Trait("softmax", m.softmax, "", exponent=0, outside=True, attention=True)),
    "_log_softmax": Trait("reduction", m.log_softmax, "", outside=True, attention=True),
    "logsumexp": Trait("reduction", m.logsumexp, "", outside=True, attention=True),
    "amax": Trait("reduction", m.largest, "", outside=True, attention=True),
    "max": Trait("reduction", m.largest_and_where, "", outside=True, attention=True),
    **_each("mean amin min", Trait("reduction", linear="", outside=True)),
    **_each("native_dropout bernoulli rand_like rand dropout", Trait("random", linear="", outside=True)),
}


def of_kind(*kinds: str) -> frozenset[str]:
    """The names of the operators of some kinds."""
    return frozenset(name for name, trait in TRAITS.items() if trait.kind in kinds)


def laid_out(*ways: str) -> frozenset[str]:
    """The names of the operators that keep every element in some ways."""
    return frozenset(name for name, trait in TRAITS.items() if trait.layout in ways)
