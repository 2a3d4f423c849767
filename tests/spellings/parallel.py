"""Closed forms: quadratic attention with a decay mask, Mamba-2's segment sums, the parallel delta rule."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.registry import spelling, variant

LENGTHS = (17, 2, 40)


@spelling("linear_attention", "q k v", layout="bhtd", lengths=LENGTHS)
def linear_parallel_tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).tril() @ v * q.shape[-1] ** -0.5


@spelling("linear_attention", "q k v", scale=1.0, lengths=LENGTHS)
def linear_parallel_mask_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    steps = torch.arange(q.shape[1])
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scores = scores.masked_fill(steps[None, :] > steps[:, None], 0.0)
    return torch.einsum("bhij,bjhv->bihv", scores, v)


@spelling("linear_attention", "q k v", scale=1.0, lengths=LENGTHS)
def linear_cumsum_outer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All prefix states at once: cumsum of outer products."""
    states = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(dim=1)
    return torch.einsum("bthk,bthkv->bthv", q, states)


@spelling("retention", "q k v gamma", layout="bhtd", lengths=LENGTHS)
def retention_parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    n = torch.arange(q.shape[2], dtype=q.dtype)
    distance = n[:, None] - n[None, :]
    mask = torch.where(distance >= 0, gamma.view(-1, 1, 1) ** distance.clamp(min=0), 0.0)
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) * mask) @ v


@spelling(
    "retention", "q k v", layout="bhtd", constant_decay=tuple(1 - 2.0 ** (-5 - h) for h in range(3)), lengths=LENGTHS
)
def retention_parallel_fixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """exp2 of distances times log2(gamma), times a 0/1 comparison; three-operand einsum."""
    heads, length = q.shape[1], q.shape[2]
    s = (1 - torch.pow(2.0, -5.0 - torch.arange(heads, dtype=q.dtype))).log2()
    n = torch.arange(length, dtype=q.dtype)
    d = torch.exp2((n.unsqueeze(-1) - n) * s.view(-1, 1, 1)) * n.unsqueeze(-1).ge(n)
    scores = torch.einsum("bhqd,bhkd,hqk->bhqk", q * q.shape[-1] ** -0.5, k, d)
    return torch.einsum("bhqk,bhkd->bhqd", scores, v)


@spelling("simple_gla", "q k v g", lengths=LENGTHS)
def simple_gla_parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    g = g.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    return ((q @ k.mT) * q.shape[-1] ** -0.5 * decay @ v).transpose(1, 2)


