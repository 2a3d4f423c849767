"""Chunked forms without a delta term."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.chunked_delta import lengths
from tests.spellings.registry import spelling, variant


@spelling("simple_gla", "q k v g state", returns_state=True, lengths=lengths(16))
def simple_gla_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    length, k_dim = q.shape[1], q.shape[3]
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    pad = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q * k_dim**-0.5, k, v))
    g = F.pad(g, (0, pad)).unflatten(2, (-1, chunk)).cumsum(-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    out = torch.zeros_like(v)
    for i in range(q.shape[2]):
        attn = q[:, :, i] @ k[:, :, i].transpose(-1, -2) * decay[:, :, i]
        out[:, :, i] = (q[:, :, i] * g[:, :, i, :, None].exp()) @ state + attn @ v[:, :, i]
        state = state * g[:, :, i, -1, None, None].exp()
        state = state + (k[:, :, i] * (g[:, :, i, -1:] - g[:, :, i]).exp()[..., None]).transpose(-1, -2) @ v[:, :, i]
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


variant("simple_gla_chunked", "chunk64", partial(simple_gla_chunked, chunk=64), lengths=(100, 64, 130))
variant("simple_gla_chunked", "chunk128", partial(simple_gla_chunked, chunk=128), lengths=(150, 128))


@spelling("gla", "q k v g", lengths=lengths(16), strongest_gate=-0.6)
def gla_chunked_factored(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """GLA's secondary-level text: (q exp G)(k exp -G)^T, masked."""
    length, chunk = q.shape[1], 16
    pad = -length % chunk
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3) for x in (q, k, v, g))
    g = g.cumsum(dim=3)
    q_in = q * q.shape[-1] ** -0.5 * g.exp()
    intra = (q_in @ (k * (-g).exp()).transpose(-1, -2)).tril() @ v
    kv = (k * (g[..., -1:, :] - g).exp()).transpose(-1, -2) @ v
    state, outs = torch.zeros_like(kv[:, 0]), []
    for n in range(q.shape[1]):
        outs.append(q_in[:, n] @ state + intra[:, n])
        state = g[:, n, :, -1, :, None].exp() * state + kv[:, n]
    return torch.stack(outs, dim=1).transpose(2, 3).flatten(1, 2)[:, :length]


@spelling("gla", "q k v g state", layout="bhtd", returns_state=True, scale=1.0, lengths=lengths(16))
def gla_chunked_direct(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The safe form: exp(G_i - G_j) per channel, selected by a mask; slices of time, ragged last chunk."""
    outs = []
    for start in range(0, q.shape[2], 16):
        q_c, k_c, v_c, g_c = (x[:, :, start : start + 16] for x in (q, k, v, g))
        cum = g_c.cumsum(2)
        rows = torch.arange(q_c.shape[2])
        seen = (rows[:, None] >= rows[None, :])[:, :, None]
        gap = torch.where(seen, cum[:, :, :, None, :] - cum[:, :, None, :, :], -torch.inf).exp()
        scores = torch.einsum("bhik,bhjk,bhijk->bhij", q_c, k_c, gap)
        outs.append(torch.einsum("bhik,bhkv->bhiv", q_c * cum.exp(), state) + scores @ v_c)
        last = cum[:, :, -1:]
        state = last.exp().mT * state + torch.einsum("bhjk,bhjv->bhkv", (last - cum).exp() * k_c, v_c)
    return torch.cat(outs, dim=2), state


@spelling("retention", "q k v gamma", layout="bhtd", lengths=lengths(16))
def retention_chunked(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """Lightning-attention style: precomputed decays of queries, keys and the block, blocks of 16 by slicing."""
    length, block = q.shape[2], 16
    rate = gamma.log().view(-1, 1, 1)
    rows = torch.arange(block, dtype=q.dtype)[:, None] + 1
    query_decay, key_decay = (rate * rows).exp(), (rate * (block - rows)).exp()
    gap = rate * (rows - rows.T)
    diagonal_decay = torch.where(rows >= rows.T, gap, float("-inf")).exp()
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for i in range((length + block - 1) // block):
        start, stop = i * block, min((i + 1) * block, length)
        size = stop - start
        q_i, k_i, v_i = (x[:, :, start:stop] for x in (q, k, v))
        inter = (q_i * query_decay[:, :size]) @ state
        intra = ((q_i @ k_i.transpose(-1, -2)) * diagonal_decay[:, :size, :size]) @ v_i
        outs.append(intra + inter)
        carried = (k_i * key_decay[:, block - size :]).transpose(-1, -2) @ v_i
        state = (rate * size).exp() * state + carried
    return torch.cat(outs, dim=-2) * q.shape[-1] ** -0.5


@spelling("linear_attention", "q k v", multiple=16, lengths=(32, 16, 80))
def linear_chunked_cumsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No loop at all: states by a cumulative sum over chunks, shifted by one."""
    q, k, v = (x.unflatten(1, (-1, 16)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    kv = (k.transpose(-1, -2) @ v).cumsum(2)
    kv = torch.cat([torch.zeros_like(kv[:, :, :1]), kv[:, :, :-1]], dim=2)
    future = torch.triu(torch.ones(16, 16, dtype=torch.bool), diagonal=1)
    out = q @ kv + (q @ k.transpose(-1, -2)).masked_fill(future, 0) @ v
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2) * q.shape[-1] ** -0.5


@spelling("linear_attention", "q k v state", layout="bhtd", returns_state=True, lengths=lengths(16))
def linear_chunked_loop(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for q_c, k_c, v_c in zip(q.split(16, dim=2), k.split(16, dim=2), v.split(16, dim=2), strict=True):
        q_c = q_c / q.shape[-1] ** 0.5
        outs.append((q_c @ k_c.mT).tril() @ v_c + q_c @ state)
        state = state + k_c.mT @ v_c
    return torch.cat(outs, 2), state
