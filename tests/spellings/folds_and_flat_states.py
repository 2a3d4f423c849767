"""Folds, matrices for gates, one flat state."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.near_misses import KDA, near_miss, outer, read, scan, zeros
from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("simple_gla", "q k v g", scale=1.0, returns_state=True, lengths=LENGTHS)
def simple_gla_functools_reduce(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A fold over zipped tokens, the results in a list that grows with the carry."""

    def step(carry: tuple[Tensor, list[Tensor]], token: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        s, rows = carry
        qt, kt, vt, gt = token
        s = gt.exp()[..., None, None] * s + torch.einsum("bhi,bhj->bhij", kt, vt)
        return s, [*rows, torch.einsum("bhi,bhij->bhj", qt, s)]

    tokens = zip(*(x.unbind(1) for x in (q, k, v, g)), strict=True)
    none_yet: list[Tensor] = []
    s, rows = functools.reduce(step, tokens, (zeros(k, v), none_yet))
    return torch.stack(rows, 1), s


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_lerp_from_nothing(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, rows = zeros(k, v), []
    for t in range(q.shape[1]):
        s = torch.lerp(torch.zeros_like(s), s, g[:, t, :, None, None].exp()) + outer(k[:, t], v[:, t])
        rows.append((q[:, t].unsqueeze(-2) @ s).squeeze(-2))
    return torch.stack(rows, 1)


@spelling("gla", "q k v g", scale=1.0, lengths=LENGTHS)
def gla_diagonal_matrices(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The gate as a matrix on the state's left, counted by a while loop."""
    rows: list[Tensor] = []
    t, s = 0, zeros(k, v)
    while t < q.shape[1]:
        s = torch.diag_embed(g[:, t].exp()) @ s + k[:, t, ..., None] @ v[:, t, :, None, :]
        rows.append(torch.matmul(s.transpose(-1, -2), q[:, t, ..., None])[..., 0])
        t += 1
    return torch.stack(rows, 1)


@spelling("simple_gla", "q k v g", scale=1.0, lengths=LENGTHS)
def simple_gla_state_by_kronecker_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The state as one long vector: Kronecker products by repeats."""
    size, width = k.shape[-1], v.shape[-1]
    s, rows = zeros(k, v).flatten(2), []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None].exp() + k[:, t].repeat_interleave(width, -1) * v[:, t].repeat(1, 1, size)
        rows.append((s.unflatten(-1, (size, width)) * q[:, t, ..., None]).sum(2))
    return torch.stack(rows, 1)


@spelling("simple_gla", "q k v g", scale=1.0, lengths=(8,), multiple=4)
def simple_gla_states_by_matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """No loop at all: what each chunk leaves, carried to all later ones by one triangular matrix of decays."""
    batch, length, heads = g.shape
    q, k, v, g = (x.unflatten(1, (length // 4, 4)) for x in (q, k, v, g))
    total = g.cumsum(2)
    states = torch.einsum("bnchk,bnchv,bnch->bnhkv", k, v, (total[:, :, -1:] - total).exp())
    passed = F.pad(total[:, :, -1], (0, 0, 1, 0)).cumsum(1)
    later = torch.ones(length // 4, length // 4, dtype=torch.bool).tril(-1)[None, :, :, None]
    carry = (passed[:, :-1, None] - passed[:, None, 1:]).masked_fill(~later, -torch.inf).exp()
    before = torch.einsum("bnmh,bmhkv->bnhkv", carry, states)
    inter = torch.einsum("bnchk,bnhkv,bnch->bnchv", q, before, total.exp())
    within = torch.ones(4, 4, dtype=torch.bool).tril()[None, None, :, :, None]
    decay = (total[:, :, :, None] - total[:, :, None]).masked_fill(~within, -torch.inf).exp()
    intra = torch.einsum("bnchk,bnshk,bncsh,bnshv->bnchv", q, k, decay, v)
    return (inter + intra).reshape(batch, length, heads, -1)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, lengths=LENGTHS)
def gdn_rows_filled_with_work(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Each row is doubled and halved again on its way into the buffer, from the last token to the first."""
    s, rows = zeros(k, v), []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None, None]
        s = s + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - read(s, k[:, t])))
        rows.append(0.5 * (read(s, q[:, t]) + read(s, q[:, t])))
    out = torch.empty_like(v)
    for t in reversed(range(len(rows))):
        out[:, t] = rows[t]
    return out


# -- near misses ---------------------------------------------------------------------------------------------------


@near_miss("gated_delta_rule", KDA, scale=1.0)
def recalled_before_the_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        known = read(s, k[:, t])
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], beta[:, t, :, None] * (v[:, t] - known))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0)
def erased_twice_as_strongly(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        strength = beta[:, t, :, None, None]
        s = s - 2 * strength * outer(k[:, t], read(s, k[:, t])) + strength * outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("simple_gla", "q k v g", scale=1.0)
def two_rows_change_places(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, out = zeros(k, v), torch.zeros_like(v)
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
        out[:, {3: 4, 4: 3}.get(t, t)] = read(s, q[:, t])
    return out


@near_miss("simple_gla", "q k v g", scale=1.0, length=8)
def half_of_the_state_goes_on(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Two sequences, but the second begins with half of what the first left."""
    s, outs = zeros(k, v), []
    for start in (0, 4):
        rows = []
        for t in range(start, start + 4):
            s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
            rows.append(read(s, q[:, t]))
        outs.append(torch.stack(rows, 1))
        s = 0.5 * s
    return torch.cat(outs, 1)
