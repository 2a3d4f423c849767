"""The proof of MLA: a region is believed only if it computes the oracle's numbers in float64.

Where it has been compared over a prime field, ordinary scores are enough; where the field is silent, inputs cover masks
that hide most of the cache, and scores so far apart that one token takes it all. No value of the user's model is ever
used. Batch and heads are cut down where the region treats them alike, and so are tokens where there are many: constant
masks have been read whole before, and no other constant has tokens. Of what random probes could miss, numbers that a
mask adds have been read before as well, and operators with a threshold on data are part of no region.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.evaluate import PRECISE, TOLERANCE, Region, one_thread, token_error
from kdacompile.patterns.engine.exact import Drawn, Evaluation
from kdacompile.patterns.engine.field import P, R, Silent, inverse, random
from kdacompile.patterns.engine.match import Verdict
from kdacompile.patterns.engine.meanings import Residues
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import CannotReduce, EvaluationError, Factors
from kdacompile.patterns.mla import exact
from kdacompile.patterns.mla.bindings import MERGED
from kdacompile.patterns.mla.definition import (
    MASKS,
    WEIGHTS,
    Hiding,
    LatentAttention,
    LatentCandidate,
    place,
)
from kdacompile.patterns.mla.oracle import latent_attention

LARGEST = 1 << 27
"""Entries of scores, or of keys, up to which a region is still run."""

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, q_rope, latent, k_rope, w_uk and w_uv, as the oracle takes them."""

MANY = 64
"""Tokens of a cache of more that are run; of queries half as many, or as many if they are as many as the tokens. Every
operator has been seen to treat them alike (``engine/reduced.py``): more of them would show nothing else.
"""

LARGE = 1e8
"""Far above the scores of the first probe."""

KINDS = ("ordinary", "hidden", "peaked")


def prove(candidate: LatentCandidate, *, wide: bool = False) -> Verdict[LatentAttention]:
    """The first binding that holds, with the scale that its scores have."""
    best, reason = float("inf"), ""
    differs: Verdict[LatentAttention] | None = None
    for binding in candidate.bindings:
        deadline.check()
        try:
            with one_thread():
                prover = _Prover(candidate, binding)
                error = prover.first()
                found = prover.exactly() if error <= TOLERANCE else ""
                if error <= TOLERANCE and (wide or isinstance(found, str)):
                    error = max(error, prover.others(KINDS * (3 if wide else 1)))
        except EvaluationError as failure:
            reason = reason or f"the region does not run on probes: {failure}"
            continue
        except TooLarge as failure:
            return Verdict(None, best, str(failure))
        if found is False:
            differs = differs or Verdict(None, error, DIFFERS, code="field")
            continue
        if error <= (TOLERANCE if found is True else PRECISE):
            return Verdict(binding.with_(scale=prover.scale), error, silent="" if found is True else found)
        best = min(best, error)
        reason = f"the region does not compute attention over a latent (relative error {best:.1e})"
    return differs or Verdict(None, best, reason)


DIFFERS = "the region and attention over a latent are different functions: over a prime field their numbers differ"


class TooLarge(Exception):
    """The region cannot be run here, even with batch and heads cut down."""


