"""Gated DeltaProduct: the state decays once a token, is written several times and then read; near misses."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.near_misses import near_miss
from tests.spellings.registry import spelling, variant

BF16 = (torch.float32, torch.bfloat16)


def zeros(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(q.shape[0], v.shape[-2], q.shape[-1], v.shape[-1])


def write(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    old = (state * k.unsqueeze(-1)).sum(-2)
    return state + (beta.unsqueeze(-1) * (v - old)).unsqueeze(-2) * k.unsqueeze(-1)


def read(state: Tensor, q: Tensor) -> Tensor:
    return (state * q.unsqueeze(-1)).sum(-2)


def product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, writes: int = 2
) -> tuple[Tensor, Tensor]:
    """Token by token, write by write; ``g`` is ``[B, T, H]`` or ``[B, T, H, K]``."""
    outs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].exp().reshape(*state.shape[:2], -1, 1)
        for row in range(writes * t, writes * (t + 1)):
            state = write(state, k[:, row], v[:, row], beta[:, row])
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, 1), state


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, writes=2, lengths=(5, 8))
def product_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return product(q, k, v, g, beta, zeros(q, v))[0]


@spelling(
    "gated_delta_rule", "q k v g beta state", writes=3, returns_state=True, lengths=(4, 8), dtypes=BF16,
    state_dtype=torch.float32,
)  # fmt: skip
def product_of_three(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    scaled = q.float() * q.shape[-1] ** -0.5
    o, last = product(scaled, k.float(), v.float(), g.float(), beta.float(), state, 3)
    return o.to(q.dtype), last


@spelling("delta_rule", "q k v beta state", scale=1.0, writes=2, returns_state=True, lengths=(5, 8))
def product_without_decay(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return product(q, k, v, None, beta, state)


@spelling("kda", "q k v g beta", scale=1.0, writes=2, lengths=(5, 8))
def product_gate_per_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return product(q, k, v, g, beta, zeros(q, v))[0]


@spelling("gated_delta_rule", "q k v g beta state", scale=1.0, writes=3, returns_state=True, lengths=(1,))
def product_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: a sequence of its writes."""
    return product(q, k, v, g, beta, state, 3)


