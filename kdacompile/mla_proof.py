"""The proof of MLA: a region is believed only if it computes the oracle's numbers in float64.

Inputs cover ordinary scores, masks that hide most of the cache, and scores so far apart that one token takes it all; no
value of the user's model is ever used. Batch and heads are cut down where the region treats them alike. What random
probes could miss (numbers a mask adds, operators with thresholds) ``patterns`` has read or turned away before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.patterns.attention_oracle import latent_attention
from kdacompile.patterns.evaluate import EvaluationError, Factors, LaneError, Region
from kdacompile.patterns.ir import Value
from kdacompile.patterns.mla import Claim, MlaCandidate, MlaPlacement
from kdacompile.proof import TOLERANCE, one_thread, token_error
from kdacompile.verdicts import structural_hash

LARGEST = 1 << 27
"""Entries of scores, or of keys, up to which a region is still run."""

KINDS = ("ordinary", "hidden", "peaked")


@dataclass(frozen=True)
class MlaVerdict:
    """A proven claim with the largest error met, or the reason why none was proven."""

    claim: Claim | None
    max_error: float
    reason: str = ""


class MlaVerdicts:
    """Verdicts of this process, by structure: the layers of a model share one."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], tuple[int, float, float, str]] = {}

    def __call__(self, candidate: MlaCandidate, *, wide: bool = False) -> MlaVerdict:
        shapes = tuple(str((sorted(claim.sizes.items()), claim.scores, claim.causal)) for claim in candidate.claims)
        key = structural_hash(candidate), shapes, wide
        if key not in self.known:
            self.known[key] = _prove(candidate, wide=wide)
        index, scale, error, reason = self.known[key]
        claim = candidate.claims[index].with_(scale=scale) if index >= 0 else None
        return MlaVerdict(claim, error, reason)


def _prove(candidate: MlaCandidate, *, wide: bool) -> tuple[int, float, float, str]:
    """Which claim holds (-1 for none), its scale, the largest error, and why none holds."""
    best, reason = float("inf"), ""
    for index, claim in enumerate(candidate.claims):
        try:
            with one_thread():
                scale, error = _Prover(candidate, claim).run(wide=wide)
        except EvaluationError as failure:
            return -1, 0.0, best, f"the region does not run on probes: {failure}"
        except TooLarge as failure:
            return -1, 0.0, best, str(failure)
        if error <= TOLERANCE:
            return index, scale, error, ""
        best = min(best, error)
        reason = f"the region does not compute attention over a latent (relative error {best:.1e})"
    return -1, 0.0, best, reason


class TooLarge(Exception):
    """The region cannot be run here, even with batch and heads cut down."""


