"""MLA as people write it, and near misses: modules that take ``(x, latent, rope)`` and return the attention's result.

``x [B, T, 16]`` gives the queries; ``latent [B, S, R]`` and ``rope [B, S, D]`` are what a cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, NOPE, ROPE, RANK, VALUE, WIDTH = 4, 6, 4, 8, 10, 16


class Naive(nn.Module):
    """The shape of every spelling: override one step at a time."""

    def __init__(self, *, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=bias)
        self.dropout = dropout
        self.scale = (NOPE + ROPE) ** -0.5

    def queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        expanded = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        nope, v = expanded.split([NOPE, VALUE], dim=-1)
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), v

    def mask(self, scores: Tensor) -> Tensor:
        return scores

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mask(q @ k.transpose(-1, -2) * self.scale)
        return F.dropout(scores.softmax(-1), self.dropout, self.training) @ v

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        k, v = self.expand(latent, rope)
        return self.attend(self.queries(x), k, v).transpose(1, 2).flatten(2)


def causal(tokens: int, cached: int) -> Tensor:
    return torch.arange(cached) <= torch.arange(tokens)[:, None] + cached - tokens


class SliceCopies(Naive):
    """transformers' ``expand_kv``: a key that is filled piece by piece."""

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        expanded = self.kv_b_proj(latent).view(*latent.shape[:2], HEADS, -1).transpose(1, 2)
        nope, v = expanded.split([NOPE, VALUE], dim=-1)
        k = expanded.new_empty(*expanded.shape[:-1], NOPE + ROPE)
        k[..., :NOPE].copy_(nope)
        k[..., NOPE:].copy_(rope.unsqueeze(1).expand(-1, HEADS, -1, -1))
        return k, v


class RopeFirst(Naive):
    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand(latent, rope)
        return torch.cat([k[..., NOPE:], k[..., :NOPE]], dim=-1), v


class ValuesFirst(Naive):
    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        expanded = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        v, nope = expanded.split([VALUE, NOPE], dim=-1)
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), v


class TwoProjections(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.k_b_proj = nn.Linear(RANK, HEADS * NOPE, bias=False)
        self.v_b_proj = nn.Linear(RANK, HEADS * VALUE, bias=False)

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        nope, v = (f(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.k_b_proj, self.v_b_proj))
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), v


class TwoTerms(Naive):
    """Scores as the sum of two products, as DeepSeek's own inference code has them."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, -1))
        q_nope, q_rope = q.split([NOPE, ROPE], dim=-1)
        nope, v = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).split([NOPE, VALUE], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q_nope, nope) + torch.einsum("bshr,btr->bsht", q_rope, rope)
        return torch.einsum("bsht,bthd->bshd", (scores * self.scale).softmax(-1), v).flatten(2)


class Sdpa(Naive):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[2], k.shape[2]))


class SdpaIsCausal(Naive):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


class MaskedFill(Naive):
    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~causal(*scores.shape[-2:]), -1e9)


class AddedMask(Naive):
    def mask(self, scores: Tensor) -> Tensor:
        hidden = torch.full(scores.shape[-2:], float("-inf")).triu(1 + scores.shape[-1] - scores.shape[-2])
        return scores + hidden


class NoPositions(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * NOPE, bias=False)

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        nope, v = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        return nope, v


class UpcastScores(Naive):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).float() / math.sqrt(NOPE + ROPE)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        Naive, SliceCopies, RopeFirst, ValuesFirst, TwoProjections, TwoTerms, Sdpa, SdpaIsCausal, MaskedFill,
        AddedMask, NoPositions, UpcastScores,
    )
}  # fmt: skip
CAUSAL = {"Sdpa", "SdpaIsCausal", "AddedMask"}


# -- near misses -------------------------------------------------------------------------------------------------------


class Softcap(Naive):
    def mask(self, scores: Tensor) -> Tensor:
        return 30.0 * torch.tanh(scores / 30.0)


class PerHeadRope(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.k_rope = nn.Linear(ROPE, HEADS * ROPE, bias=False)

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        nope, v = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        own = torch.sin(self.k_rope(rope)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.cat([nope, own], dim=-1), v


class WeightsReturned(Naive):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        weights = (self.queries(x) @ k.mT * self.scale).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class KeysReturned(Naive):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        return self.attend(self.queries(x), k, v).transpose(1, 2).flatten(2), k


class WeakMask(Naive):
    """Hidden scores are only lowered a little."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~causal(*scores.shape[-2:]), -50.0)


class GatedValues(Naive):
    """Something between the expansion and the scores that is not linear."""

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand(latent, rope)
        return k, v * torch.sigmoid(v)


class QueryOfTheLatent(Naive):
    """Ordinary attention: one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(RANK, 3 * HEADS * NOPE, bias=False)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self.qkv(latent).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def _bias() -> nn.Module:
    return Naive(bias=True)


def _dropout() -> nn.Module:
    return Naive(dropout=0.5).train()


NEAR_MISSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softcap": (Softcap, "tanh"),
    "per_head_rope": (PerHeadRope, "rotated key of its own"),
    "weights_returned": (WeightsReturned, "attention weights"),
    "keys_returned": (KeysReturned, "read by"),
    "weak_mask": (WeakMask, "still lets something through"),
    "bias": (_bias, "bias"),
    "dropout": (_dropout, "dropout"),
}
"""With a part of the reason each of them owes."""

OTHER_ATTENTION: dict[str, Callable[[], nn.Module]] = {"qkv": QueryOfTheLatent, "gated_values": GatedValues}
"""Not MLA, and no near miss either: passed over in silence."""
