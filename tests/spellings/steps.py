"""One token against a cached state: functional, in place, with a time axis of one and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.spellings.registry import spelling

ONE: dict[str, Any] = {"mode": "step", "lengths": (1,)}
BF16 = (torch.float32, torch.bfloat16)


@spelling("kda", "q k v g beta state", layout="bhd", returns_state=True, **ONE)
def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * g.exp()[..., None]
    delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state = state + torch.einsum("bhk,bhv->bhkv", k, delta)
    return torch.einsum("bhkv,bhk->bhv", state, q) * q.shape[-1] ** -0.5, state


@spelling("kda", "q k v g beta state", returns_state=True, **ONE)
def kda_step_time_axis(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, 1, H, D], multiply and sum, output written into zeros."""
    out = torch.zeros_like(v)
    q = q * (1 / q.shape[-1] ** 0.5)
    state = state * g[:, 0][..., None].exp()
    memory = (state * k[:, 0][..., None]).sum(dim=-2)
    state = state + k[:, 0].unsqueeze(-1) * ((v[:, 0] - memory) * beta[:, 0][..., None]).unsqueeze(-2)
    out[:, 0] = (state * q[:, 0].unsqueeze(-1)).sum(dim=-2)
    return out, state


@spelling("kda", "q k v g beta state", layout="bhd", in_place=True, **ONE)
def kda_step_copy(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Computed functionally, then copied into the cache, as static caches want it."""
    new = state * g.exp().unsqueeze(-1)
    new = new + (beta.unsqueeze(-1) * k).unsqueeze(-1) * (v - (k.unsqueeze(-2) @ new).squeeze(-2)).unsqueeze(-2)
    state.copy_(new)
    return (q.unsqueeze(-2) @ new).squeeze(-2) * q.shape[-1] ** -0.5


@spelling("gated_delta_rule", "q k v g beta state", layout="bhd", in_place=True, scale=1.0, **ONE)
def gdn_step_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    state.mul_(g.exp()[..., None, None])
    delta = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", state, k))
    state.add_(k[..., :, None] * delta[..., None, :])
    return torch.einsum("bhkv,bhk->bhv", state, q)


@spelling("gated_delta_rule", "q k v alpha beta state", state_layout="vk", returns_state=True, scale=1.0, **ONE)
def gdn_step_factor_value_key(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, alpha, beta = (x.squeeze(1) for x in (q, k, v, alpha, beta))
    s = alpha[:, :, None, None] * state
    s = s + (beta[..., None] * (v - (s @ k[..., None])[..., 0]))[..., None] @ k[..., None, :]
    return (s @ q[..., None])[..., 0].unsqueeze(1), s


@spelling(
    "gated_delta_rule",
    "q k v g beta state",
    groups=2,
    returns_state=True,
    state_dtype=torch.float32,
    dtypes=BF16,
    **ONE,
)
def gdn_step_grouped_upcast(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = v.dtype
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    q, k, v, g, beta = (x.transpose(1, 2).contiguous().float() for x in (q, k, v, g, beta))
    state = state * g[:, :, 0].exp().unsqueeze(-1).unsqueeze(-1)
    delta = (v[:, :, 0] - (state * k[:, :, 0].unsqueeze(-1)).sum(-2)) * beta[:, :, 0].unsqueeze(-1)
    state = state + k[:, :, 0].unsqueeze(-1) * delta.unsqueeze(-2)
    out = (state * (q[:, :, 0] * q.shape[-1] ** -0.5).unsqueeze(-1)).sum(-2)
    return out.unsqueeze(1).to(dtype), state


@spelling("delta_rule", "q k v beta state", layout="bhd", returns_state=True, scale=1.0, **ONE)
def delta_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    old = (k.unsqueeze(-2) @ state).squeeze(-2)
    state = torch.baddbmm(
        state.flatten(0, 1), k.reshape(-1, k.shape[-1], 1), (beta[..., None] * (v - old)).reshape(-1, 1, v.shape[-1])
    ).view_as(state)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


@spelling("gla", "q k v g state", layout="bhd", in_place=True, **ONE)
def gla_step_mul_add(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return (state * (q * q.shape[-1] ** -0.5).unsqueeze(-1)).sum(-2)


@spelling("simple_gla", "x dt a b c state", layout="bhd", state_layout="vk", in_place=True, scale=1.0, **ONE)
def mamba2_step_copy(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """[B, H, P, N] state, dA broadcast to the full state, the read as one bmm over B * H."""
    batch, heads, p_dim = x.shape
    d_a = torch.exp(dt[..., None, None] * a[:, None, None].expand(heads, p_dim, b.shape[-1]))
    d_bx = (dt[..., None, None] * b[..., None, :]) * x[..., None]
    state.copy_(state * d_a + d_bx)
    h = state.reshape(batch * heads, p_dim, -1)
    return torch.bmm(h, c.reshape(batch * heads, -1, 1)).view(batch, heads, p_dim)


@spelling("simple_gla", "q k v g state", returns_state=True, **ONE)
def simple_gla_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = state * g[:, 0, :, None, None].exp() + torch.einsum("bthk,bthv->bhkv", k, v)
    return torch.einsum("bthk,bhkv->bthv", q, state) * q.shape[-1] ** -0.5, state


@spelling("retention", "q k v gamma state", layout="bhtd", returns_state=True, scale=1.0, **ONE)
def retention_step(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state = gamma[:, None, None] * state + k.mT @ v
    return q @ state, state


@spelling("linear_attention", "q k v state", layout="bhd", in_place=True, scale=1.0, **ONE)
def linear_step_iadd(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    state += k[..., None] * v[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q)


@spelling(
    "kda",
    "q k v g beta state",
    layout="bhd",
    in_place=True,
    state_dtype=torch.bfloat16,
    dtypes=(torch.bfloat16,),
    **ONE,
)
def kda_step_bf16_cache(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Arithmetic in fp32, the cache kept in bf16: the output is read before the state is rounded."""
    q32, k32, v32, g32, beta32, s = (x.float() for x in (q, k, v, g, beta, state))
    s = s * g32.exp()[..., None]
    s = s + k32[..., None] * (beta32[..., None] * (v32 - (s * k32[..., None]).sum(-2)))[..., None, :]
    state.copy_(s)
    return ((s * q32[..., None]).sum(-2) * q.shape[-1] ** -0.5).to(v.dtype)


@spelling("gated_delta_rule", "q k v g beta state", returns_state=True, l2norm_eps=1e-6, **ONE)
def gdn_step_transformers_4_57(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The older loop of one turn: its buffer leaves through views, for one token's transpose is contiguous already."""
    dtype = q.dtype
    q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k, v, beta, g = (
        x.transpose(1, 2).contiguous().to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, beta, g)
    )
    q = q * (1 / (q.shape[-1] ** 0.5))
    out = torch.zeros(v.shape).to(v)
    state = state.to(v)
    for i in range(v.shape[2]):
        state = state * g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        old = (state * k[:, :, i].unsqueeze(-1)).sum(dim=-2)
        fresh = (v[:, :, i] - old) * beta[:, :, i].unsqueeze(-1)
        state = state + k[:, :, i].unsqueeze(-1) * fresh.unsqueeze(-2)
        out[:, :, i] = (state * q[:, :, i].unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous().to(dtype), state
