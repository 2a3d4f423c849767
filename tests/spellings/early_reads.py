"""A token that reads the state before its own write: before its decay too, or between the two; near misses."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.near_misses import near_miss
from tests.spellings.registry import spelling

BF16 = (torch.float32, torch.bfloat16)


def begun(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])


def read(state: Tensor, q: Tensor) -> Tensor:
    return (state * q.unsqueeze(-1)).sum(-2)


@spelling("gla", "q k v g state", reads="before", scale=1.0, returns_state=True, lengths=(7, 19))
def gla_reads_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(q.shape[1]):
        outs.append(read(state, q[:, t]))
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    return torch.stack(outs, 1), state


@spelling("gla", "q k v alpha", reads="between", scale=1.0, lengths=(7, 19), dtypes=BF16)
def gla_reads_what_is_left(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """In the graph's own dtype, with a factor for a gate."""
    state, o = begun(q, v).float(), torch.zeros_like(v)
    for t in range(q.shape[1]):
        state = alpha[:, t].float().unsqueeze(-1) * state
        o[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t].float(), state).to(v.dtype)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t].float(), v[:, t].float())
    return o


@spelling("kda", "q k v g beta state", reads="before", returns_state=True, lengths=(7, 19))
def kda_reads_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A memory that is asked before it is told."""
    outs = []
    for t in range(q.shape[1]):
        outs.append(read(state, q[:, t] * q.shape[-1] ** -0.5))
        state = state * g[:, t].exp().unsqueeze(-1)
        write = beta[:, t].unsqueeze(-1) * (v[:, t] - read(state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
    return torch.stack(outs, 1), state


@spelling("kda", "q k v w beta", reads="between", scale=1.0, layout="bhtd", lengths=(7, 12))
def kda_reads_what_it_corrects(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    state, outs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for r, key, value, gate, b in zip(*(x.unbind(2) for x in (q, k, v, w, beta)), strict=True):
        state = state * (-gate).exp().unsqueeze(-1)
        outs.append(read(state, r))
        state = state + torch.einsum("bhk,bhv->bhkv", key, b.unsqueeze(-1) * (value - read(state, key)))
    return torch.stack(outs, 2)


@spelling("gated_delta_rule", "q k v g beta_logit state", reads="between", returns_state=True, lengths=(7, 19))
def gdn_reads_what_it_corrects(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta_logit: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        outs.append(read(state, q[:, t]) * q.shape[-1] ** -0.5)
        write = beta_logit[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - read(state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
    return torch.stack(outs, 1), state


@spelling("delta_rule", "q k v beta", reads="before", scale=1.0, lengths=(7, 19), dtypes=BF16)
def delta_rule_reads_first(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state, outs = begun(q, v).float(), []
    for t in range(q.shape[1]):
        key, value = k[:, t].float(), v[:, t].float()
        outs.append(read(state, q[:, t].float()).to(v.dtype))
        write = beta[:, t].float().unsqueeze(-1) * (value - read(state, key))
        state = state + key.unsqueeze(-1) * write.unsqueeze(-2)
    return torch.stack(outs, 1)


@spelling("simple_gla", "q k v g", reads="before", scale=1.0, groups=2, lengths=(7, 19), backwards=True)
def simple_gla_backwards(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The last token comes first; two value heads a key head."""
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    state, outs = begun(q, v), []
    for t in reversed(range(q.shape[1])):
        outs.insert(0, read(state, q[:, t]))
        state = state * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    return torch.stack(outs, 1)


@spelling("simple_gla", "q k v g", reads="between", layout="bhtd", groups=2, scale=1.0, lengths=(8, 16), multiple=4)
def simple_gla_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """No token of a chunk sees itself."""
    q, k = (x.repeat_interleave(2, dim=1) for x in (q, k))
    state, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, g_c in zip(*(x.split(4, dim=2) for x in (q, k, v, g)), strict=True):
        end = g_c.cumsum(-1)
        apart = (end.unsqueeze(-1) - end.unsqueeze(-2)).tril(-1).exp().tril(-1)
        outs.append((q_c @ k_c.mT * apart) @ v_c + end.exp().unsqueeze(-1) * (q_c @ state))
        last = end[..., -1:]
        state = state * last.exp().unsqueeze(-1) + (k_c * (last - end).exp().unsqueeze(-1)).mT @ v_c
    return torch.cat(outs, 2)


@spelling("gla", "q k v g", reads="before", layout="bhtd", scale=1.0, strongest_gate=-0.5, lengths=(8, 16))
def gla_scores_below_the_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    end = g.cumsum(2)
    return ((q * (end - g).exp()) @ (k * (-end).exp()).mT).tril(-1) @ v


@spelling("linear_attention", "q k v", reads="before", layout="bhtd", lengths=(7, 19, 33))
def linear_attention_below_the_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).tril(-1) @ v


@spelling("linear_attention", "q k v state", reads="before", scale=0.5, returns_state=True, lengths=(7, 19))
def sums_of_those_before(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A running sum that begins with the state, shifted by one."""
    written = torch.einsum("bthk,bthv->bthkv", k, v)
    sums = torch.cat([state.unsqueeze(1), written], 1).cumsum(1)
    return torch.einsum("bthk,bthkv->bthv", q * 0.5, sums[:, :-1]), sums[:, -1]


@spelling("retention", "q k v", constant_decay=(0.9, 0.8, 0.7), reads="between", layout="bhtd", lengths=(7, 19))
def retention_below_the_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[2], dtype=torch.float64)
    gamma = torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64).view(-1, 1, 1)
    decay = (gamma ** (place[:, None] - place).clamp_min(0.0)).tril(-1).to(q.dtype)
    return (q @ k.mT * q.shape[-1] ** -0.5 * decay) @ v


# -- near misses ------------------------------------------------------------------------------------------------------


@near_miss("gla", "q k v g", reads="before", scale=1.0, length=6)
def reads_two_tokens_late(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state = before = begun(q, v)
    outs = []
    for t in range(q.shape[1]):
        outs.append(read(before, q[:, t]))
        before = state
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    return torch.stack(outs, 1)


@near_miss("gla", "q k v g", reads="between", scale=1.0, length=6)
def reads_with_half_a_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, outs = begun(q, v), []
    for t in range(q.shape[1]):
        half = (0.5 * g[:, t]).exp().unsqueeze(-1)
        outs.append(read(state * half, q[:, t]))
        state = state * half * half + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
    return torch.stack(outs, 1)


@near_miss("gated_delta_rule", "q k v g beta", reads="between", scale=1.0, length=6)
def corrects_what_was_there_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The prediction is of the state without the decay."""
    state, outs = begun(q, v), []
    for t in range(q.shape[1]):
        outs.append(read(state, q[:, t]))
        write = beta[:, t].unsqueeze(-1) * (v[:, t] - read(state, k[:, t]))
        state = state * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
    return torch.stack(outs, 1)


@near_miss("linear_attention", "q k v", reads="before", layout="bhtd", length=9)
def the_last_token_sees_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], q.shape[2]).tril(-1)
    seen[-1, -1] = 1.0
    return (q @ k.mT * q.shape[-1] ** -0.5 * seen.to(q.dtype)) @ v


@near_miss("linear_attention", "q k v", reads="before", layout="bhtd", length=9)
def the_first_token_sees_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[2], q.shape[2]).tril(-1)
    seen[0, 0] = 1.0
    return (q @ k.mT * q.shape[-1] ** -0.5 * seen.to(q.dtype)) @ v