class _Prover:
    """Probes one binding."""

    def __init__(self, candidate: LatentCandidate, binding: LatentAttention) -> None:
        self.candidate, self.binding = candidate, binding
        tokens = frozenset((binding.sizes["T"], binding.sizes["S"])) - {1}
        self.region = Region(list(candidate.ops), candidate.cut, candidate.outputs, tails=tokens)
        self.sizes = dict(binding.sizes)
        self.scale = 0.0
        """Read off the first probe."""

    def first(self) -> float:
        """The error on ordinary numbers; infinite if the binding does not fit."""
        batch, heads = {"B": min(self.sizes["B"], 2)}, {"H": min(self.sizes["H"], 2)}
        if self.binding.stacked:
            heads = {}  # the weight's rows are not heads times what each has
        tokens, large = self.fewer_tokens(), False
        # Heads that share a key are merged with the batch where the key is copied for each.
        for cut_down in (batch | heads | tokens, batch | tokens, batch | heads, {}):
            sizes = {**self.binding.sizes, **cut_down}
            if sizes["B"] * sizes["H"] * sizes["S"] * max(sizes["T"], sizes["K"] + sizes["V"]) > LARGEST:
                large = True
                continue
            self.sizes = sizes
            try:
                return self.probe(0, KINDS[0])
            except CannotReduce:
                continue
        if large:
            raise TooLarge("the attention is too large to be run here, and its batch, heads or tokens are not alike")
        return float("inf")

    def others(self, kinds: Sequence[str]) -> float:
        """The largest error on the numbers of all kinds but the first: where a prime field does not decide."""
        worst = 0.0
        for seed, kind in list(enumerate(kinds))[1:]:
            worst = max(worst, self.probe(seed, kind))
            if worst > TOLERANCE:
                break
        return worst

    def fewer_tokens(self) -> dict[str, int]:
        """As many queries and tokens of the cache as still show what is causal; equal where the captured ones are."""
        tokens, cached, held = (self.binding.sizes[axis] for axis in "TSC")
        if held != cached or cached <= MANY:
            return {}
        queries = MANY if tokens == cached else min(tokens, MANY // 2)
        return {"T": queries, "S": MANY, "C": MANY}

    def probe(self, seed: int, kind: str) -> float:
        given = dict(self.draws(kind, torch.Generator().manual_seed(seed)))
        factors = {placement.value: self.factors(placement) for placement in self.inputs}
        for duplicate, value in self.candidate.duplicates.items():
            given[duplicate], factors[duplicate] = given[value], factors[value]
        output, scores, *lse = self.region([given[value] for value in self.candidate.cut], factors)
        roles = {p.role: self.canonical(p, given[p.value]) for p in self.inputs}
        if seed == 0:
            self.scale = self.fit(scores, roles)
            if not math.isfinite(self.scale) or self.scale == 0.0:
                return float("inf")
        want, total = self.reference(roles)
        have = self.binding.output.to_canonical(output)
        if have.shape != want.shape or not bool(have.isfinite().all()):
            return float("inf")
        if self.binding.final_state is None:
            return token_error(have, want)
        sums = self.binding.final_state.to_canonical(lse[0])
        alike = sums.shape == total.shape and bool(sums.isfinite().all())
        return max(token_error(have, want), token_error(sums.mT, total.mT)) if alike else float("inf")

    @property
    def inputs(self) -> list[Placement]:
        return list(self.binding.inputs.values())

    # ---- probes

    def factors(self, placement: Placement) -> tuple[Factors, ...]:
        """Captured and probed size of every dimension; a weight's rows are heads times what each has."""
        captured, sizes = self.binding.sizes, self.sizes
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
            elif placement.role == "factor":
                noise = noise.exp()
            elif placement.role in ("q", "q_rope") and kind == "peaked":
                noise *= 20.0
            yield placement.value, noise

    def mask(self, placement: Placement, shape: list[int], kind: str, generator: torch.Generator) -> Tensor:
        seen = torch.rand(shape, generator=generator) < (0.2 if kind == "hidden" else 0.7)
        if "S" in placement.axes:  # every query sees the first token at least
            seen = seen.movedim(placement.axes.index("S"), -1)
            seen[..., 0] = True
            seen = seen.movedim(-1, placement.axes.index("S"))
        if placement.value.dtype is torch.bool:
            keeps = next(mask.keeps for mask in self.binding.masks if mask.role == placement.role)
            return seen if keeps else ~seen
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(seen, noise, -torch.inf)

    # ---- over a prime field

    def exactly(self) -> bool | str:
        """Whether the region is the binding's attention, exactly; what stood in the way where that cannot be told."""
        try:
            return self.compare()
        except Silent as error:
            return str(error)

    def compare(self) -> bool | str:
        generator = torch.Generator().manual_seed(7)
        inputs: dict[Value, Drawn | Tensor] = dict(self.residues(generator))
        roles = {p.role: inputs[p.value] for p in self.inputs}
        inputs |= {duplicate: inputs[value] for duplicate, value in self.candidate.duplicates.items()}
        shapes = tuple(_shape(inputs[value]) for value in self.candidate.cut)
        lse = self.region.outputs[2:]
        evaluation = Evaluation(self.region.plans[shapes], inputs, self.region.outputs[:1], logarithms=lse)
        masks = [self.hidden(mask, roles[mask.role]) for mask in self.binding.masks]
        own = {
            modulus: {
                p.role: self.canonical(p, item)
                for p in self.inputs
                if p.role not in MASKS and not isinstance(drawn := roles[p.role], Tensor)
                for item in [_numbers(drawn[modulus])]
            }
            for modulus in (P, R)
        }
        want, total = exact.latent_attention(
            {modulus: self.operands(given, modulus) for modulus, given in own.items()},
            masks,
            own[R].get("sinks"),
            evaluation.fields[R],
            scale=self.scale,
            causal=self.binding.causal,
        )
        have = self.binding.output.to_canonical(evaluation()[0])
        equal = torch.equal(have, want)
        if self.binding.final_state is not None:
            equal &= torch.equal(self.binding.final_state.to_canonical(evaluation.logarithm(lse[0])), total)
        return equal or evaluation.numbers.excuse() or False

    def residues(self, generator: torch.Generator) -> Iterator[tuple[Value, Drawn | Tensor]]:
        for placement in self.inputs:
            shape = [math.prod(part for _, part in dim) for dim in self.factors(placement)]
            drawn = {modulus: random(shape, modulus, generator) for modulus in (P, R)}
            if "=" in placement.axes:
                same = placement.axes.index("=")
                drawn = {modulus: data.narrow(same, 0, 1).expand(shape) for modulus, data in drawn.items()}
            if placement.role not in MASKS:
                yield placement.value, drawn
                continue
            mask = self.mask(placement, shape, "ordinary", generator)
            if mask.dtype is torch.bool:
                yield placement.value, mask
            else:
                yield placement.value, {R: Residues(drawn[R], mask == -math.inf)}

    def hidden(self, mask: Hiding, drawn: Drawn | Tensor) -> Residues:
        """A mask as what it adds to the scores."""
        placement = self.binding.inputs[mask.role]
        if isinstance(drawn, Tensor):
            hides = placement.to_canonical(drawn) != mask.keeps
            return Residues(torch.zeros_like(hides, dtype=torch.int64), hides)
        numbers = drawn[R]
        assert isinstance(numbers, Residues) and numbers.gone is not None
        return Residues(placement.to_canonical(numbers.x), placement.to_canonical(numbers.gone))

    # ---- the binding's own numbers

    def canonical(self, placement: Placement, tensor: Tensor) -> Tensor:
        tensor = placement.to_canonical(tensor)
        return tensor[:, : self.sizes["S"]] if placement.role in ("latent", "k_rope", "cache") else tensor

    def fit(self, scores: Tensor, roles: dict[str, Tensor]) -> float:
        """The factor on the scores: least squares over those that no mask hides."""
        q, q_rope, latent, k_rope, w_uk, _ = self.operands(roles)
        keys = latent.unsqueeze(1) if w_uk is None else torch.einsum("hnr,bsr->bhsn", w_uk, latent)
        products = torch.einsum("bthn,bhsn->bhts", q, keys.expand(-1, q.shape[2], -1, -1))
        if q_rope is not None and k_rope is not None:
            products = products + torch.einsum("bthd,bsd->bhts", q_rope, k_rope)
        layout = self.binding.scores
        if layout in MERGED:
            dim, apart = MERGED[layout]
            scores, layout = scores.unflatten(dim, [self.sizes[axis] for axis in apart[dim : dim + 2]]), apart
        have = place("mask", self.candidate.outputs[1], layout).to_canonical(scores)
        if have.shape != products.shape:
            return math.nan
        for role in MASKS:
            if role in roles and roles[role].is_floating_point():
                have = have - roles[role]
        plain = have.abs() < LARGE  # scores of the first probe are small, whatever they are added to
        if not bool(plain.any()):
            return math.nan
        x, y = products[plain], have[plain]
        return _tidy(float((x * y).sum() / (x * x).sum()))

    def operands(self, roles: dict[str, Tensor], modulus: int = 0) -> Operands:
        """What the oracle takes, of numbers in float64 or of residues; a factor on the scores is one on the queries."""
        binding = self.binding.with_(sizes={**self.binding.sizes, **self.sizes})
        per_head = lambda w: w if w.dim() == 3 else w.unflatten(0, (self.sizes["H"], -1))  # noqa: E731
        q, q_rope, *_ = found = binding.operands(roles, _part, per_head)
        if "factor" not in roles:
            return found
        factor = roles["factor"]
        if binding.divides:
            factor = inverse(factor, modulus) if modulus else 1.0 / factor
        by = partial(_product, factor, modulus=modulus)
        return by(q), None if q_rope is None else by(q_rope), *found[2:]

    def reference(self, roles: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = self.added(roles) if self.binding.masks else None
        causal = self.binding.causal
        return latent_attention(*self.operands(roles), mask, roles.get("sinks"), scale=self.scale, causal=causal)

    def added(self, roles: dict[str, Tensor]) -> Tensor:
        """What all masks together add to the scores; every query sees a token, so that no finite number matters."""
        total = torch.zeros((), dtype=torch.float64)
        for mask in self.binding.masks:
            given = roles[mask.role]
            hides = given.dtype is torch.bool
            total = torch.where(given != mask.keeps, -math.inf, total) if hides else total + given
        return total


def _part(tensor: Tensor, dim: int, start: int | None, stop: int | None) -> Tensor:
    """``tensor[start:stop]`` along a dimension."""
    index = slice(start, stop)
    return tensor[..., index] if dim < 0 else tensor[(slice(None),) * dim + (index,)]


def _product(factor: Tensor, x: Tensor, *, modulus: int) -> Tensor:
    return x * factor % modulus if modulus else x * factor


def _tidy(scale: float) -> float:
    """The intended number behind a fitted one: one over the root of a width, or what was fitted."""
    if not math.isfinite(scale) or not 0 < scale < 1:
        return scale
    nice = round(scale**-2) ** -0.5
    return nice if abs(scale - nice) < PRECISE * nice else scale


def _numbers(drawn: Tensor | Residues) -> Tensor:
    return drawn if isinstance(drawn, Tensor) else drawn.x


def _shape(drawn: Drawn | Tensor) -> torch.Size:
    return drawn.shape if isinstance(drawn, Tensor) else _numbers(drawn[R]).shape
