"""Layers that look like those in ``layers.py`` and compute something else, or something the op cannot have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mla.layers import HEADS, NOPE, RANK, ROPE, VALUE, Layer, frequencies, rotate_half


class Expanded(Layer):
    """Prefill over expanded keys and values; override one step at a time."""

    def rotated(self, k_pe: Tensor) -> Tensor:
        return k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def values(self, v: Tensor) -> Tensor:
        return v

    def forward(self, x: Tensor) -> Tensor:
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], self.rotated(k_pe)], dim=-1)
        weights = self.weights(self.queries(x).transpose(1, 2) @ k.mT * self.scale)
        return self.wo((weights @ self.values(kv[..., NOPE:]))[..., :VALUE].transpose(1, 2).flatten(2))


class SumWithSomething(Expanded):
    """A sum that can never be zero: weights that do not add up to one."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / (weights.sum(-1, keepdim=True) + 1e-3)


class OffByOne(Expanded):
    """``exp(s) / (1 + sum exp(s))``: a sink of zero that nobody wrote as one."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / (1.0 + weights.sum(-1, keepdim=True))


class SumOverQueries(Expanded):
    """Weights that add up to one per key."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / weights.sum(-2, keepdim=True)


class SumOfOthers(Expanded):
    """Divided by what another head's weights add up to."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True).flip(1)


class SumOfSquares(Expanded):
    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.exp()
        return weights / weights.square().sum(-1, keepdim=True).sqrt()


class AnotherLogSumExp(Expanded):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.exp(scores - torch.logsumexp(2 * scores, -1, keepdim=True))


class PowersOfTwo(Expanded):
    """A softmax to another base, whose scale is not that of the scores."""

    def weights(self, scores: Tensor) -> Tensor:
        weights = torch.exp2(scores)
        return weights / weights.sum(-1, keepdim=True)


class HeadsTurnedApart(Expanded):
    """Every head's copy of the rotated key is turned by an angle of its own."""

    def rotated(self, k_pe: Tensor) -> Tensor:
        turned = torch.arange(HEADS).view(HEADS, 1, 1) * frequencies(k_pe.shape[1])
        return rotate_half(super().rotated(k_pe), turned)


class TokensRepeated(Expanded):
    """A rotated key for the first half of the tokens, used twice."""

    def rotated(self, k_pe: Tensor) -> Tensor:
        half = -(-k_pe.shape[1] // 2)
        return super().rotated(k_pe[:, :half].repeat(1, 2, 1)[:, : k_pe.shape[1]] * 1.0)


class PaddedWithOnes(Expanded):
    """What is cut off again is not what was put on."""

    def values(self, v: Tensor) -> Tensor:
        return F.pad(v, [2, 0], value=1.0)


class BackwardsInTime(Expanded):
    """Queries see what comes after them."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
        return torch.where(seen, scores, float("-inf")).softmax(-1)


class HalfHidden(Expanded):
    """What is hidden keeps a part of its score."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.where(seen, scores, 0.5 * scores).softmax(-1)


LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        SumWithSomething, OffByOne, SumOverQueries, SumOfOthers, SumOfSquares, AnotherLogSumExp, PowersOfTwo,
        HeadsTurnedApart, PaddedWithOnes, HalfHidden,
    )
}  # fmt: skip

WITH_WHAT_THEY_HAVE: dict[str, Callable[[], nn.Module]] = {
    "TokensRepeated": TokensRepeated,
    "BackwardsInTime": BackwardsInTime,
}
"""Matched all the same: the rotated keys and the mask are whatever they are."""
