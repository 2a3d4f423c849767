"""Layers of MLA on one token over what is kept of earlier ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mla.layers import (
    BATCH,
    CACHED,
    HEADS,
    LAYERS,
    NOPE,
    PAST,
    PAST_ROPE,
    QK,
    RANK,
    ROPE,
    VALUE,
    WIDTH,
    Layer,
    PerHeadWeights,
    decode,
    frequencies,
    rotate_half,
)


@decode(PAST, PAST_ROPE)
class NoTokenDimension(Layer):
    """One token has no dimension of its own; keys and values are expanded."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q_nope, q_pe = self.queries(x).squeeze(1).split([NOPE, ROPE], dim=-1)
        k, v = self.wkv_b(latent).unflatten(-1, (HEADS, -1)).split([NOPE, VALUE], dim=-1)
        scores = torch.einsum("bhd,bshd->bhs", q_nope, k) + torch.einsum("bhd,bsd->bhs", q_pe, rope)
        return self.wo(torch.einsum("bhs,bshd->bhd", (scores * self.scale).softmax(-1), v).flatten(1))


@decode(PAST, PAST_ROPE)
class VllmFallback(Layer):
    """Heads first for the products with the weights, which are permuted once; one key of all columns."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        weight = self.wkv_b.weight.T.view(RANK, HEADS, NOPE + VALUE)
        w_uk, w_uv = weight.split([NOPE, VALUE], dim=-1)
        q_nope, q_pe = self.queries(x).flatten(0, 1).split([NOPE, ROPE], dim=-1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), w_uk.permute(1, 2, 0)).transpose(0, 1)
        q = torch.cat([ql_nope, q_pe], dim=-1)
        cache = torch.cat([latent, rope], dim=-1)
        scores = torch.einsum("bhe,bse->bhs", q, cache) * self.scale
        out = torch.einsum("bhs,bsr->bhr", torch.softmax(scores.float(), dim=-1), cache[..., :RANK])
        out = torch.bmm(out.transpose(0, 1), w_uv.transpose(0, 1))
        return self.wo(out.transpose(0, 1).reshape(-1, HEADS * VALUE))


@decode(PAST, PAST_ROPE)
class SglangFallback(Layer):
    """One request after another through SDPA with one key head; the heads are rows."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        w_uk, w_uv = self.wkv_b.weight.view(HEADS, NOPE + VALUE, RANK).split([NOPE, VALUE], dim=1)
        q_nope, q_pe = self.queries(x).squeeze(1).split([NOPE, ROPE], dim=-1)
        q = torch.cat([torch.einsum("bhd,hdr->bhr", q_nope, w_uk), q_pe], dim=-1)
        outs: list[Tensor] = []
        for request in range(q.shape[0]):
            key = torch.cat([latent[request], rope[request]], dim=-1).unsqueeze(1).movedim(0, 1)
            query = q[request].unsqueeze(1)
            own = F.scaled_dot_product_attention(
                query.unsqueeze(0), key.unsqueeze(0), key[..., :RANK].unsqueeze(0), enable_gqa=True, scale=self.scale
            )
            outs.append(own.squeeze(0).movedim(1, 0))
        out = torch.cat(outs)
        return self.wo(torch.einsum("bhr,hdr->bhd", out, w_uv).flatten(1))


@decode(PAST, PAST_ROPE)
class FoldedQueries(nn.Module):
    """The query projection has W_UK in it already, the output projection W_UV."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q = nn.Linear(WIDTH, HEADS * (RANK + ROPE), bias=False)
        self.w_o = nn.Linear(HEADS * RANK, WIDTH, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = self.w_q(x).unflatten(-1, (HEADS, RANK + ROPE)).transpose(1, 2)
        cache = torch.cat([latent, rope], dim=-1).unsqueeze(1)
        weights = torch.softmax(q @ cache.transpose(2, 3) * QK**-0.5, dim=-1)
        return self.w_o((weights @ cache[..., :RANK]).transpose(1, 2).flatten(2))


@decode((BATCH, CACHED, RANK + ROPE))
class NormAfterTheCache(Layer):
    """What is cached is raw: norm and rotation run over all of it at every step."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache = torch.cat([cache, self.wkv_a(x)], dim=1)
        latent, k_pe = self.kv_norm(cache[..., :RANK]), rotate_half(cache[..., RANK:], frequencies(cache.shape[1]))
        q_nope, q_pe = self.queries(x).split([NOPE, ROPE], dim=-1)
        q = torch.cat([q_nope, rotate_half(q_pe, frequencies(1, cache.shape[1] - 1)[None])], dim=-1).transpose(1, 2)
        kv = self.wkv_b(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        out = F.scaled_dot_product_attention(q, k, kv[..., NOPE:])
        return self.wo(out.transpose(1, 2).flatten(2))


@decode(PAST, PAST_ROPE)
class EinsumAbsorbed(PerHeadWeights):
    """Absorbed with a weight per head, the softmax by hand."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, q_r = self.split_queries(x)
        q = torch.einsum("bthn,hrn->bthr", q, self.w_uk)
        scores = torch.einsum("bthr,bsr->bhts", q, latent) + torch.einsum("bthd,bsd->bhts", q_r, rope)
        scores = scores * QK**-0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        context = torch.einsum("bhts,bsr->bthr", weights, latent)
        return torch.einsum("bthr,hrv,hvw->btw", context, self.w_uv, self.w_o)


__all__ = ["LAYERS"]
