"""Attention over a latent with something about it: biases, windows, sinks, selections, rings, quantised caches.

Every module takes ``x [B, T, 16]``, ``latent [B, S, 12]`` and ``rope [B, S, 4]``; beside it stands what should become
of it: the roles of the match, or a part of the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mla.layers import HEADS, NOPE, RANK, ROPE, VALUE, WIDTH

Registry = dict[str, tuple[type[nn.Module], tuple[str, ...]]]
MATCHED: Registry = {}
LEFT: Registry = {}
PLAIN = ("q", "latent", "k_rope", "w")


def matched(*more: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        MATCHED[cls.__name__] = (cls, (*PLAIN, *more))
        return cls

    return register


def left(reason: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        LEFT[cls.__name__] = (cls, (reason,))
        return cls

    return register


class Variant(nn.Module):
    """Ordinary in itself; override one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.scale = (NOPE + ROPE) ** -0.5

    def cached(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        return latent, rope

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.cat([kv[..., :NOPE], rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), kv[..., NOPE:]

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.keys(*self.cached(x, latent, rope))
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return (self.weights(q @ k.mT * self.scale, x) @ v).transpose(1, 2).flatten(2)


def counted(x: Tensor, most: int) -> Tensor:
    """A number per request, from 1 to ``most``."""
    return (x[:, 0, 0].abs() * 5).long().clamp(1, most)[:, None, None, None]


# -- scores ------------------------------------------------------------------------------------------------------------


@matched("mask")
class Alibi(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        distance = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return (scores + distance * slopes[:, None, None]).softmax(-1)


@matched("mask")
class LeftPadding(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        hidden = torch.arange(scores.shape[-1]) < counted(x, scores.shape[-1] - 1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@matched("lengths")
class RightPadding(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        hidden = torch.arange(scores.shape[-1]) >= counted(x, scores.shape[-1])
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@matched("lengths")
class OneLengthForAll(Variant):
    """A number without dimensions, as a position in a static cache often is."""

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        position = (x[0, 0, 0].abs() * 5).long().clamp(1, scores.shape[-1] - 1)
        return scores.masked_fill(torch.arange(scores.shape[-1]) > position, float("-inf")).softmax(-1)


@matched("mask")
class SlidingWindow(Variant):
    """Both ends of what is seen move."""

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        position, end = torch.arange(scores.shape[-1]), counted(x, scores.shape[-1])
        return scores.masked_fill((position >= end) | (position < end - 3), torch.finfo(x.dtype).min).softmax(-1)


@matched("sinks")
class SinkFirst(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        sinks = self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
        return torch.cat([sinks, scores], dim=-1).softmax(-1)[..., 1:]


@left("tanh")
class SoftcapUnderMask(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        capped = 30.0 * torch.tanh(scores / 30.0)
        return capped.masked_fill(torch.arange(scores.shape[-1]) >= counted(x, 9), float("-inf")).softmax(-1)


@left("mul stands between the scores and the softmax")
class LearnedTemperature(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1))

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return (scores * self.temperature).softmax(-1)


@left("also read by topk")
class BestOfThem(Variant):
    """All but the highest scores are hidden."""

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        least = scores.topk(3, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, float("-inf")).softmax(-1)


@left("_softmax stands between")
class TwiceNormalised(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.softmax(-1).softmax(-1)


@left("sub stands between the softmax and the values")
class Differential(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.softmax(-1) - 0.3 * (2.0 * scores).softmax(-1)


@left("attention weights")
class Entropy(Variant):
    """What the weights' entropy adds to the result."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.keys(latent, rope)
        weights = (self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) @ k.mT * self.scale).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) - (weights * (weights + 1e-9).log()).sum()


# -- what is cached ----------------------------------------------------------------------------------------------------


@matched()
class Quantised(Variant):
    """Eight bits a number, a factor for every token."""

    def cached(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        factor = latent.abs().amax(-1, keepdim=True) / 448
        return (latent / factor).to(torch.float8_e4m3fn).to(x.dtype) * factor, rope


@matched()
class Selected(Variant):
    """Attention to a few tokens that an indexer picks."""

    def cached(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        index = (x[:, :1, :RANK] * latent).sum(-1).topk(5, dim=-1).indices[..., None]
        return latent.gather(1, index.expand(-1, -1, RANK)), rope.gather(1, index.expand(-1, -1, ROPE))


@matched()
class SinkTokens(Variant):
    """Learned tokens in front of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_rope = nn.Parameter(torch.randn(1, 2, RANK)), nn.Parameter(torch.randn(1, 2, ROPE))

    def cached(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        pairs = ((self.first, latent), (self.first_rope, rope))
        joined = [torch.cat([first.expand(x.shape[0], -1, -1), rest], dim=1) for first, rest in pairs]
        return joined[0], joined[1]


@matched()
class Ring(Variant):
    """The oldest token is overwritten where it lies."""

    def cached(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        latent[:, 3:4], rope[:, 3:4] = x[:, :1, :RANK], x[:, :1, -ROPE:]
        return latent, rope


@matched()
class OverwrittenAfterwards(Variant):
    """What was attended to is overwritten before the result is returned."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        out = super().forward(x, latent, rope)
        latent[:, 3:4], rope[:, 3:4] = x[:, :1, :RANK], x[:, :1, -ROPE:]
        return out


@left("rotated key of its own")
class RotatedPerHead(Variant):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(HEADS, 1, ROPE))

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.cat([kv[..., :NOPE], rope.unsqueeze(1) * self.factor], dim=-1), kv[..., NOPE:]


# -- more than one -----------------------------------------------------------------------------------------------------


@matched()
class Twice(Variant):
    """Two layers over one latent, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.next, self.between = Variant(), nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        y = x + self.between(super().forward(x, latent, rope))
        return self.next(y, latent, rope)


@left("expanded keys or values")
class ExpandedOnce(Variant):
    """Keys and values of one layer, attended to by two: neither may have the projection to itself."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.keys(latent, rope)
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        first = F.scaled_dot_product_attention(q, k, v)
        again = torch.cat([first, first], dim=-1)[..., : NOPE + ROPE]
        return F.scaled_dot_product_attention(again, k, v).transpose(1, 2).flatten(2)


@matched("mask")
class AllRequestsInOne(Variant):
    """Requests as tokens of one, kept apart by a mask."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        batch, tokens, cached = x.shape[0], x.shape[1], latent.shape[1]
        k, v = self.keys(latent.flatten(0, 1).unsqueeze(0), rope.flatten(0, 1).unsqueeze(0))
        q = self.q_proj(x.flatten(0, 1).unsqueeze(0)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        own = torch.arange(batch).repeat_interleave(tokens)[:, None] == torch.arange(batch).repeat_interleave(cached)
        weights = (q @ k.mT * self.scale).masked_fill(~own, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@left("keys are expanded from one latent, and values from another")
class KeysOfAnother(Variant):
    """Keys of one latent, values of another: nothing that one cache could serve."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        (k, _), (_, v) = self.keys(latent, rope), self.keys(latent.flip(1), rope)
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return (self.weights(q @ k.mT * self.scale, x) @ v).transpose(1, 2).flatten(2)


class NormedKeys(Variant):
    """Keys are normalised after they are expanded."""

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().keys(latent, rope)
        return F.normalize(k, dim=-1), v


class OverHeads(Variant):
    """Weights that add up to one over the heads."""

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.softmax(1)


OTHERS: dict[str, type[nn.Module]] = {cls.__name__: cls for cls in (NormedKeys, OverHeads)}
"""Of another kind: passed over in silence."""
