"""Attention over a latent itself, the weights absorbed by hand, as people write it; and near misses.

As in ``spellings.py``, every module takes ``x [B, T, 16]``, ``latent [B, S, R]`` and ``rope [B, S, D]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mla.spellings import HEADS, NOPE, RANK, ROPE, VALUE, WIDTH, causal


class DeepSeek(nn.Module):
    """DeepSeek's own inference code in its absorb mode; override one step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.wkv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.scale = (NOPE + ROPE) ** -0.5

    def weights(self) -> tuple[Tensor, Tensor]:
        weight = self.wkv_b.weight.view(HEADS, -1, RANK)
        return weight[:, :NOPE], weight[:, -VALUE:]

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = self.q_proj(x).unflatten(-1, (HEADS, -1)).split([NOPE, ROPE], dim=-1)
        return torch.einsum("bshd,hdc->bshc", q_nope, self.weights()[0]), q_pe

    def mask(self, scores: Tensor) -> Tensor:
        return scores

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q_nope, q_pe = self.queries(x)
        scores = torch.einsum("bshc,btc->bsht", q_nope, latent) + torch.einsum("bshr,btr->bsht", q_pe, rope)
        scores = self.mask(scores * self.scale).softmax(dim=-1, dtype=torch.float32).type_as(x)
        return torch.einsum("bsht,btc->bshc", scores, latent)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        return torch.einsum("bshc,hdc->bshd", self.context(x, latent, rope), self.weights()[1]).flatten(2)


class DeepSeekCausal(DeepSeek):
    def mask(self, scores: Tensor) -> Tensor:
        tokens = scores.shape[1]
        hidden = torch.full((tokens, tokens), float("-inf")).triu_(1)
        return scores + hidden.unsqueeze(1)


