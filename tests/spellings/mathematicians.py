"""Texts by people who think in matrices and maps: semiseparable matrices, factors, sweeps, recursive scans."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_semiseparable_matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Its entries are products of the gates between two tokens."""
    factor = g.exp().permute(0, 2, 1)
    length = factor.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool).tril(-1)
    between = factor[..., None].expand(*factor.shape, length).masked_fill(~lower, 1.0).cumprod(-2)
    matrix = between.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), 0.0)
    return torch.einsum("bhij,bihn,bjhn,bjhp->bihp", matrix, q, k, v)


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_bidiagonal_system(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """All states at once: each is what was written plus the one before, decayed."""
    factor = g.exp().permute(0, 2, 1)
    system = torch.eye(factor.shape[-1]) - torch.diag_embed(factor[..., 1:], offset=-1)
    writes = torch.einsum("bthk,bthv->bhtkv", k, v)
    states = torch.linalg.solve(system, writes.flatten(3)).unflatten(3, writes.shape[3:])
    return torch.einsum("bthk,bhtkv->bthv", q, states)


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_by_lu(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    strength = beta.transpose(1, 2)[..., None]
    factors, pivots = torch.linalg.lu_factor(torch.eye(k.shape[2]) + ((strength * k) @ k.mT).tril(-1))
    return ((q @ k.mT).tril() @ torch.linalg.lu_solve(factors, pivots, strength * v)).transpose(1, 2)


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_sum_of_matrix_powers(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    strength = beta.transpose(1, 2)[..., None]
    step = -torch.einsum("bhik,bhjk->bhij", strength * k, k).tril(diagonal=-1)
    length = step.shape[-1]
    inverse = sum((torch.linalg.matrix_power(step, p) for p in range(1, length)), torch.eye(length))
    return ((q @ k.mT).tril() @ (inverse @ (strength * v))).transpose(1, 2)


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_by_sweeps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Jacobi's sweeps, exact after as many as there are tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    strength = beta.transpose(1, 2)[..., None]
    known = (k @ k.mT).tril(-1)
    write = strength * v
    for _ in range(k.shape[2] - 1):
        write = strength * (v - known @ write)
    return ((q @ k.mT).tril() @ write).transpose(1, 2)


@spelling("gla", "q k v g", scale=1.0, lengths=(8,), multiple=8)
def gla_scan_by_recursion(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """An associative scan over affine maps: pairs first, then every second one, then those in between."""

    def prefix(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if a.shape[1] == 1:
            return a, b
        a0, a1, b0, b1 = a[:, 0::2], a[:, 1::2], b[:, 0::2], b[:, 1::2]
        odd_a, odd_b = prefix(a0 * a1, a1 * b0 + b1)
        even_a = torch.cat([a0[:, :1], a0[:, 1:] * odd_a[:, :-1]], 1)
        even_b = torch.cat([b0[:, :1], a0[:, 1:] * odd_b[:, :-1] + b0[:, 1:]], 1)
        return torch.stack([even_a, odd_a], 2).flatten(1, 2), torch.stack([even_b, odd_b], 2).flatten(1, 2)

    _, states = prefix(g.exp()[..., None], torch.einsum("bthk,bthv->bthkv", k, v))
    return torch.einsum("bthk,bthkv->bthv", q, states)


@spelling("linear_attention", "q k v", scale=1.0, returns_state=True, lengths=(8,), multiple=8)
def linear_triangle_by_halves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    def triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = q.shape[1] // 2
        if half == 0:
            return (q * k).sum(-1, keepdim=True) * v
        square = torch.einsum("bihk,bjhk,bjhv->bihv", q[:, half:], k[:, :half], v[:, :half])
        upper = triangle(q[:, :half], k[:, :half], v[:, :half])
        return torch.cat([upper, triangle(q[:, half:], k[:, half:], v[:, half:]) + square], 1)

    return triangle(q, k, v), torch.einsum("bthk,bthv->bhkv", k, v)


@spelling("gla", "q k v g", scale=1.0, lengths=LENGTHS)
def gla_all_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Every pair of tokens and every channel, the mask as a factor."""
    total = g.cumsum(1)
    seen = torch.ones(q.shape[1], q.shape[1]).tril()[None, :, :, None, None]
    decay = torch.exp((total[:, :, None] - total[:, None]) * seen) * seen
    return torch.einsum("bijh,bjhv->bihv", (q[:, :, None] * k[:, None] * decay).sum(-1), v)