@spelling("simple_gla", "q k v g", layout="bhtd", scale=1.0, strongest_gate=-0.4, lengths=LENGTHS)
def simple_gla_parallel_factored(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    cum = g.cumsum(-1).unsqueeze(-1)
    keep = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril()
    return ((q * cum.exp()) @ (k * (-cum).exp()).transpose(2, 3) * keep) @ v


@spelling("gla", "q k v g", layout="bhtd", strongest_gate=-0.4, lengths=LENGTHS)
def gla_parallel_factored(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    cum = torch.cumsum(g, dim=2)
    scores = torch.einsum("bhik,bhjk->bhij", q * cum.exp(), k * torch.exp(-cum)) * q.shape[-1] ** -0.5
    future = torch.triu(torch.ones_like(scores[0, 0], dtype=torch.bool), 1)
    return scores.masked_fill(future, 0) @ v


@spelling("delta_rule", "q k v beta", layout="bhtd", lengths=LENGTHS)
def delta_parallel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The whole sequence as a single chunk: O = tril(Q K^T) (I + tril(diag(b) K K^T, -1))^-1 diag(b) V."""
    eye = torch.eye(q.shape[2], dtype=q.dtype)
    lower = (beta.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    new = torch.linalg.solve_triangular(eye + lower, beta.unsqueeze(-1) * v, upper=False)
    return (q @ k.mT).tril() @ new * q.shape[-1] ** -0.5


@spelling("gated_delta_rule", "q k v g beta", layout="bhtd", scale=1.0, lengths=LENGTHS)
def gdn_parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    cum = g.cumsum(-1)
    decay = torch.exp((cum[..., None] - cum[..., None, :]).tril()).tril()
    lower = (beta.unsqueeze(-1) * (k @ k.mT) * decay).tril(-1)
    inverse = torch.linalg.inv(torch.eye(q.shape[2], dtype=q.dtype) + lower)
    return (q @ k.mT * decay) @ (inverse @ (beta.unsqueeze(-1) * v))


def segment_sum(x: Tensor) -> Tensor:
    """[..., T] -> [..., T, T]: the sum of x over (j, i] below the diagonal, -inf above; the numerically stable text."""
    size = x.size(-1)
    x = x[..., None].expand(*x.size(), size)
    x = x.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool), diagonal=-1), 0)
    sums = torch.cumsum(x, dim=-2)
    return sums.masked_fill(~torch.tril(torch.ones(size, size, dtype=torch.bool), diagonal=0), -torch.inf)


@spelling(
    "simple_gla", "x dt a b c", scale=1.0, returns_state=True, state_layout="vk", multiple=16, lengths=(48, 16, 32)
)
def mamba2_ssd_minimal(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """State-space duality in four einsums, chunks joined by a second segment sum (Mamba-2, listing 1's way)."""
    x, log_a = x * dt.unsqueeze(-1), dt * a
    x, b, c = (t.unflatten(1, (-1, chunk)) for t in (x, b, c))
    log_a = log_a.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)
    cum = torch.cumsum(log_a, dim=-1)
    inside = torch.exp(segment_sum(log_a))
    y_diagonal = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, inside, x)
    to_end = torch.exp(cum[:, :, :, -1:] - cum)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, to_end, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segment_sum(F.pad(cum[:, :, :, -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)
    states, final = states[:, :-1], states[:, -1]
    y_off = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(cum))
    return (y_diagonal + y_off).flatten(1, 2), final


variant("mamba2_ssd_minimal", "chunk64", partial(mamba2_ssd_minimal, chunk=64), lengths=(128, 64))


@spelling("simple_gla", "x dt a b c", scale=1.0, lengths=(40, 16, 13, 64))
def mamba2_ssd_padded_products(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The same without einsum: broadcast products, sums, permutes and padding, as the slow paths of libraries do."""
    length, chunk = x.shape[1], 16
    pad = -length % chunk
    x = x * dt[..., None]
    log_a = F.pad(a * dt, (0, 0, 0, pad))
    x, b, c = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, b, c))
    x, b, c = (t.reshape(t.shape[0], -1, chunk, t.shape[2], t.shape[3]) for t in (x, b, c))
    log_a = log_a.reshape(log_a.shape[0], -1, chunk, log_a.shape[-1]).permute(0, 3, 1, 2)
    cum = torch.cumsum(log_a, dim=-1)
    inside = torch.exp(segment_sum(log_a))
    gram = (c[:, :, :, None, :, :] * b[:, :, None, :, :, :]).sum(dim=-1)
    m = (gram[..., None] * inside.permute(0, 2, 3, 4, 1)[..., None]).sum(dim=-1)
    y_diagonal = (m[..., None] * x[:, :, None]).sum(dim=3)
    to_end = torch.exp(cum[:, :, :, -1:] - cum)
    b_decayed = b * to_end.permute(0, 2, 3, 1)[..., None]
    states = (b_decayed[..., None, :] * x[..., None]).sum(dim=2)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segment_sum(F.pad(cum[:, :, :, -1], (1, 0)))).transpose(1, 3)
    states = (between[..., None, None] * states[:, :, None, ...]).sum(dim=1)[:, :-1]
    y_off = (c[..., None, :] * states[:, :, None, ...]).sum(-1) * torch.exp(cum).permute(0, 2, 3, 1)[..., None]
    return (y_diagonal + y_off).flatten(1, 2)[:, :length]
