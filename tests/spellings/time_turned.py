"""Time runs backwards, or lies last: texts from vision and speech."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.near_misses import KDA, near_miss, outer, read, scan, zeros
from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("simple_gla", "q k v g", scale=1.0, backwards=True, lengths=LENGTHS)
def simple_gla_rows_put_in_front(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s = zeros(k, v)
    rows: list[Tensor] = []
    for t in reversed(range(q.shape[1])):
        s = s * g[:, t].exp()[..., None, None] + k[:, t][..., None] * v[:, t][..., None, :]
        rows.insert(0, (q[:, t][..., None] * s).sum(-2))
    return torch.stack(rows, 1)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, backwards=True, returns_state=True, lengths=LENGTHS)
def gdn_reversed_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    s = zeros(k, v)
    rows: list[Tensor] = []
    for t in range(q.shape[1] - 1, -1, -1):
        s = s * g[:, t].exp()[..., None, None]
        s = s + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(s, k[:, t])))
        rows.append(read(s, q[:, t]))
    return torch.stack(rows[::-1], 1), s


@spelling("kda", "q k v g beta state", scale=1.0, backwards=True, lengths=LENGTHS)
def kda_assigned_from_the_end(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    for t in range(q.shape[1])[::-1]:
        state = state * g[:, t].exp()[..., None]
        state = state + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(state, k[:, t])))
        out[:, t] = read(state, q[:, t])
    return out


@spelling("linear_attention", "q k v", scale=1.0, backwards=True, layout="bhtd", lengths=LENGTHS)
def linear_what_is_to_come(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).triu() @ v


@spelling("retention", "q k v gamma", scale=1.0, backwards=True, layout="bhtd", lengths=LENGTHS)
def retention_what_is_to_come(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    n = torch.arange(q.shape[2], dtype=q.dtype)
    decay = gamma[:, None, None] ** (n - n[:, None]).clamp(min=0)
    return (q @ k.mT * decay).triu() @ v


@spelling("simple_gla", "q k v g", scale=1.0, backwards=True, lengths=LENGTHS)
def simple_gla_flipped(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    q, k, v, g = (x.flip(1) for x in (q, k, v, g))
    s = zeros(k, v)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        s = torch.einsum("bh,bhkv->bhkv", g[:, t].exp(), s) + outer(k[:, t], v[:, t])
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1).flip(1)


@spelling("simple_gla", "q k v g", scale=1.0, layout="bhdt", lengths=LENGTHS)
def simple_gla_time_last(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s = torch.zeros(*v.shape[:3], k.shape[2])
    out = torch.zeros_like(v)
    for t in range(q.shape[-1]):
        s = g[..., t].exp()[..., None, None] * s + v[..., t][..., :, None] * k[..., t][..., None, :]
        out[..., t] = torch.einsum("bhvk,bhk->bhv", s, q[..., t])
    return out


@spelling("gla", "q k v g", scale=1.0, layout="bhdt", lengths=LENGTHS)
def gla_time_last_stacked(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, rows = torch.zeros(*v.shape[:3], k.shape[2]), []
    for q_t, k_t, v_t, g_t in zip(*(x.unbind(-1) for x in (q, k, v, g)), strict=True):
        s = g_t.exp().unsqueeze(-2) * s + v_t.unsqueeze(-1) * k_t.unsqueeze(-2)
        rows.append((s @ q_t.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows, -1)


# -- near misses ---------------------------------------------------------------------------------------------------


@near_miss("simple_gla", "q k v g", scale=1.0, backwards=True)
def backwards_but_laid_out_forwards(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, rows = zeros(k, v), []
    for t in reversed(range(q.shape[1])):
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


@near_miss("simple_gla", "q k v g", scale=1.0, backwards=True)
def backwards_with_the_gate_of_the_token_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, rows = zeros(k, v), []
    for t in reversed(range(q.shape[1])):
        s = s * g[:, t - 1].exp()[..., None, None] + outer(k[:, t], v[:, t])
        rows.insert(0, read(s, q[:, t]))
    return torch.stack(rows, 1)


@near_miss("gated_delta_rule", KDA, scale=1.0)
def queries_from_the_other_end(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp()[..., None, None]
        s = s + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(s, k[:, t])))
        return s, read(s, q[:, -1 - t])

    return scan(zeros(k, v), q.shape[1], token)
