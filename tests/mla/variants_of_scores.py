"""Scores, softmaxes and products in other orders and shapes than usual; registered beside those of ``variants.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.mla.layers import HEADS, NOPE, RANK, ROPE, VALUE, WIDTH
from tests.mla.variants import MATCHED, Variant, left, matched


@matched()
class LogSoftmax(Variant):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.log_softmax(-1).exp()


@matched()
class KeysOnRows(Variant):
    """Scores with keys before queries, so that the softmax runs over the rows; causal where there are several."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.keys(latent, rope)
        scores = torch.einsum("bhsd,bthd->bhst", k, self.q_proj(x).unflatten(-1, (HEADS, -1))) * self.scale
        first, tokens = k.shape[2] - x.shape[1], x.shape[1]
        hidden = torch.arange(k.shape[2])[:, None] > torch.arange(tokens) + first
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-2)
        return torch.einsum("bhst,bhsv->bthv", weights, v).flatten(2)


@matched()
class HeadsLast(Variant):
    """The maximum, and the sum, along the keys, with heads behind them."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.keys(latent, rope)
        scores = torch.einsum("bthd,bhsd->btsh", self.q_proj(x).unflatten(-1, (HEADS, -1)), k) * self.scale
        weights = (scores - scores.amax(2, keepdim=True)).exp()
        return torch.einsum("btsh,bhsv->bthv", weights / weights.sum(2, keepdim=True), v).flatten(2)


@matched()
class MaskInTheProduct(Variant):
    """``baddbmm`` of a causal mask, with heads merged with the batch; over earlier tokens and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj = nn.Linear(WIDTH, RANK + ROPE, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        c, turned = self.kv_a_proj(x).split([RANK, ROPE], dim=-1)
        k, v = self.keys(torch.cat([latent, c], dim=1), torch.cat([rope, turned], dim=1))
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        hidden = torch.full((x.shape[1], k.shape[2]), float("-inf")).triu(1 + k.shape[2] - x.shape[1])
        scores = torch.baddbmm(hidden, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=self.scale)
        weights = scores.softmax(-1).unflatten(0, (-1, HEADS))
        return (weights @ v).transpose(1, 2).flatten(2)


class Absorbed(nn.Module):
    """Weights per head; the query goes through those of the keys, the result through those of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, VALUE, RANK) * RANK**-0.5)
        self.scale = (NOPE + ROPE) ** -0.5

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (HEADS, -1))
        return torch.einsum("bthn,hnr->bthr", q[..., :NOPE], self.w_uk), q[..., NOPE:]


class RowsOfAllHeads(Absorbed):
    """All queries of all heads are rows of one matrix, as a kernel for one shared key wants them."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        rows = torch.cat(self.queries(x), dim=-1).flatten(1, 2)
        weights = (rows @ torch.cat([latent, rope], dim=-1).mT * self.scale).softmax(-1)
        o = (weights @ latent).view(x.shape[0], x.shape[1], HEADS, RANK)
        return torch.einsum("bthr,hvr->bthv", o, self.w_uv).flatten(2)


MATCHED["RowsOfAllHeads"] = (RowsOfAllHeads, ("q", "latent", "k_rope"))


@left("absorbed by hand on one side")
class KeysExpanded(Variant):
    """W_UV is nowhere: it may be part of what follows."""

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, _ = super().keys(latent, rope)
        return k, latent.unsqueeze(1).expand(-1, HEADS, -1, -1)


class HeadsInFront(nn.Module):
    """Products per head over the latent of all of them, heads before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.w_uk = nn.Parameter(torch.randn(HEADS, RANK, NOPE) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, VALUE) * RANK**-0.5)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).permute(2, 0, 1, 3)
        k, v = latent.unsqueeze(0) @ self.w_uk.unsqueeze(1), latent.unsqueeze(0) @ self.w_uv.unsqueeze(1)
        k = torch.cat([k, rope.unsqueeze(0).expand(HEADS, -1, -1, -1)], dim=-1)
        weights = (q @ k.mT * (NOPE + ROPE) ** -0.5).softmax(-1)
        return (weights @ v).permute(1, 2, 0, 3).flatten(2)


MATCHED["HeadsInFront"] = (HeadsInFront, ("q", "latent", "k_rope", "w_k", "w_v"))
