"""RWKV-5 and 6: a token reads the state as it was before its own write, and that write times a bonus u; near misses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.near_misses import near_miss
from tests.spellings.registry import spelling

BF16 = (torch.float32, torch.bfloat16)


def wkv(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, u: Tensor, state: Tensor, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Token by token; ``decay`` is a factor ``[B, T, H, K]``, or with ones."""
    outs = []
    for t in range(first, q.shape[1]):
        kv = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append(((state + u.unsqueeze(-1) * kv) * q[:, t].unsqueeze(-1)).sum(-2))
        state = state * decay[:, t].unsqueeze(-1) + kv
    return torch.stack(outs, 1), state


@spelling("gla", "q k v g u", lengths=(7, 19))
def rwkv6_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return wkv(q * q.shape[-1] ** -0.5, k, v, g.exp(), u, state)[0]


@spelling(
    "gla", "q k v w u state", scale=1.0, returns_state=True, lengths=(6, 19), dtypes=BF16, state_dtype=torch.float32
)
def rwkv6_upcast_loop(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    o, last = wkv(q.float(), k.float(), v.float(), w.float().neg().exp(), u.float(), state)
    return o.to(q.dtype), last


@spelling("gla", "q k v alpha u state", scale=1.0, layout="bhtd", returns_state=True, lengths=(7, 12))
def rwkv6_products(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The own write as a product with the diagonal, apart from the state."""
    outs = []
    for r, key, value, a in zip(*(x.unbind(2) for x in (q, k, v, alpha)), strict=True):
        own = (r * u * key).sum(-1, keepdim=True) * value
        outs.append(own + torch.einsum("bhk,bhkv->bhv", r, state))
        state = a.unsqueeze(-1) * state + torch.einsum("bhk,bhv->bhkv", key, value)
    return torch.stack(outs, 2), state


@spelling("gla", "q k v g u", scale=1.0, layout="bhtd", strongest_gate=-0.5, lengths=(8, 16), multiple=4)
def rwkv6_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    """The bonus on the diagonal of the scores."""
    state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, g_c in zip(*(x.split(4, dim=2) for x in (q, k, v, g)), strict=True):
        end = g_c.cumsum(2)
        before = q_c * (end - g_c).exp()
        scores = (before @ (k_c * (-end).exp()).mT).tril(-1)
        scores = scores + torch.einsum("bhtk,bhtk->bht", q_c, u[:, None] * k_c).diag_embed()
        outs.append(scores @ v_c + before @ state)
        last = end[:, :, -1:]
        state = state * last.exp().mT + (k_c * (last - end).exp()).mT @ v_c
    return torch.cat(outs, 2)


@spelling("simple_gla", "q k v gamma u", scale=1.0, lengths=(7, 19))
def rwkv5_loop(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, u: Tensor) -> Tensor:
    """One decay per head for all tokens."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return wkv(q, k, v, gamma.view(1, 1, -1, 1).expand(*q.shape[:3], 1), u, state)[0]


@spelling("linear_attention", "q k v u", scale=1.0, layout="bhtd", lengths=(7, 19))
def bonus_without_decay(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    scores = (q @ k.mT).tril(-1)
    return scores @ v + (q * k * u[:, None]).sum(-1, keepdim=True) * v


# -- near misses ------------------------------------------------------------------------------------------------------


@near_miss("gla", "q k v g u", scale=1.0, length=6)
def bonus_after_the_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    """The state is decayed before it is read."""
    state, outs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        kv = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        state = state * g[:, t].exp().unsqueeze(-1)
        outs.append(((state + u.unsqueeze(-1) * kv) * q[:, t].unsqueeze(-1)).sum(-2))
        state = state + kv
    return torch.stack(outs, 1)


@near_miss("gla", "q k v g u", scale=1.0, length=6)
def bonus_stays_in_the_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    state, outs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        kv = u.unsqueeze(-1) * k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        state = state + kv
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2) + 0.5 * (kv * q[:, t].unsqueeze(-1)).sum(-2))
        state = state * g[:, t].exp().unsqueeze(-1)
    return torch.stack(outs, 1)


@near_miss("gla", "q k v g u", expect="either", scale=1.0, length=6)
def bonus_counts_twice_in_the_last_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    o, state = wkv(q[:, :-1], k[:, :-1], v[:, :-1], g[:, :-1].exp(), u, state)
    last, _ = wkv(q, k, v, g.exp(), 2 * u, state, first=q.shape[1] - 1)
    return torch.cat([o, last], 1)


@near_miss("gla", "q k v g", expect="either", scale=1.0, length=6)
def no_bonus_at_all(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """What is read is one token old."""
    state, outs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        state = state * g[:, t].exp().unsqueeze(-1) + F.relu(k[:, t]).unsqueeze(-1) * v[:, t].unsqueeze(-2)
    return torch.stack(outs, 1)
