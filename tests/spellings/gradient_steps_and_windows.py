"""Papers retold: gradient steps, feedback, folds over chunks, windows by ``unfold``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tests.spellings.near_misses import KDA, near_miss, outer, read, zeros
from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_gradient_steps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Test-time training of a linear map: a step down the gradient of ``|k W - v|^2 / 2`` for every token."""
    weight, rows = zeros(k, v), []
    for t in range(q.shape[1]):
        key = k[:, t, :, None, :]
        gradient = key.mT @ (key @ weight - v[:, t, :, None, :])
        weight = weight - beta[:, t, :, None, None] * gradient
        rows.append((q[:, t, :, None, :] @ weight)[..., 0, :])
    return torch.stack(rows, 1)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, lengths=LENGTHS)
def gdn_feedback_before_the_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The old value is read first and decayed by itself."""
    s, rows = zeros(k, v).mT, []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None]
        known = torch.einsum("bhvk,bhk->bhv", s, k[:, t])
        write = torch.einsum("bhv,bhk->bhvk", beta[:, t, :, None] * (v[:, t] - decay * known), k[:, t])
        s = decay[..., None] * s + write
        rows.append(torch.einsum("bhvk,bhk->bhv", s, q[:, t]))
    return torch.stack(rows, 1)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, layout="bhtd", lengths=(12,), multiple=12)
def gdn_fold_over_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def chunk(carry: tuple[Tensor, list[Tensor]], parts: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        s, outs = carry
        q, k, v, g, b = parts
        total = g.cumsum(-1)
        seen = torch.ones(g.shape[-1], g.shape[-1]).tril() > 0
        decay = torch.exp(torch.where(seen, total[..., None] - total[..., None, :], torch.tensor(-1e9)))
        system = torch.eye(g.shape[-1]) + torch.tril(b[..., None] * (k @ k.mT) * decay, -1)
        inverse = torch.linalg.inv(system) * b[..., None, :]
        fresh = inverse @ (v - (k * total.exp()[..., None]) @ s)
        out = (q * total.exp()[..., None]) @ s + ((q @ k.mT) * decay) @ fresh
        left = (k * (total[..., -1:] - total).exp()[..., None]).mT @ fresh
        return total[..., -1].exp()[..., None, None] * s + left, [*outs, out]

    start = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    none_yet: list[Tensor] = []
    chunks = zip(*(torch.chunk(x, 3, 2) for x in (q, k, v, g, beta)), strict=True)
    return torch.cat(functools.reduce(chunk, chunks, (start, none_yet))[1], 2)


@spelling("kda", "q k v g beta", scale=1.0, layout="bhtd", strongest_gate=-1.0, lengths=(8,), multiple=4)
def kda_chunks_by_unfold(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Two factors of Neumann's product are all that four rows need."""
    q, k, v, g = (x.unfold(2, 4, 4).mT for x in (q, k, v, g))
    total = g.cumsum(-2)
    ahead, behind, asked = k * total.exp(), k * (-total).exp(), q * total.exp()
    strict = torch.einsum("bhnik,bhnjk,bhni->bhnij", ahead, behind, beta.unfold(2, 4, 4)).tril(-1)
    square = strict @ strict
    inverse = (torch.eye(4) - strict + square - square @ strict) * beta.unfold(2, 4, 4)[..., None, :]
    w, u = inverse @ ahead, inverse @ v
    s, outs = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        fresh = u[:, :, i] - w[:, :, i] @ s
        outs.append(asked[:, :, i] @ s + (asked[:, :, i] @ behind[:, :, i].mT).tril() @ fresh)
        s = total[:, :, i, -1].exp()[..., None] * (s + behind[:, :, i].mT @ fresh)
    return torch.cat(outs, 2)


@spelling("kda", "q k v g beta state", mode="step", layout="bhd", scale=1.0, returns_state=True, lengths=(1,))
def kda_step_by_lerp(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.lerp(torch.zeros_like(state), state, g.exp().unsqueeze(-1))
    fresh = beta.unsqueeze(-1) * (v - torch.matmul(k.unsqueeze(-2), s).squeeze(-2))
    s = torch.addcmul(s, k.unsqueeze(-1), fresh.unsqueeze(-2))
    return torch.matmul(q.unsqueeze(-2), s).squeeze(-2), s


# -- near misses ---------------------------------------------------------------------------------------------------


@near_miss("simple_gla", "q k v g", scale=1.0, length=6)
def outputs_averaged_over_time(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s, rows, mean = zeros(k, v), [], torch.zeros_like(v[:, 0])
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
        mean = 0.5 * mean + read(s, q[:, t])
        rows.append(mean)
    return torch.stack(rows, 1)


@near_miss("gla", "q k v g", scale=1.0, length=6)
def there_and_back_again(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Even tokens forwards, odd ones backwards."""
    s, out = zeros(k, v), torch.zeros_like(v)
    for t in (0, 2, 4, 5, 3, 1):
        s = s * g[:, t].exp()[..., None] + outer(k[:, t], v[:, t])
        out[:, t] = read(s, q[:, t])
    return out


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=6)
def band_of_what_is_to_come(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).triu().tril(2) @ v


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=6)
def diagonal_counted_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores.triu() + scores.tril()) @ v


@near_miss("gated_delta_rule", KDA, scale=1.0, length=6)
def feedback_decayed_twice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    s, rows = zeros(k, v), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None]
        write = outer(k[:, t], beta[:, t, :, None] * (v[:, t] - decay * decay * read(s, k[:, t])))
        s = decay[..., None] * s + write
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)
