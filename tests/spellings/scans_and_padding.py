"""Scans from itertools, generators, products with constants for sums, block inverses, padding in front."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, lengths=LENGTHS)
def gdn_itertools_accumulate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def step(s: Tensor, token: tuple[Tensor, ...]) -> Tensor:
        k_t, v_t, g_t, beta_t = token
        s = s * torch.exp(g_t)[..., None, None]
        error = (v_t - torch.einsum("...kv,...k->...v", s, k_t)) * beta_t[..., None]
        return s + torch.einsum("...k,...v->...kv", k_t, error)

    start = torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    tokens = zip(*(x.unbind(1) for x in (k, v, g, beta)), strict=True)
    states = list(itertools.accumulate(tokens, step, initial=start))[1:]
    rows = zip(q.unbind(1), states, strict=True)
    return torch.stack([torch.einsum("...k,...kv->...v", q_t, s) for q_t, s in rows], 1)


@spelling("kda", "q k v g beta", scale=1.0, lengths=LENGTHS)
def kda_generator_of_vecdots(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        s = k.new_zeros(k.size(0), k.size(2), k.size(3), v.size(3))
        for t in range(k.size(1)):
            s = torch.multiply(s, g[:, t].exp().unsqueeze(-1))
            error = torch.subtract(v[:, t], torch.linalg.vecdot(s, k[:, t].unsqueeze(-1), dim=-2))
            s = torch.add(s, k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * error).unsqueeze(-2))
            yield torch.linalg.vecdot(s, q[:, t].unsqueeze(-1), dim=-2)

    return torch.stack(tuple(rows()), dim=1)


@spelling("kda", "q k v g beta", scale=1.0, lengths=LENGTHS)
def kda_diagonal_matrices(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Tokens first, a while loop, the decay as a diagonal matrix, erasing and writing apart."""
    q, k, v, g, beta = (x.movedim(1, 0) for x in (q, k, v, g, beta))
    s = torch.zeros(*k.shape[1:], v.shape[-1], dtype=k.dtype)
    outs: deque[Tensor] = deque()
    t = 0
    while t < q.shape[0]:
        s = torch.diag_embed(g[t].exp()) @ s
        s = s - torch.einsum("bhk,bhl,bhlv->bhkv", beta[t][..., None] * k[t], k[t], s)
        s = s + torch.einsum("bhk,bhv,bh->bhkv", k[t], v[t], beta[t])
        outs.append(torch.einsum("bhk,bhkv->bhv", q[t], s))
        t += 1
    return torch.stack(list(outs)).transpose(0, 1)


@spelling("simple_gla", "q k v alpha", scale=1.0, lengths=LENGTHS)
def simple_gla_flat_state(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """The state as one long vector, viewed as a matrix to be read."""
    batch, length, heads, size = k.shape
    h = torch.zeros(batch, heads, size * v.shape[-1], dtype=k.dtype)
    outs = []
    for t in range(length):
        write = (k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)).reshape(batch, heads, -1)
        h = alpha[:, t].unsqueeze(-1) * h + write
        outs.append((h.view(batch, heads, size, -1) * q[:, t, :, :, None]).sum(2))
    return torch.stack(outs, 1)


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_sum_by_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The cumulative sum of the gates as a product with a triangle of ones."""
    ones = torch.ones(q.shape[1], q.shape[1], dtype=q.dtype).tril()
    total = torch.einsum("ts,bsh->bth", ones, g)
    gap = (total[:, :, None] - total[:, None]).masked_fill(~ones.bool()[None, :, :, None], -math.inf)
    return torch.einsum("btsh,bshv->bthv", torch.einsum("bthk,bshk->btsh", q, k) * gap.exp(), v)


@spelling("gla", "q k v gate_logit", scale=1.0, activation="logsigmoid", gate_scale=1 / 16, lengths=LENGTHS)
def gla_root_of_a_sigmoid(q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor) -> Tensor:
    a = torch.sigmoid(gate_logit).pow(1 / 16)
    s = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :])
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        s = a[:, t, :, :, None] * s + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = (q[:, t, :, None, :] @ s).squeeze(-2)
    return out


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_powers_of_two(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    a = torch.exp2(g * math.log2(math.e))
    s = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    outs = []
    for t in range(q.shape[1]):
        s = torch.einsum("bh,bhkv->bhkv", a[:, t], s) + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outs, 1)


@spelling("linear_attention", "q k v", scale=1.0, lengths=(9,))
def linear_everything_in_one_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[1], q.shape[1], dtype=q.dtype).tril()
    return torch.einsum("bthd,bshd,bshv,ts->bthv", q, k, v, mask)


@spelling("retention", "q k v gamma", scale=1.0, layout="bhtd", multiple=4, lengths=(8,))
def retention_lightning_blocks(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """TransNormer's blocks: decays of queries, keys and the block from one slope, outputs into a buffer."""
    block = 4
    slope = -gamma.log().view(-1, 1, 1)
    n = torch.arange(block, dtype=q.dtype) + 1
    q_decay, k_decay = torch.exp(-slope * n[:, None]), torch.exp(-slope * (block - n[:, None]))
    distance = n[:, None] - n[None]
    inside = torch.where(distance >= 0, torch.exp(-slope * distance.clamp(min=0)), torch.zeros((), dtype=q.dtype))
    kv = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype)
    out = torch.empty_like(v)
    for first in range(0, q.shape[2], block):
        now = slice(first, first + block)
        q_i, k_i, v_i = (x[:, :, now].contiguous() for x in (q, k, v))
        scores = torch.matmul(q_i, k_i.transpose(-1, -2)) * inside
        out[:, :, now] = torch.matmul(q_i * q_decay, kv) + torch.matmul(scores, v_i)
        kv = torch.exp(-slope * block) * kv + torch.matmul((k_i * k_decay).transpose(-1, -2), v_i)
    return out


