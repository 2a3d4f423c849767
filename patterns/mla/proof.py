"""The proof of MLA: a region is believed only if it computes the oracle's numbers in float64.

Inputs cover ordinary scores, masks that hide most of the cache, and scores so far apart that one token takes it all; no
value of the user's model is ever used. Batch and heads are cut down where the region treats them alike, and so are
tokens where there are many: constant masks have been read whole before, and no other constant has tokens. What random
probes could miss (numbers a mask adds, operators with thresholds) ``patterns`` has read or turned away before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.evaluate import EvaluationError, Region
from kdacompile.patterns.engine.lanes import Factors, LaneError
from kdacompile.patterns.engine.verdicts import structural_hash
from kdacompile.patterns.mla.claims import MERGED
from kdacompile.patterns.mla.definition import MASKS, VANISHING, WEIGHTS, Claim, MlaCandidate, MlaPlacement
from kdacompile.patterns.mla.oracle import latent_attention
from kdacompile.patterns.recurrence.proof import TOLERANCE, one_thread, token_error

LARGEST = 1 << 27
"""Entries of scores, or of keys, up to which a region is still run."""

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, q_rope, latent, k_rope, w_uk and w_uv, as the oracle takes them."""

MANY = 256
"""Tokens of a cache of more that are run; of queries half as many, or as many if they are as many as the tokens."""

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
        shapes = tuple(str(claim.form()) for claim in candidate.claims)
        same = tuple(
            (candidate.cut.index(one), candidate.cut.index(other)) for one, other in candidate.duplicates.items()
        )
        key = structural_hash(candidate), shapes, same, wide
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
            reason = reason or f"the region does not run on probes: {failure}"
            continue
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
        tokens = frozenset((claim.sizes["T"], claim.sizes["S"])) - {1}
        self.region = Region(list(candidate.ops), candidate.cut, candidate.outputs, tails=tokens)
        self.sizes = dict(claim.sizes)

    def run(self, *, wide: bool) -> tuple[float, float]:
        """The scale read off the first probe, and the largest error of any; infinite if the claim does not fit."""
        batch, heads = {"B": min(self.sizes["B"], 2)}, {"H": min(self.sizes["H"], 2)}
        if self.claim.stacked:
            heads = {}  # the weight's rows are not heads times what each has
        tokens, large = self.fewer_tokens(), False
        # Heads that share a key are merged with the batch where the key is copied for each.
        for cut_down in (batch | heads | tokens, batch | tokens, batch | heads, {}):
            sizes = {**self.claim.sizes, **cut_down}
            if sizes["B"] * sizes["H"] * sizes["S"] * max(sizes["T"], sizes["K"] + sizes["V"]) > LARGEST:
                large = True
                continue
            self.sizes = sizes
            try:
                return self.probe(wide=wide)
            except LaneError:
                continue
        if large:
            raise TooLarge("the attention is too large to be run here, and its batch, heads or tokens are not alike")
        return 0.0, float("inf")

    def fewer_tokens(self) -> dict[str, int]:
        """As many queries and tokens of the cache as still show what is causal; equal where the captured ones are."""
        tokens, cached, held = (self.claim.sizes[axis] for axis in "TSC")
        if held != cached or cached <= MANY:
            return {}
        queries = MANY if tokens == cached else min(tokens, MANY // 2)
        return {"T": queries, "S": MANY, "C": MANY}

    def probe(self, *, wide: bool) -> tuple[float, float]:
        scale, worst = 0.0, 0.0
        for seed, kind in enumerate(KINDS * (3 if wide else 1)):
            given = dict(self.draws(kind, torch.Generator().manual_seed(seed)))
            factors = {placement.value: self.factors(placement) for placement in self.inputs}
            for duplicate, value in self.candidate.duplicates.items():
                given[duplicate], factors[duplicate] = given[value], factors[value]
            output, scores = self.region([given[value] for value in self.candidate.cut], factors)
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
        for axis, size in zip(placement.axes, placement.value.shape, strict=True):
            if axis == "W":
                each = size // captured["H"]
                dims.append(((captured["H"], sizes["H"]), (each, each)))
            elif axis == "Y":
                dims.append(((size, size),))
            else:
                dims.append(((size, 1 if axis == "." else sizes["H" if axis == "=" else axis]),))
        return tuple(dims)

    def draws(self, kind: str, generator: torch.Generator) -> Iterator[tuple[Value, Tensor]]:
        for placement in self.inputs:
            shape = [math.prod(part for _, part in dim) for dim in self.factors(placement)]
            if placement.role in MASKS:
                yield placement.value, self.mask(placement, shape, kind, generator)
                continue
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            if "=" in placement.axes:
                noise = noise.narrow(placement.axes.index("="), 0, 1).expand(shape)
            if placement.role in WEIGHTS:
                noise *= self.sizes["R"] ** -0.5
            elif placement.role in ("q", "q_rope") and kind == "peaked":
                noise *= 20.0
            yield placement.value, noise

    def mask(self, placement: MlaPlacement, shape: list[int], kind: str, generator: torch.Generator) -> Tensor:
        seen = torch.rand(shape, generator=generator) < (0.2 if kind == "hidden" else 0.7)
        if "S" in placement.axes:  # every query sees the first token at least
            seen = seen.movedim(placement.axes.index("S"), -1)
            seen[..., 0] = True
            seen = seen.movedim(-1, placement.axes.index("S"))
        if placement.value.dtype is torch.bool:
            keeps = next(mask.keeps for mask in self.claim.masks if mask.role == placement.role)
            return seen if keeps else ~seen
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(seen, noise, -torch.inf)

    # ---- the claim's own numbers

    def canonical(self, placement: MlaPlacement, tensor: Tensor) -> Tensor:
        tensor = placement.to_canonical(tensor)
        return tensor[:, : self.sizes["S"]] if placement.role in ("latent", "k_rope", "cache") else tensor

    def fit(self, scores: Tensor, roles: dict[str, Tensor]) -> float:
        """The factor on the scores: least squares over those that no mask hides."""
        q, q_rope, latent, k_rope, w_uk, _ = self.operands(roles)
        keys = latent.unsqueeze(1) if w_uk is None else torch.einsum("hnr,bsr->bhsn", w_uk, latent)
        products = torch.einsum("bthn,bhsn->bhts", q, keys.expand(-1, q.shape[2], -1, -1))
        if q_rope is not None and k_rope is not None:
            products = products + torch.einsum("bthd,bsd->bhts", q_rope, k_rope)
        layout = self.claim.scores
        if layout in MERGED:
            dim, apart = MERGED[layout]
            scores, layout = scores.unflatten(dim, [self.sizes[axis] for axis in apart[dim : dim + 2]]), apart
        have = MlaPlacement("mask", self.candidate.scores, layout).to_canonical(scores)
        if have.shape != products.shape:
            return math.nan
        for role in MASKS:
            if role in roles and roles[role].is_floating_point():
                have = have - roles[role]
        plain = have.abs() < -VANISHING / 2  # scores of the first probe are small, whatever they are added to
        if not bool(plain.any()):
            return math.nan
        x, y = products[plain], have[plain]
        return _tidy(float((x * y).sum() / (x * x).sum()))

    def operands(self, roles: dict[str, Tensor]) -> Operands:
        claim = self.claim.with_(sizes={**self.claim.sizes, **self.sizes})
        q, q_rope = claim.split_queries(roles)
        latent, k_rope = claim.split_cache(roles)
        return q, q_rope, latent, None if q_rope is None else k_rope, *claim.split_weights(roles)

    def reference(self, roles: dict[str, Tensor], scale: float) -> Tensor:
        mask = self.added(roles) if self.claim.masks else None
        causal = self.claim.causal
        o, _ = latent_attention(*self.operands(roles), mask, roles.get("sinks"), scale=scale, causal=causal)
        return o

    def added(self, roles: dict[str, Tensor]) -> Tensor:
        """What all masks together add to the scores; every query sees a token, so that no finite number matters."""
        total = torch.zeros((), dtype=torch.float64)
        for mask in self.claim.masks:
            given = roles[mask.role]
            hides = given.dtype is torch.bool
            total = torch.where(given != mask.keeps, -math.inf, total) if hides else total + given
        return total


def _tidy(scale: float) -> float:
    """The intended number behind a fitted one: one over the root of a width, or what was fitted."""
    if not math.isfinite(scale) or not 0 < scale < 1:
        return scale
    nice = round(scale**-2) ** -0.5
    return nice if abs(scale - nice) < 1e-9 * nice else scale