class Buffers(DeepSeek):
    """The cache is a buffer, cut to length anew at every use."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = nn.Buffer(torch.zeros(4, 32, RANK))
        self.pe_cache = nn.Buffer(torch.zeros(4, 32, ROPE))

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        batch, end = latent.shape[:2]
        self.kv_cache[:batch, :end] = latent
        self.pe_cache[:batch, :end] = rope
        q_nope, q_pe = self.queries(x)
        scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:batch, :end])
        scores = scores + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:batch, :end])
        return torch.einsum("bsht,btc->bshc", (scores * self.scale).softmax(-1), self.kv_cache[:batch, :end])


class Mqa(DeepSeek):
    """One key of R + D columns for all heads, values its first R; heads before tokens."""

    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        scores = q @ cache.unsqueeze(1).mT * self.scale
        return scores.softmax(-1) @ cache[..., :RANK].unsqueeze(1)

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = torch.cat(self.queries(x), dim=-1).transpose(1, 2)
        return self.attend(q, torch.cat([latent, rope], dim=-1)).transpose(1, 2)


class MqaRopeFirst(Mqa):
    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = torch.cat(self.queries(x)[::-1], dim=-1).transpose(1, 2)
        cache = torch.cat([rope, latent], dim=-1).unsqueeze(1)
        return ((q @ cache.mT * self.scale).softmax(-1) @ cache[..., ROPE:]).transpose(1, 2)


class MqaGrouped(Mqa):
    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        k, mask = cache.unsqueeze(1), causal(q.shape[2], cache.shape[1])
        return F.scaled_dot_product_attention(q, k, k[..., :RANK], attn_mask=mask, scale=self.scale, enable_gqa=True)


class MqaExpanded(Mqa):
    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        k = cache.unsqueeze(1).expand(-1, HEADS, -1, -1)
        return F.scaled_dot_product_attention(q, k, k[..., :RANK], scale=self.scale)


class MqaJoinedKey(Mqa):
    """The key is put together, the values are the latent as it was before."""

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = torch.cat(self.queries(x), dim=-1).transpose(1, 2)
        k = torch.cat([latent, rope], dim=-1).unsqueeze(1)
        return ((q @ k.mT * self.scale).softmax(-1) @ latent.unsqueeze(1)).transpose(1, 2)


class TwoCuts(Mqa):
    """Both parts are cut from one cache, the latent twice."""

    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        k = cache.unsqueeze(1)
        scores = q[..., :RANK] @ k[..., :RANK].mT + q[..., RANK:] @ k[..., RANK:].mT
        return (scores * self.scale).softmax(-1) @ k[..., :RANK]


class NoPositionsAbsorbed(DeepSeek):
    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = self.queries(x)[0].transpose(1, 2)
        k = latent.unsqueeze(1)
        return ((q @ k.mT * self.scale).softmax(-1) @ k).transpose(1, 2)


class Gathered(Mqa):
    """A paged cache, gathered; each request sees as many tokens as it has."""

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        batch, cached = latent.shape[:2]
        pages = torch.cat([latent, rope], dim=-1).flatten(0, 1).unflatten(0, (-1, 3))
        table = torch.arange(batch * cached // 3, device=x.device).view(batch, -1)
        lengths = torch.arange(1, batch + 1, device=x.device)
        cache = pages[table].flatten(1, 2)
        q = torch.cat(self.queries(x), dim=-1).transpose(1, 2)
        seen = torch.arange(cached, device=x.device) < lengths[:, None, None, None]
        scores = (q @ cache.unsqueeze(1).mT * self.scale).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ cache[..., :RANK].unsqueeze(1)).transpose(1, 2)


ABSORBED: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        DeepSeek, DeepSeekCausal, Buffers, Mqa, MqaRopeFirst, MqaGrouped, MqaExpanded, MqaJoinedKey, TwoCuts,
        NoPositionsAbsorbed, Gathered,
    )
}  # fmt: skip


# -- near misses -------------------------------------------------------------------------------------------------------


class SoftcapAbsorbed(DeepSeek):
    def mask(self, scores: Tensor) -> Tensor:
        return 30.0 * torch.tanh(scores / 30.0)


class WeightsReturnedAbsorbed(DeepSeek):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q_nope, q_pe = self.queries(x)
        scores = torch.einsum("bshc,btc->bsht", q_nope, latent) + torch.einsum("bshr,btr->bsht", q_pe, rope)
        weights = (scores * self.scale).softmax(-1)
        return torch.einsum("bsht,btc->bshc", weights, latent), weights


class ActiveDropout(Mqa):
    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        weights = (q @ cache.unsqueeze(1).mT * self.scale).softmax(-1)
        return F.dropout(weights, 0.5, training=True) @ cache[..., :RANK].unsqueeze(1)


class OtherScales(DeepSeek):
    """The rotated product has a factor of its own, which the op cannot have."""

    def context(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q_nope, q_pe = self.queries(x)
        scores = torch.einsum("bshc,btc->bsht", q_nope, latent) * self.scale
        scores = scores + torch.einsum("bshr,btr->bsht", q_pe, rope)
        return torch.einsum("bsht,btc->bshc", scores.softmax(-1), latent)


ABSORBED_MISSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softcap_absorbed": (SoftcapAbsorbed, "tanh"),
    "weights_returned_absorbed": (WeightsReturnedAbsorbed, "attention weights"),
    "dropout_absorbed": (ActiveDropout, "dropout"),
    "other_scales": (OtherScales, "does not compute"),
}


class ValuesOfTheirOwn(Mqa):
    """Attention with one key for all heads, and values that are something else."""

    def attend(self, q: Tensor, cache: Tensor) -> Tensor:
        return (q @ cache.unsqueeze(1).mT).softmax(-1) @ torch.sin(cache[..., :RANK]).unsqueeze(1)


class Retrieval(nn.Module):
    """A memory that is key and value at once."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * RANK, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return (q @ latent.unsqueeze(1).mT).softmax(-1) @ latent.unsqueeze(1)


ABSORBED_OTHERS: dict[str, Callable[[], nn.Module]] = {"values_of_their_own": ValuesOfTheirOwn, "retrieval": Retrieval}