class _Prover:
    """Probes one claim."""

    def __init__(self, candidate: MlaCandidate, claim: Claim) -> None:
        self.candidate, self.claim = candidate, claim
        self.region = Region(list(candidate.ops), candidate.cut, candidate.outputs)
        self.sizes = dict(claim.sizes)

    def run(self, *, wide: bool) -> tuple[float, float]:
        """The scale read off the first probe, and the largest error of any; infinite if the claim does not fit."""
        few = {"B": min(self.sizes["B"], 2), "H": min(self.sizes["H"], 2)}
        for cut_down in (few, {}):
            sizes = {**self.claim.sizes, **cut_down}
            if sizes["B"] * sizes["H"] * sizes["S"] * max(sizes["T"], sizes["K"] + sizes["V"]) > LARGEST:
                raise TooLarge("the attention is too large to be run here, and its batch and heads are not alike")
            self.sizes = sizes
            try:
                return self.probe(wide=wide)
            except LaneError:
                continue
        return 0.0, float("inf")

    def probe(self, *, wide: bool) -> tuple[float, float]:
        scale, worst = 0.0, 0.0
        for seed, kind in enumerate(KINDS * (3 if wide else 1)):
            given = dict(self.draws(kind, torch.Generator().manual_seed(seed)))
            output, scores = self.region(
                [given[value] for value in self.candidate.cut], {p.value: self.factors(p) for p in self.inputs}
            )
            roles = {p.role: self.canonical(p, given[p.value]) for p in self.inputs}
            if seed == 0:
                scale = self.fit(scores, roles)
                if not math.isfinite(scale) or scale == 0.0:
                    return 0.0, float("inf")
            want = self.reference(roles, scale)
            have = self.claim.output.to_canonical(output)
            if have.shape != want.shape or not bool(have.isfinite().all()):
                return scale, float("inf")
            worst = max(worst, token_error(have, want))
            if worst > TOLERANCE:
                break
        return scale, worst

    @property
    def inputs(self) -> list[MlaPlacement]:
        return list(self.claim.inputs.values())

    # ---- probes

    def factors(self, placement: MlaPlacement) -> tuple[Factors, ...]:
        """Captured and probed size of every dimension; a weight's rows are heads times what each has."""
        captured, sizes = self.claim.sizes, self.sizes
        dims: list[Factors] = []
        for letter, size in zip(placement.letters, placement.value.shape, strict=True):
            if letter == "W":
                each = size // captured["H"]
                dims.append(((captured["H"], sizes["H"]), (each, each)))
            else:
                dims.append(((size, 1 if letter == "." else sizes[letter]),))
        return tuple(dims)

    def draws(self, kind: str, generator: torch.Generator) -> Iterator[tuple[Value, Tensor]]:
        for placement in self.inputs:
            shape = [math.prod(part for _, part in dim) for dim in self.factors(placement)]
            if placement.role == "mask":
                yield placement.value, self.mask(placement, shape, kind, generator)
                continue
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            if placement.role in ("w", "w_k", "w_v"):
                noise *= self.sizes["R"] ** -0.5
            elif placement.role in ("q", "q_rope") and kind == "peaked":
                noise *= 20.0
            yield placement.value, noise

    def mask(self, placement: MlaPlacement, shape: list[int], kind: str, generator: torch.Generator) -> Tensor:
        seen = torch.rand(shape, generator=generator) < (0.2 if kind == "hidden" else 0.7)
        if "S" in placement.letters:  # every query sees the first token at least
            seen = seen.movedim(placement.letters.index("S"), -1)
            seen[..., 0] = True
            seen = seen.movedim(-1, placement.letters.index("S"))
        if placement.value.dtype is torch.bool:
            return seen if self.claim.mask_keeps else ~seen
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(seen, noise, -torch.inf)

    # ---- the claim's own numbers

    def canonical(self, placement: MlaPlacement, tensor: Tensor) -> Tensor:
        tensor = placement.to_canonical(tensor)
        return tensor[:, : self.sizes["S"]] if placement.role in ("latent", "k_rope") else tensor

    def fit(self, scores: Tensor, roles: dict[str, Tensor]) -> float:
        """The factor on the scores: least squares over those that no mask hides."""
        probed = {**self.claim.sizes, **self.sizes}
        q, q_rope, w_uk, _ = self.operands(roles)
        keys = torch.einsum("hnr,bsr->bhsn", w_uk, roles["latent"])
        products = torch.einsum("bthn,bhsn->bhts", q, keys)
        if q_rope is not None:
            products = products + torch.einsum("bthd,bsd->bhts", q_rope, roles["k_rope"])
        have = MlaPlacement("mask", self.candidate.scores, self.claim.scores).to_canonical(scores)
        if have.shape != products.shape:
            return math.nan
        if "mask" in roles and roles["mask"].is_floating_point():
            have = have - roles["mask"]
        plain = have.isfinite() & (have.abs() < 1e4)
        if not bool(plain.any()):
            return math.nan
        x, y = products[plain], have[plain]
        return _tidy(float((x * y).sum() / (x * x).sum()), probed["N"] + probed["D"])

    def operands(self, roles: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        claim = self.claim.with_(sizes={**self.claim.sizes, **self.sizes})
        return *claim.split_queries(roles), *claim.split_weights(roles)

    def reference(self, roles: dict[str, Tensor], scale: float) -> Tensor:
        q, q_rope, w_uk, w_uv = self.operands(roles)
        mask = roles.get("mask")
        if mask is not None and mask.dtype is torch.bool and not self.claim.mask_keeps:
            mask = ~mask
        k_rope = None if q_rope is None else roles["k_rope"]
        o, _ = latent_attention(
            q, q_rope, roles["latent"], k_rope, w_uk, w_uv, mask, roles.get("sinks"),
            scale=scale, causal=self.claim.causal,
        )  # fmt: skip
        return o


def _tidy(scale: float, width: int) -> float:
    """The intended number behind a fitted one: the root of the head's width, or what was fitted."""
    nice = width**-0.5
    return nice if abs(scale - nice) < 1e-9 * nice else scale