@spelling("gated_delta_rule", "q k v alpha beta", scale=1.0, writes=2, apart=True, lengths=(5, 8))
def product_apart(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The writes of a token in a dimension of their own, the gate as a factor."""
    state, outs = zeros(q, v), []
    for q_t, k_t, v_t, a_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, alpha, beta)), strict=True):
        state = state * a_t[..., None, None]
        for j in range(2):
            old = torch.einsum("bhkv,bhk->bhv", state, k_t[:, j])
            state = state + torch.einsum("bhk,bhv->bhkv", k_t[:, j], b_t[:, j, :, None] * (v_t[:, j] - old))
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(outs, 1)


@spelling("gated_delta_rule", "q k v g beta_logit", writes=2, l2norm_eps=1e-6, groups=2, lengths=(5, 8))
def product_layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta_logit: Tensor) -> Tensor:
    """With what stands in front of it in a layer: norms, repeated heads, a sigmoid."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(2, 2) for x in (q * q.shape[-1] ** -0.5, k))
    return product(q, k, v, g, beta_logit.sigmoid(), zeros(q, v))[0]


def spread(x: Tensor, place: int) -> Tensor:
    """One row a token as one of two a token, zero in the other."""
    every = x.new_zeros(x.shape[0], x.shape[1], 2, *x.shape[2:])
    every[:, :, place] = x
    return every.flatten(1, 2)


def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The gated delta rule in chunks, ``[B, H, T, D]``: a triangular solve in each."""
    outs = []
    for start in range(0, q.shape[2], size):
        q_c, k_c, v_c, g_c, b_c = (x[:, :, start : start + size] for x in (q, k, v, g, beta))
        end = g_c.cumsum(2)
        decay = (end[..., :, None] - end[..., None, :]).tril().exp().tril()
        erased = (b_c[..., None] * k_c @ k_c.mT * decay).tril(-1) + torch.eye(size, dtype=q.dtype)
        inverse = torch.linalg.solve_triangular(erased, torch.eye(size, dtype=q.dtype), upper=False)
        new = inverse @ (b_c[..., None] * (v_c - (k_c * end.exp()[..., None]) @ state))
        outs.append((q_c * end.exp()[..., None]) @ state + (q_c @ k_c.mT * decay) @ new)
        last = end[:, :, -1:, None]
        state = state * last.exp() + (k_c * (last - end[..., None]).exp()).mT @ new
    return torch.cat(outs, 2), state


def product_chunks_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, size: int, *, decays: int = 0, reads: int = 1
) -> Tensor:
    """Queries and gates between zeros, every second output read: the state decays at one of a token's writes, and is
    read after one.
    """
    q, g = spread(q, reads), spread(g, decays)
    state = zeros(q, v)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    return chunks(q, k, v, g, beta, state, size)[0].transpose(1, 2)[:, reads::2]


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, writes=2, strongest_gate=-0.5, lengths=(4, 8), multiple=4)
def product_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return product_chunks_of(q, k, v, g, beta, 8)


variant("product_loop", "strong_gate", product_loop, strongest_gate=-1000.0, lengths=(6,))


# -- near misses ------------------------------------------------------------------------------------------------------


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=5, writes=2)
def product_read_before_the_last_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        state = write(state, k[:, 2 * t], v[:, 2 * t], beta[:, 2 * t])
        outs.append(read(state, q[:, t]))
        state = write(state, k[:, 2 * t + 1], v[:, 2 * t + 1], beta[:, 2 * t + 1])
    return torch.stack(outs, 1)


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=5, writes=2)
def product_decays_before_every_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        for row in (2 * t, 2 * t + 1):
            state = write(state * g[:, t].exp()[..., None, None], k[:, row], v[:, row], beta[:, row])
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, 1)


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=5, writes=2)
def product_decays_between_the_writes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        state = write(state, k[:, 2 * t], v[:, 2 * t], beta[:, 2 * t]) * g[:, t].exp()[..., None, None]
        state = write(state, k[:, 2 * t + 1], v[:, 2 * t + 1], beta[:, 2 * t + 1])
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, 1)


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=5, writes=2, expect="either")
def product_writes_of_the_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """A token's second write is in the second half of all, not next to its first."""
    order = torch.arange(2 * q.shape[1]).view(2, -1).t().flatten()
    k, v, beta = (x[:, order] for x in (k, v, beta))
    return product(q, k, v, g, beta, zeros(q, v))[0]


@near_miss("delta_rule", "q k v beta", scale=1.0, length=5, writes=2)
def product_of_householders_at_once(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Both writes of a token erase what was there before either."""
    state, outs = zeros(q, v), []
    for t in range(q.shape[1]):
        first, second = (write(state, k[:, row], v[:, row], beta[:, row]) for row in (2 * t, 2 * t + 1))
        state = first + second - state
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, 1)


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=4, writes=3)
def product_one_write_forgotten(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Writes are counted by two where there are three a token, so that they do not come out even."""
    return product(q, k, v, g, beta, zeros(q, v), 2)[0]


@near_miss(
    "gated_delta_rule", "q k v g beta", scale=1.0, length=4, strongest_gate=-0.5, writes=2, multiple=4, expect="either"
)
def product_chunks_read_after_the_first_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return product_chunks_of(q, k, v, g, beta, 8, reads=0)


@near_miss(
    "gated_delta_rule", "q k v g beta", scale=1.0, length=4, strongest_gate=-0.5, writes=2, multiple=4, expect="either"
)
def product_chunks_decay_at_the_last_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return product_chunks_of(q, k, v, g, beta, 8, decays=1)


@near_miss("kda", "q k v g beta state", scale=1.0, length=4, writes=2, expect="either")
def product_with_one_gate_for_two_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Every second token decays, by what was meant for the one before."""
    late = torch.stack([torch.zeros_like(g[:, ::2]), g[:, ::2]], 2).flatten(1, 2)
    return product(q, k, v, late, beta, state)[0]
