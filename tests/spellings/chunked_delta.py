"""Chunked forms with a delta term whose inverse is a solve or a library inverse."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.registry import spelling, variant


def lengths(chunk: int) -> tuple[int, ...]:
    """Two chunks padded, many chunks padded, one padded, one exact, two exact."""
    return (chunk + chunk // 2, 4 * chunk + 5, chunk - 3, chunk, 2 * chunk)


@spelling("gated_delta_rule", "q k v g beta", lengths=lengths(16))
def gdn_solve_triangular(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 16) -> Tensor:
    length, v_dim = q.shape[1], v.shape[-1]
    q, k, v, g, beta = (x.transpose(1, 2).contiguous() for x in (q, k, v, g, beta))
    pad = (chunk - length % chunk) % chunk
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    q = q * q.shape[-1] ** -0.5
    q, k, v = (x.reshape(*x.shape[:2], -1, chunk, x.shape[-1]) for x in (q, k, v))
    g, beta = (x.reshape(*x.shape[:2], -1, chunk) for x in (g, beta))
    g = g.cumsum(-1)
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    lower = ((k * beta[..., None]) @ k.transpose(-1, -2) * decay).tril(-1)
    identity = torch.eye(chunk, dtype=q.dtype)
    u = torch.linalg.solve_triangular(lower + identity, v * beta[..., None], upper=False, unitriangular=True)
    w = torch.linalg.solve_triangular(
        lower + identity, k * (beta * g.exp())[..., None], upper=False, unitriangular=True
    )
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v_dim)
    out = torch.zeros_like(u)
    for n in range(q.shape[2]):
        scores = (q[:, :, n] @ k[:, :, n].transpose(-1, -2)) * decay[:, :, n]
        fresh = u[:, :, n] - w[:, :, n] @ state
        out[:, :, n] = (q[:, :, n] * g[:, :, n, :, None].exp()) @ state + scores @ fresh
        left = (g[:, :, n, -1:] - g[:, :, n]).exp()[..., None]
        state = state * g[:, :, n, -1, None, None].exp() + (k[:, :, n] * left).transpose(-1, -2) @ fresh
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2)


for _chunk in (32, 64, 128, 256):
    variant(
        "gdn_solve_triangular",
        f"chunk{_chunk}",
        partial(gdn_solve_triangular, chunk=_chunk),
        lengths=(_chunk + 9, _chunk, 2 * _chunk + 1),
    )


@spelling(
    "gated_delta_rule", "q k v g beta state", layout="bhtd", returns_state=True, multiple=16, lengths=(32, 16, 80)
)
def gdn_inverse_unflatten(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """torch.inverse, unflatten, einsum everywhere, the output by cat, beta on the columns of the inverse."""
    q, k, v, g, beta = (x.unflatten(2, (-1, 16)) for x in (q, k, v, g, beta))
    cum = torch.cumsum(g, dim=-1)
    rows = torch.arange(16)
    strict, inclusive = rows[:, None] > rows[None, :], rows[:, None] >= rows[None, :]
    gap = torch.exp(torch.where(inclusive, cum[..., :, None] - cum[..., None, :], -torch.inf))
    gram = torch.einsum("bhncd,bhnmd->bhncm", k, k) * gap * beta[..., :, None]
    inverse = torch.inverse(torch.eye(16, dtype=q.dtype) + torch.where(strict, gram, 0.0)) * beta[..., None, :]
    u = torch.einsum("bhncm,bhnmv->bhncv", inverse, v)
    w = torch.einsum("bhncm,bhnmk,bhnm->bhnck", inverse, k, cum.exp())
    outs = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - torch.einsum("bhck,bhkv->bhcv", w[:, :, n], state)
        inter = torch.einsum("bhck,bhkv,bhc->bhcv", q[:, :, n], state, cum[:, :, n].exp())
        intra = torch.einsum("bhck,bhmk,bhcm,bhmv->bhcv", q[:, :, n], k[:, :, n], gap[:, :, n], new)
        outs.append((inter + intra) * q.shape[-1] ** -0.5)
        tail = torch.exp(cum[:, :, n, -1:] - cum[:, :, n])
        state = state * cum[:, :, n, -1].exp()[..., None, None]
        state = state + torch.einsum("bhck,bhc,bhcv->bhkv", k[:, :, n], tail, new)
    return torch.cat(outs, dim=2), state


@spelling("gated_delta_rule", "q k v g beta", lengths=lengths(16), strongest_gate=-0.5)
def gdn_factored_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """exp(G_i) * exp(-G_j) instead of exp(G_i - G_j): what many write for mild gates; linalg.inv; 0/1 masks."""
    length, chunk = q.shape[1], 16
    pad = -length % chunk
    grid = lambda x: F.pad(x.movedim(2, 1), (0, 0, 0, pad)).unflatten(2, (-1, chunk))  # noqa: E731
    q, k, v, g, beta = grid(q), grid(k), grid(v), grid(g[..., None]), grid(beta[..., None])
    g = g.cumsum(-2)
    q_in, k_in, k_out = q * g.exp(), k * g.exp(), k * torch.exp(-g)
    mask = torch.ones(chunk, chunk, dtype=q.dtype).tril()
    strict = mask - torch.eye(chunk, dtype=q.dtype)
    inverse = torch.linalg.inv(torch.eye(chunk, dtype=q.dtype) + beta * (k_in @ k_out.mT) * strict)
    u, w = inverse @ (beta * v), inverse @ (beta * k_in)
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        outs.append(q_in[:, :, n] @ state + (q_in[:, :, n] @ k_out[:, :, n].mT * mask) @ new)
        state = (state + k_out[:, :, n].mT @ new) * g[:, :, n, -1:].exp()
    out = torch.stack(outs, dim=2).flatten(2, 3)[:, :, :length]
    return out.movedim(1, 2) * q.shape[-1] ** -0.5


@spelling("kda", "q k v g beta state", returns_state=True, lengths=lengths(16))
def kda_solve_triangular(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """One solve for both right-hand sides; everything of a chunk computed inside the loop."""
    length, k_dim = q.shape[1], q.shape[3]
    rows = torch.arange(chunk)
    outs = []
    pad = -length % chunk
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, 0, 0, pad))
    for start in range(0, length, chunk):
        piece = slice(start, start + chunk)
        q_c, k_c, v_c, g_c = (x[:, piece].permute(0, 2, 1, 3) for x in (q, k, v, g))
        b_c = beta[:, piece].permute(0, 2, 1).unsqueeze(-1)
        g_c = g_c.cumsum(2)
        gap = g_c[:, :, :, None] - g_c[:, :, None]
        gap = gap.masked_fill((rows[:, None] < rows)[..., None], -float("inf")).exp()
        a_kk = (torch.einsum("bhik,bhjk,bhijk->bhij", k_c, k_c, gap) * b_c).tril(-1)
        a_qk = torch.einsum("bhik,bhjk,bhijk->bhij", q_c, k_c, gap) * k_dim**-0.5
        rhs = torch.cat([v_c, k_c * g_c.exp()], dim=-1) * b_c
        solved = torch.linalg.solve_triangular(a_kk, rhs, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k_dim], dim=-1)
        new = u - w @ state
        outs.append((q_c * g_c.exp() * k_dim**-0.5) @ state + a_qk @ new)
        last = g_c[:, :, -1:]
        state = state * last.exp().transpose(-1, -2) + (k_c * (last - g_c).exp()).transpose(-1, -2) @ new
    return torch.cat(outs, dim=2)[:, :, :length].transpose(1, 2), state


variant("kda_solve_triangular", "chunk32", partial(kda_solve_triangular, chunk=32), lengths=(40, 32))


@spelling("delta_rule", "q k v beta", layout="bhtd", scale=1.0, lengths=lengths(16))
def delta_solve_permute(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Chunks moved to the front, zipped over; the triangle by triu of the transpose, a left=False solve."""
    batch, heads, length, _ = q.shape
    pad = -length % 16
    chunks = lambda x: F.pad(x, (0, 0, 0, pad)).reshape(batch, heads, -1, 16, x.shape[-1]).permute(2, 0, 1, 3, 4)  # noqa: E731
    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta.unsqueeze(-1))
    upper = torch.eye(16, dtype=q.dtype) + torch.triu(k @ (beta * k).transpose(-1, -2), diagonal=1)
    s = torch.zeros(batch, heads, k.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for q_n, k_n, v_n, b_n, r_n in zip(q, k, v, beta, upper, strict=True):
        residual = (b_n * (v_n - k_n @ s)).transpose(-1, -2)
        new = torch.linalg.solve_triangular(r_n, residual, upper=True, left=False).transpose(-1, -2)
        outs.append(q_n @ s + (q_n @ k_n.transpose(-1, -2)).tril() @ new)
        s = s + k_n.transpose(-1, -2) @ new
    return torch.cat(outs, dim=2)[:, :, :length]
