"""The recurrence with what stands before it in models: l2norm, gate activations, sigmoid, grouped heads, casts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.chunked_delta import gdn_solve_triangular, kda_solve_triangular
from tests.spellings.chunked_delta_inverse import kda_row_loop
from tests.spellings.recurrent_delta import gdn_bhtd_setitem, kda_einsum_list_stack, kda_multiply_sum_setitem
from tests.spellings.registry import spelling

BF16 = (torch.float32, torch.bfloat16)
CHUNKED = (24, 16, 69)


def l2norm_rsqrt(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


def l2norm_sqrt(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + eps)


@spelling(
    "gated_delta_rule",
    "q k v gate_logit a_log dt_bias beta_logit",
    l2norm_eps=1e-6,
    activation="softplus",
    lengths=CHUNKED,
)
def gdn_upstream_rsqrt_softplus(
    q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor, a_log: Tensor, dt_bias: Tensor, beta_logit: Tensor
) -> Tensor:
    g = -a_log.exp() * F.softplus(gate_logit + dt_bias)
    return gdn_solve_triangular(l2norm_rsqrt(q), l2norm_rsqrt(k), v, g, beta_logit.sigmoid())


@spelling("kda", "q k v gate_logit a_log dt_bias beta_logit", l2norm_eps=1e-6, activation="softplus", lengths=CHUNKED)
def kda_upstream_sqrt_where_softplus(
    q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor, a_log: Tensor, dt_bias: Tensor, beta_logit: Tensor
) -> Tensor:
    x = gate_logit + dt_bias
    g = -torch.exp(a_log).view(1, 1, -1, 1) * torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
    return kda_row_loop(l2norm_sqrt(q), l2norm_sqrt(k), v, g, torch.sigmoid(beta_logit))[0]


@spelling("kda", "q k v gate_logit a_log dt_bias beta", activation="sigmoid", gate_scale=-5.0, lengths=CHUNKED)
def kda_upstream_bounded_sigmoid(
    q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor, a_log: Tensor, dt_bias: Tensor, beta: Tensor
) -> Tensor:
    g = -5.0 * torch.sigmoid(a_log.exp()[:, None] * (gate_logit + dt_bias))
    zero = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return kda_solve_triangular(q, k, v, g, beta, zero)[0]


@spelling("gla", "q k v gate_logit", activation="logsigmoid", gate_scale=1 / 16, lengths=(7, 19))
def gla_upstream_logsigmoid(q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor) -> Tensor:
    decay = (F.logsigmoid(gate_logit) / 16).exp()
    s = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        s = s * decay[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ s).squeeze(2))
    return torch.stack(outs, 1) / q.shape[-1] ** 0.5


@spelling("simple_gla", "q k v gate_logit", activation="logsigmoid", lengths=(17, 40))
def simple_gla_upstream_logsigmoid_parallel(q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor) -> Tensor:
    cum = F.logsigmoid(gate_logit).cumsum(1).transpose(1, 2)
    decay = (cum[..., None] - cum[..., None, :]).tril().exp().tril()
    return torch.einsum("bihd,bjhd,bhij,bjhv->bihv", q, k, decay, v) * q.shape[-1] ** -0.5


@spelling(
    "gated_delta_rule",
    "q k v gate_logit a_log dt_bias beta_logit",
    l2norm_eps=1e-6,
    activation="softplus",
    dtypes=(torch.float32,),
    lengths=(7, 19),
)
def gdn_upstream_recurrent(
    q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor, a_log: Tensor, dt_bias: Tensor, beta_logit: Tensor
) -> Tensor:
    g = -a_log.float().exp().to(q.dtype) * F.softplus(gate_logit + dt_bias)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    heads_first = (x.transpose(1, 2) for x in (q, k, v, g, torch.sigmoid(beta_logit)))
    return gdn_bhtd_setitem(*heads_first).transpose(1, 2)


@spelling("gated_delta_rule", "q k v g beta", groups=2, lengths=CHUNKED)
def gdn_grouped_repeat_interleave(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    groups = v.shape[2] // q.shape[2]
    return gdn_solve_triangular(q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2), v, g, beta)


@spelling("kda", "q k v g beta", groups=2, lengths=(7, 19))
def kda_grouped_expand_reshape(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    batch, length, heads, k_dim = q.shape
    q, k = (
        x[:, :, :, None].expand(batch, length, heads, 2, k_dim).reshape(batch, length, 2 * heads, k_dim) for x in (q, k)
    )
    return kda_multiply_sum_setitem(q, k, v, g, beta)


@spelling("simple_gla", "x dt a b c", scale=1.0, groups=3, lengths=(7, 19))
def mamba2_grouped_loop(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """B and C shared by three heads, kept apart as a [groups, heads in the group] pair of axes."""
    groups = b.shape[2]
    x, dt = x.unflatten(2, (groups, -1)), dt.unflatten(2, (groups, -1))
    a = a.view(groups, -1)
    h = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    ys = []
    for t in range(x.shape[1]):
        h = h * (dt[:, t] * a).exp()[..., None, None]
        h = h + (dt[:, t, :, :, None] * x[:, t])[..., None] * b[:, t, :, None, None, :]
        ys.append(torch.einsum("bgrpn,bgn->bgrp", h, c[:, t]))
    return torch.stack(ys, 1).flatten(2, 3)


@spelling("gated_delta_rule", "q k v g beta", dtypes=BF16, lengths=CHUNKED)
def gdn_upcast(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    dtype = q.dtype
    q, k, v, g, beta = (x.to(torch.float32) for x in (q, k, v, g, beta))
    return gdn_solve_triangular(q, k, v, g, beta).to(dtype)


@spelling("kda", "q k v g beta state", returns_state=True, state_dtype=torch.float32, dtypes=BF16, lengths=(7, 19))
def kda_upcast_fp32_state(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    o, final = kda_einsum_list_stack(q.float(), k.float(), v.float(), g.float(), beta.float(), state)
    return o.type_as(v), final


@spelling("kda", "q k v g beta state", returns_state=True, dtypes=BF16, lengths=CHUNKED)
def kda_upcast_state_cast_back(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    o, final = kda_solve_triangular(*(x.float() for x in (q, k, v, g, beta, state)))
    return o.to(q.dtype), final.to(state.dtype)


@spelling("linear_attention", "q k v", scale=1.0, dtypes=BF16, lengths=(17, 40))
def linear_parallel_upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v32 = (x.permute(0, 2, 1, 3).float() for x in (q, k, v))
    return ((q @ k.transpose(-2, -1)).tril() @ v32).permute(0, 2, 1, 3).to(v.dtype)


@spelling("delta_rule", "q k v beta_logit", l2norm_eps=1e-5, scale=1.0, lengths=(7, 19))
def delta_upstream_key_scaled(q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor) -> Tensor:
    """The scale sits on nothing; l2norm by torch.linalg-free multiply, another eps, beta folded into the key."""
    q, k = l2norm_rsqrt(q, 1e-5), l2norm_rsqrt(k, 1e-5)
    k_beta = k * beta_logit.sigmoid()[..., None]
    s, outs = 0, []
    for t in range(q.shape[1]):
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], s) if t else torch.zeros_like(v[:, 0])
        s = s + k_beta[:, t].unsqueeze(-1) * (v[:, t] - old).unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(outs, 1)


@spelling("simple_gla", "q k v g", layout="bhtd", lengths=(7, 19))
def simple_gla_scale_on_key(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    k = k * k.shape[-1] ** -0.5
    s = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for t in range(q.shape[2]):
        s = g[:, :, t].exp()[..., None, None] * s + k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, :, t]))
    return torch.stack(outs, 2)