@spelling("delta_rule", "q k v beta", scale=1.0, layout="bhtd", lengths=(8,), multiple=4)
def delta_inverse_of_blocks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The triangular inverse from those of its two diagonal blocks, each of which is short enough for I - A."""
    half = 2
    q, k, v = (x.unflatten(2, (-1, 2 * half)) for x in (q, k, v))
    beta = beta.unflatten(2, (-1, 2 * half)).unsqueeze(-1)
    a = torch.tril(beta * k @ k.mT, -1)
    eye = torch.eye(half, dtype=k.dtype)
    first, second = eye - a[..., :half, :half], eye - a[..., half:, half:]
    corner = -second @ a[..., half:, :half] @ first
    inverse = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([corner, second], -1)], -2)
    u, w = inverse @ (beta * v), inverse @ (beta * k)
    s = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outs = []
    for n in range(q.shape[2]):
        error = u[:, :, n] - w[:, :, n] @ s
        outs.append(q[:, :, n] @ s + (q[:, :, n] @ k[:, :, n].mT).tril() @ error)
        s = s + k[:, :, n].mT @ error
    return torch.cat(outs, 2)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, layout="bhtd", lengths=(8,), multiple=4)
def gdn_solved_from_the_right(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """An upper triangular system on the other side, the state with values first."""
    size = 4
    s = torch.zeros(*q.shape[:2], v.shape[-1], q.shape[-1], dtype=q.dtype)
    outs = []
    for q_c, k_c, v_c, g_c, b_c in zip(*(x.split(size, 2) for x in (q, k, v, g, beta)), strict=True):
        total = torch.cumsum(g_c, -1)
        decay = (total[..., None] - total[..., None, :]).tril().exp().tril()
        system = ((k_c * b_c[..., None]) @ k_c.mT * decay).tril(-1) + torch.eye(size, dtype=q.dtype)
        right = (v_c - (k_c * total.exp()[..., None]) @ s.mT) * b_c[..., None]
        u = torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False).mT
        outs.append((q_c * total.exp()[..., None]) @ s.mT + (q_c @ k_c.mT * decay) @ u)
        s = s * total[..., -1:, None].exp() + u.mT @ (k_c * (total[..., -1:] - total).exp()[..., None])
    return torch.cat(outs, -2)


@spelling("gated_delta_rule", "q k v g beta state", layout="bhtd", scale=1.0, returns_state=True, lengths=(11, 5))
def gdn_padded_in_front(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Zeros before the first token, where they leave a given state as it is."""
    size = 4
    pad = -q.shape[2] % size
    q, k, v = (F.pad(x, (0, 0, pad, 0)).unflatten(2, (-1, size)) for x in (q, k, v))
    g, beta = (F.pad(x, (pad, 0)).unflatten(2, (-1, size)) for x in (g, beta))
    total = g @ torch.ones(size, size, dtype=g.dtype).triu()
    low = torch.ones(size, size, dtype=torch.bool).tril()
    decay = torch.where(low, total[..., :, None] - total[..., None, :], -torch.inf).exp()
    a = torch.tril(beta[..., None] * (k @ k.transpose(-1, -2)) * decay, -1)
    written, read = beta[..., None] * v, (beta * total.exp())[..., None] * k
    u, w = (torch.linalg.solve_triangular(a, x, upper=False, unitriangular=True) for x in (written, read))
    outs = []
    for n in range(q.shape[2]):
        error = u[:, :, n] - w[:, :, n] @ state
        inside = (q[:, :, n] @ k[:, :, n].mT) * decay[:, :, n]
        outs.append((q[:, :, n] * total[:, :, n, :, None].exp()) @ state + inside @ error)
        left = (total[:, :, n, -1:] - total[:, :, n])[..., None].exp()
        state = state * total[:, :, n, -1, None, None].exp() + (k[:, :, n] * left).mT @ error
    return torch.cat(outs, 2)[:, :, pad:], state


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=(11,))
def delta_first_chunk_short(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What does not fill a chunk comes first, not last."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    beta = beta.transpose(1, 2)[..., None]
    s = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    outs = []
    edges = [0, *range(q.shape[2] % 4, q.shape[2] + 1, 4)]
    for first, last in itertools.pairwise(edges):
        q_c, k_c, v_c, b_c = (x[:, :, first:last] for x in (q, k, v, beta))
        system = (b_c * k_c @ k_c.mT).tril(-1) + torch.eye(last - first, dtype=q.dtype)
        u = torch.linalg.solve_triangular(system, b_c * (v_c - k_c @ s), upper=False)
        outs.append(q_c @ s + (q_c @ k_c.mT).tril() @ u)
        s = s + k_c.mT @ u
    return torch.cat(outs, 2).transpose(1, 2)
