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


class TwoTermsOfJoinedKeys(Naive):
    """Keys are joined from both parts and cut again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_nope, q_rope = q.split([NOPE, ROPE], dim=-1)
        scores = q_nope @ k[..., :NOPE].mT + q_rope @ k[..., NOPE:].mT
        return (scores * self.scale).softmax(-1) @ v


class Sdpa(Naive):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q.shape[2], k.shape[2]))


class SdpaIsCausal(Naive):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


class SdpaWindow(Naive):
    """A mask that no input reaches and that is not the causal one: it is handed on."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = causal(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.triu(k.shape[2] - q.shape[2] - 4))


class MaskedFill(Naive):
    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~causal(*scores.shape[-2:]), torch.finfo(scores.dtype).min)


class AddedMask(Naive):
    def mask(self, scores: Tensor) -> Tensor:
        hidden = torch.full(scores.shape[-2:], float("-inf")).triu(1 + scores.shape[-1] - scores.shape[-2])
        return scores + hidden


class AddedNumber(Naive):
    """From which a score can still be told."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores + ~causal(*scores.shape[-2:]) * -1e4


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
        Naive, SliceCopies, RopeFirst, ValuesFirst, TwoProjections, TwoTerms, TwoTermsOfJoinedKeys, Sdpa, SdpaIsCausal,
        SdpaWindow, MaskedFill, AddedMask, AddedNumber, NoPositions, UpcastScores,
    )
}  # fmt: skip
CAUSAL = {"Sdpa", "SdpaIsCausal", "AddedMask", "MaskedFill", "DeepSeekCausal", "MqaGrouped"}


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


class KeysOfTwoLatents(PerHeadRope):
    """What would be the rotated part is expanded from a latent as well."""

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        nope, v = self.kv_b_proj(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        return torch.cat([nope, self.k_rope(rope).unflatten(-1, (HEADS, -1)).transpose(1, 2)], dim=-1), v


class ValuesOfAnotherLatent(TwoProjections):
    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, _ = super().expand(latent, rope)
        return k, self.v_b_proj(latent.tanh()).unflatten(-1, (HEADS, -1)).transpose(1, 2)


class WeightsReturned(Naive):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        weights = (self.queries(x) @ k.mT * self.scale).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class KeysReturned(Naive):
    """A prefill that leaves expanded keys behind, as transformers 4 does: they stay, attention is replaced."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        return self.attend(self.queries(x), k, v).transpose(1, 2).flatten(2), k, v


class KeysFilled(SliceCopies):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        return self.attend(self.queries(x), k, v).transpose(1, 2).flatten(2), k, v


class FirstUpdate(KeysReturned):
    """The first update of transformers 4's cache: joined to tensors of nothing."""

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand(latent, rope)
        keys, values = (torch.cat([torch.tensor([]), item], dim=-2) for item in (k, v))
        return keys, values


KEPT: dict[str, Callable[[], nn.Module]] = {"returned": KeysReturned, "filled": KeysFilled, "first": FirstUpdate}


class ExpandedCache(Naive):
    """transformers 4: keys and values of earlier tokens are kept expanded, and put together anew at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.past_k = nn.Buffer(torch.ones(1, HEADS, 4, NOPE + ROPE))
        self.past_v = nn.Buffer(torch.ones(1, HEADS, 4, VALUE))

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().expand(latent, rope)
        past = (x.expand(k.shape[0], -1, -1, -1) for x in (self.past_k, self.past_v))
        joined = (torch.cat(pair, dim=-2) for pair in zip(past, (k, v), strict=True))
        return tuple(joined)  # type: ignore[return-value]


class ExpandedStaticCache(Naive):
    """The same in a buffer of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Buffer(torch.zeros(2, HEADS, 32, NOPE + ROPE))
        self.values = nn.Buffer(torch.zeros(2, HEADS, 32, VALUE))

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(4, 4 + latent.shape[1])
        for cache, new in zip((self.keys, self.values), super().expand(latent, rope), strict=True):
            cache.index_copy_(2, position, new)
        return self.keys, self.values


class OrdinaryCache(nn.Module):
    """Ordinary attention without positions: keys and values are projections as wide as what they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(n, HEADS * NOPE, bias=False) for n in (WIDTH, HEADS * NOPE))
        self.v_proj = nn.Linear(HEADS * NOPE, HEADS * NOPE, bias=False)
        self.past = nn.Buffer(torch.ones(2, HEADS, 4, NOPE))

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        hidden = torch.cat([latent, latent, latent], dim=-1)
        new = (f(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
        k, v = (torch.cat([self.past, item], dim=2) for item in new)
        return (self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) @ k.mT).softmax(-1) @ v


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


class OneKeyHead(nn.Module):
    """Ordinary attention with one head of keys, whose first columns alone are rotated (granite's and bamba's)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, heads * NOPE, bias=False) for width, heads in ((WIDTH, HEADS), (WIDTH, 1), (WIDTH, 1))
        )

    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2])[:, None] * torch.ones(NOPE // 2)
        first, rest = x.tensor_split((NOPE // 2,), dim=-1)
        return torch.cat([first * angles.cos() + first.flip(-1) * angles.sin(), rest], dim=-1)

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, NOPE)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.rotated(q), self.rotated(k).expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1)
        return ((q @ k.mT).masked_fill(~causal(x.shape[1], x.shape[1]), float("-inf")).softmax(-1) @ v).flatten(2)


def _bias() -> nn.Module:
    return Naive(bias=True)


def _dropout() -> nn.Module:
    return Naive(dropout=0.5).train()


NEAR_MISSES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softcap": (Softcap, "tanh"),
    "per_head_rope": (PerHeadRope, "rotated key of its own"),
    "keys_of_two_latents": (KeysOfTwoLatents, "two latents"),
    "values_of_another_latent": (ValuesOfAnotherLatent, "values from another"),
    "weights_returned": (WeightsReturned, "attention weights"),
    "expanded_cache": (ExpandedCache, "cached expanded"),
    "expanded_static_cache": (ExpandedStaticCache, "cached expanded"),
    "weak_mask": (WeakMask, "other scores may reach"),
    "bias": (_bias, "bias"),
    "dropout": (_dropout, "dropout"),
}
"""With a part of the reason each of them owes."""

OTHER_ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "qkv": QueryOfTheLatent,
    "gated_values": GatedValues,
    "ordinary_cache": OrdinaryCache,
    "one_key_head": OneKeyHead,
}
"""Not MLA, and no near miss either: passed over in silence."""
