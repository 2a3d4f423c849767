"""Numbers a region is run on in float64: what the roles could hold, edges and extremes among them.

Where a region has been compared over a prime field, ordinary numbers are enough: they show that it is finite. Where it
has not, all kinds are run, those among them that see far: gates and write gates of order 1 / T, with which nothing is
forgotten, and values of all sizes along T.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.recurrence.roles import Recurrence

SCALES = {"huge": 2.0**40, "tiny": 2.0**-40}
"""What v and the state, or queries alone, are multiplied with: outputs are too, be the factor as far off as this."""

KINDS = (
    "ordinary", "strong", "edges", "dense", "graded", "long keys", "huge", "tiny", "huge queries", "tiny queries",
    "scaled keys", "later",
)  # fmt: skip
"""Ordinary; strong gates; gates of 0 and -inf with zero keys and open or closed beta; gates and beta of order 1 / T; v
of all sizes; keys that are not of unit length; v and the state, or queries, of another size; keys of sizes from 2 ** -5
to 2 ** 5, with beta divided by the square and v multiplied (delta) or v divided, which leaves the state as it is; v of
nothing in the first half and larger than anything in the second, of which the first outputs show what they see."""

LATER = 2.0**960


def probes(binding: Recurrence, sizes: dict[str, int], kinds: Sequence[str]) -> Iterator[dict[Value, Tensor]]:
    """Region inputs of each kind."""
    for seed, kind in enumerate(kinds):
        generator = torch.Generator().manual_seed(100 + seed)
        draw = {p.role: _draw(p, binding, sizes, kind, generator) for p in binding.inputs.values()}
        yield {p.value: p.from_canonical(draw[p.role]) for p in binding.inputs.values()}


def _draw(
    placement: Placement, binding: Recurrence, sizes: dict[str, int], kind: str, generator: torch.Generator
) -> Tensor:
    role = placement.role
    order = placement.order.replace("NR", "T")
    axes = placement.axes + ("T" if "R" in placement.axes else "")
    shape = [sizes[axis] if axis in axes else 1 for axis in order]
    full = [sizes[axis] for axis in placement.order]
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    pick = torch.rand(shape, generator=generator, dtype=torch.float64)
    if role == "rate" or (role == "g" and binding.inputs.get("rate")):
        step = pick / sizes["T"] if kind == "dense" else 0.2 * noise.exp()
        noise = -noise.exp() / binding.gate_rate if role == "rate" else step
    elif role == "g":
        gate = -noise.exp() * 0.2
        if kind == "dense":
            gate = torch.where(pick < 0.2, 0.0, -pick / sizes["T"])
        if kind == "strong":
            gate = torch.where(pick < 0.2, torch.where(pick < 0.03, -1000.0, -20.0 * pick * 5), gate)
        elif kind == "edges":
            gate = torch.where(pick < 0.2, 0.0, torch.where(pick > 0.97, -torch.inf, gate))
        noise = gate / binding.gate_rate if binding.gate_fn == "log" else gate.exp()
    elif role == "beta":
        noise = pick / sizes["T"] if kind in ("dense", "long keys") else noise.sigmoid()
        if kind == "edges":
            noise = torch.where(pick < 0.2, 0.0, torch.where(pick > 0.8, 1.0, noise))
    elif role == "k":
        noise = noise / noise.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        if kind == "edges":
            noise = torch.where(pick[..., :1] < 0.1, 0.0, noise)
        elif kind == "long keys":
            noise = noise * (2.0 * pick[..., :1] - 1.0).exp2()
    elif kind == "graded" and role == "v":
        noise = noise * 10.0 ** (16.0 * pick[..., :1, :1] - 8.0)
    noise = noise * _factor(role, kind, binding, sizes)
    return (noise.unflatten(1, (-1, sizes["R"])) if "R" in placement.order else noise).expand(full)


def _factor(role: str, kind: str, binding: Recurrence, sizes: dict[str, int]) -> float | Tensor:
    """By what a kind of probe multiplies a role."""
    if role == "q" and kind.endswith(" queries"):
        return SCALES[kind.removesuffix(" queries")]
    if role in ("v", "initial_state") and kind in SCALES:
        return SCALES[kind]
    if kind == "later" and role == "initial_state":
        return 0.0
    if kind == "later" and role == "v":
        later = torch.arange(sizes["T"]) >= binding.tokens // 2 * binding.writes
        return (later.double() * LATER).view(1, -1, 1, 1)
    if kind != "scaled keys" or (binding.delta and "beta" not in binding.inputs):
        return 1.0
    keys = (2.0 ** (torch.arange(sizes["T"]) * 7 % 11 - 5)).double().view(1, -1, 1, 1)
    if role == "beta":
        return keys[..., 0] ** -2.0 if binding.delta else 1.0
    factors = {"k": keys, "v": keys if binding.delta else 1.0 / keys}
    return factors.get(role, 1.0)
