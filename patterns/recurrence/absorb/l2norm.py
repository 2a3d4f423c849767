"""L2 norm of queries and keys.

    x * rsqrt(sum(x * x) + eps)                         absorbed: qk_l2norm_eps, if q and k both are, with one eps

summed over K. Any spelling that computes it counts (division by a square root, ``pow(2)``, a mean over K with eps to
match). ``F.normalize`` clamps the norm and ``x / (norm + eps)`` adds eps outside the root: neither is this function.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.values import number
from kdacompile.patterns.recurrence.absorb.axes import SAME_DATA
from kdacompile.patterns.recurrence.absorb.cone import Cone, Runner, agrees, cones, holds_for
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch

NAMES = SAME_DATA | frozenset("mul div add sum mean pow square sqrt rsqrt reciprocal linalg_vector_norm".split())
ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
LARGEST_EPS = 1e-2


def absorb_l2norm(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    if match.binding.qk_l2norm_eps:
        return None
    q, k = (_normalised(match.inputs[role], scope, match.sizes) for role in ("q", "k"))
    if q is None or k is None or q[1] != k[1]:
        return None
    return match.taking("l2norm", {"q": q[0], "k": k[0]}, qk_l2norm_eps=q[1])


def _normalised(placement: Placement, scope: Scope, sizes: dict[str, int]) -> tuple[Placement, float] | None:
    """The tensor that ``placement`` is the l2norm of, and eps."""
    if "K" not in placement.axes:
        return None
    for cone in cones(placement, scope, sizes, NAMES):
        eps = _eps(cone, sizes)
        if eps is not None:
            return cone.sources[0], eps
    return None


def _eps(cone: Cone, sizes: dict[str, int]) -> float | None:
    """The eps with which the cone is the l2norm, if it is."""
    if not cone.names & ROOTS:
        return None
    added = [number(arg) for op in cone.ops if op.name == "add" for arg in op.args[:2]]
    constants = [constant for constant in added if constant is not None]
    if len(constants) != 1 or not 0.0 < constants[0] <= LARGEST_EPS:
        return None
    runner = Runner(cone, sizes, at_most={"B": 2, "T": 3, "G": 2})
    for eps in (constants[0], constants[0] * sizes["K"]):
        if holds_for(runner, partial(_is_l2norm, eps=eps)):
            return eps
    return None


def _is_l2norm(run: Runner, eps: float) -> bool:
    return all(agrees(run(x), l2norm(x, eps), absolute=1e-15) for x in probes(run.shape(0), eps))


def l2norm(x: Tensor, eps: float) -> Tensor:
    """The definition."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def probes(shape: list[int], eps: float) -> list[Tensor]:
    """Ordinary vectors, zeros among others, and vectors whose square is far below, about and above eps."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    holes = noise * (torch.rand([*shape[:-1], 1], generator=generator, dtype=torch.float64) > 0.5)
    unit = (eps / shape[-1]) ** 0.5
    return [
        noise,
        holes,
        torch.zeros_like(noise),
        *(noise * unit * size for size in (1e-3, 0.3, 1.0, 30.0)),
        noise * 1e4,
    ]
