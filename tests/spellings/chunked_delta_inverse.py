"""Chunked forms with a delta term whose inverse is spelled out: row by row, or as a Neumann product."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.chunked_delta import lengths
from tests.spellings.registry import spelling, variant


@spelling("gated_delta_rule", "q k v g beta", returns_state=True, lengths=lengths(16))
def gdn_row_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 16) -> tuple[Tensor, Tensor]:
    """The older transformers way: a loop over rows with setitem, decays re-exponentiated inside the chunk loop."""
    q, k, v, beta, g = (x.transpose(1, 2).contiguous() for x in (q, k, v, beta, g))
    batch, heads, length, k_dim = k.shape
    pad = (chunk - length % chunk) % chunk
    q, k, v = F.pad(q, (0, 0, 0, pad)), F.pad(k, (0, 0, 0, pad)), F.pad(v, (0, 0, 0, pad))
    beta, g = F.pad(beta, (0, pad)), F.pad(g, (0, pad))
    q = q * (1 / k_dim**0.5)
    v_beta, k_beta = v * beta.unsqueeze(-1), k * beta.unsqueeze(-1)
    q, k, v_beta, k_beta = (x.reshape(batch, heads, -1, chunk, x.shape[-1]) for x in (q, k, v_beta, k_beta))
    g = g.reshape(batch, heads, -1, chunk).cumsum(dim=-1)
    diagonal = torch.triu(torch.ones(chunk, chunk, dtype=torch.bool), diagonal=0)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    inverse = -((k_beta @ k.transpose(-1, -2)) * decay).masked_fill(diagonal, 0)
    for i in range(1, chunk):
        row, above = inverse[..., i, :i].clone(), inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
    inverse = inverse + torch.eye(chunk, dtype=inverse.dtype)
    u = inverse @ v_beta
    k_decayed = inverse @ (k_beta * g.exp().unsqueeze(-1))
    state = torch.zeros(batch, heads, k_dim, v.shape[-1]).to(u)
    out = torch.zeros_like(u)
    future = torch.triu(torch.ones(chunk, chunk, dtype=torch.bool), diagonal=1)
    for i in range(q.shape[2]):
        q_i, k_i = q[:, :, i], k[:, :, i]
        attn = (q_i @ k_i.transpose(-1, -2) * decay[:, :, i]).masked_fill_(future, 0)
        fresh = u[:, :, i] - k_decayed[:, :, i] @ state
        out[:, :, i] = (q_i * g[:, :, i, :, None].exp()) @ state + attn @ fresh
        state = (
            state * g[:, :, i, -1, None, None].exp()
            + (k_i * (g[:, :, i, -1, None] - g[:, :, i]).exp()[..., None]).transpose(-1, -2) @ fresh
        )
    return out.reshape(batch, heads, -1, v.shape[-1])[:, :, :length].transpose(1, 2).contiguous(), state


variant("gdn_row_loop", "chunk64", partial(gdn_row_loop, chunk=64), lengths=(100, 64))


@spelling("kda", "q k v g beta", returns_state=True, lengths=lengths(16))
def kda_row_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 16) -> tuple[Tensor, Tensor]:
    """Multiply-and-sum over a materialised [C, C, K] decay, rows of the inverse by setitem."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    length, k_dim = q.shape[2], q.shape[3]
    pad = (-length) % chunk
    q, k, v, g = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, pad)).unflatten(2, (-1, chunk))
    cum = g.cumsum(dim=-2)
    future = torch.triu(torch.ones(chunk, chunk, dtype=torch.bool), 1)
    gap = (cum.unsqueeze(-2) - cum.unsqueeze(-3)).masked_fill(future[:, :, None], float("-inf")).exp()
    k_beta = k * beta[..., None]
    a = (k_beta.unsqueeze(-2) * k.unsqueeze(-3) * gap).sum(-1).tril(-1).neg()
    for i in range(1, chunk):
        a[..., i, :i] = a[..., i, :i] + (a[..., i, :i].clone().unsqueeze(-1) * a[..., :i, :i].clone()).sum(-2)
    a = a + torch.eye(chunk, dtype=a.dtype)
    u, w = a @ (v * beta[..., None]), a @ (k_beta * cum.exp())
    scores = ((q * k_dim**-0.5).unsqueeze(-2) * k.unsqueeze(-3) * gap).sum(-1)
    state = q.new_zeros(*q.shape[:2], k_dim, v.shape[-1])
    out = torch.empty_like(u)
    for n in range(q.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ state
        out[:, :, n] = (q[:, :, n] * k_dim**-0.5 * cum[:, :, n].exp()) @ state + scores[:, :, n] @ fresh
        last = cum[:, :, n, -1]
        state = state * last.exp().unsqueeze(-1) + (k[:, :, n] * (last[:, :, None] - cum[:, :, n]).exp()).mT @ fresh
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


@spelling("kda", "q k v g beta", scale=1.0, multiple=16, lengths=(32, 16, 80))
def kda_neumann(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)(I + L^8) for a strictly lower L of 16 rows; columns looped."""
    batch, length, heads, k_dim = q.shape
    blocks = lambda x: x.reshape(batch, -1, 16, heads, x.shape[-1]).transpose(2, 3)  # noqa: E731
    q, k, v, g, beta = blocks(q), blocks(k), blocks(v), blocks(g).cumsum(-2), blocks(beta.unsqueeze(-1))
    a_kk = torch.zeros(*k.shape[:-1], 16, dtype=q.dtype)
    a_qk = torch.zeros(*k.shape[:-1], 16, dtype=q.dtype)
    for j in range(16):
        k_j, g_j = k[..., j, :], g[..., j : j + 1, :]
        a_kk[..., j] = torch.einsum("...cd,...d->...c", k * (g - g_j).exp(), k_j)
        a_qk[..., j] = torch.einsum("...cd,...d->...c", q * (g - g_j).exp(), k_j)
    rows = torch.arange(16)
    lower = a_kk.masked_fill(rows[:, None] <= rows, 0) * beta
    a_qk = a_qk.masked_fill(rows[:, None] < rows, 0)
    eye = torch.eye(16, dtype=q.dtype)
    square = lower @ lower
    fourth = square @ square
    m = (eye - lower) @ (eye + square) @ (eye + fourth) @ (eye + fourth @ fourth)
    m = m * beta.transpose(-1, -2)
    w, u = m @ (g.exp() * k), m @ v
    state = torch.zeros(batch, heads, k_dim, v.shape[-1], dtype=q.dtype)
    outs = []
    for n in range(length // 16):
        fresh = u[:, n] - w[:, n] @ state
        outs.append((q[:, n] * g[:, n].exp()) @ state + a_qk[:, n] @ fresh)
        last = g[:, n, :, -1:]
        state = state * last.exp().mT + (k[:, n] * (last - g[:, n]).exp()).mT @ fresh
    return torch.stack(outs, dim=1).transpose(2, 3).reshape(batch, length, heads, -1)


@spelling("delta_rule", "q k v beta", layout="bhtd", returns_state=True, multiple=32, lengths=(64, 32, 160))
def delta_row_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk: int = 32) -> tuple[Tensor, Tensor]:
    batch, heads, length, k_dim = q.shape
    q = q * k_dim**-0.5
    k_beta, v = k * beta[..., None], v * beta[..., None]
    q, k, v, k_beta = (x.view(batch, heads, length // chunk, chunk, -1) for x in (q, k, v, k_beta))
    mask = torch.triu(torch.ones(chunk, chunk, dtype=torch.bool), diagonal=0)
    t = -(k_beta @ k.transpose(-1, -2)).masked_fill(mask, 0)
    for i in range(1, chunk):
        t[..., i, :i] = t[..., i, :i] + (t[..., i, :, None].clone() * t[..., :, :i].clone()).sum(-2)
    t = t + torch.eye(chunk, dtype=q.dtype)
    u, w = t @ v, t @ k_beta
    state = k.new_zeros(batch, heads, k_dim, v.shape[-1])
    out = torch.zeros_like(v)
    for i in range(length // chunk):
        attn = (q[:, :, i] @ k[:, :, i].transpose(-1, -2)).masked_fill_(mask.triu(1), 0)
        u_i = u[:, :, i] - w[:, :, i] @ state
        out[:, :, i] = q[:, :, i] @ state + attn @ u_i
        state = state + k[:, :, i].transpose(-1, -2) @ u_i
    return out.view(batch, heads, length, -1), state


@spelling("gated_delta_rule", "q k v g beta", lengths=(24, 13, 8, 45))
def gdn_forward_substitution_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Chunks of 8, sliced from [B, T, H, D] in the loop; new values by substitution into a list."""
    length, k_dim = q.shape[1], q.shape[3]
    state: Tensor | None = None
    outs = []
    for start in range(0, length, 8):
        stop = min(start + 8, length)
        q_c, k_c, v_c = (x[:, start:stop].transpose(1, 2) for x in (q, k, v))
        b_c, cum = beta[:, start:stop].transpose(1, 2), g[:, start:stop].transpose(1, 2).cumsum(-1)
        if state is None:
            state = q.new_zeros(*q_c.shape[:2], k_dim, v.shape[-1])
        base = v_c - cum.exp().unsqueeze(-1) * (k_c @ state)
        fresh: list[Tensor] = []
        for i in range(stop - start):
            x = base[:, :, i]
            for j in range(i):
                weight = (k_c[:, :, i] * k_c[:, :, j]).sum(-1) * (cum[:, :, i] - cum[:, :, j]).exp()
                x = x - weight.unsqueeze(-1) * fresh[j]
            fresh.append(x * b_c[:, :, i, None])
        new = torch.stack(fresh, dim=2)
        gap = (cum[..., :, None] - cum[..., None, :]).tril().exp()
        outs.append((cum.exp().unsqueeze(-1) * (q_c @ state) + (q_c @ k_c.mT * gap).tril() @ new) * k_dim**-0.5)
        last = cum[..., -1:]
        state = last.unsqueeze(-1).exp() * state + ((last - cum).exp().unsqueeze(-1) * k_c).mT @ new
    return torch.cat(outs, dim=2).transpose(1, 2)
