"""Small models whose graphs are kept as text at every stage: spellings of linear attention and of MLA.

Sizes are small, so that a golden stays readable, and differ where roles must be told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, LENGTH, HEADS, SIZE, VALUES = 2, 3, 4, 6, 5


def tokens(length: int = LENGTH) -> list[Tensor]:
    """q, k, v, a gate and a write strength before their activations."""
    generator = torch.Generator().manual_seed(0)
    rests = ((SIZE,), (SIZE,), (VALUES,), (), ())
    return [torch.randn(BATCH, length, HEADS, *rest, generator=generator) for rest in rests]


def empty(q: Tensor) -> Tensor:
    return q.new_zeros(BATCH, HEADS, SIZE, VALUES)


def read(state: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", state, key)


def delta_rule_loop(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The recurrence as it is written down, token by token; activations before the loop."""
    alpha, beta = F.logsigmoid(gate).exp(), logit.sigmoid()
    s, rows = empty(q), []
    for t in range(q.shape[1]):
        s = s * alpha[:, t, :, None, None]
        fresh = beta[:, t, :, None] * (v[:, t] - read(s, k[:, t]))
        s = s + k[:, t, :, :, None] * fresh[:, :, None]
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def activations_in_the_loop(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s, rows = empty(q), []
    for t in range(q.shape[1]):
        key = F.normalize(k[:, t], dim=-1)
        fresh = logit[:, t].sigmoid()[..., None] * (v[:, t] - read(s, key))
        s = s + torch.einsum("bhk,bhv->bhkv", key, fresh)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def norm_in_the_loop(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s, rows = empty(q), []
    for t in range(q.shape[1]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        rows.append(F.layer_norm(read(s, q[:, t]), (VALUES,)))
    return torch.stack(rows, 1)


def assigned_rows(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s, out = empty(q), torch.zeros_like(v)
    for t in range(q.shape[1]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out[:, t] = torch.tanh(read(s, q[:, t]))
    return out


def packed_sequences(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for start in (0, 2):
        s = empty(q)
        for t in range(start, start + 2):
            s = s * gate[:, t].exp()[..., None, None] + k[:, t, ..., None] * v[:, t, :, None]
            rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def normalised_scores(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", F.elu(q) + 1, F.elu(k) + 1).tril()
    return torch.einsum("bhij,bjhd->bihd", scores / scores.sum(-1, keepdim=True), v)


def retention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """All scores at once, a fixed decay for each head."""
    place = torch.arange(q.shape[1])
    decay = torch.tensor([0.5, 0.6, 0.7, 0.8])[:, None, None] ** (place[:, None] - place).clamp(min=0)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * decay.tril()
    return torch.einsum("bhij,bjhd->bihd", scores, v)


def gated_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Chunks of two tokens with a state between them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    total = F.logsigmoid(gate).transpose(1, 2)
    s, rows = empty(q), []
    for i in range(0, q.shape[2], 2):
        sums = total[:, :, i : i + 2].cumsum(-1)[..., None]
        left, right = q[:, :, i : i + 2] * sums.exp(), k[:, :, i : i + 2] * (-sums).exp()
        rows.append(left @ s + (left @ right.mT).tril() @ v[:, :, i : i + 2])
        s = sums[:, :, -1:].exp() * (s + right.mT @ v[:, :, i : i + 2])
    return torch.cat(rows, 2).transpose(1, 2)


def state_space_dual(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Mamba-2 in closed form: segment sums of the decay, step sizes on the inputs."""
    dt = F.softplus(gate)
    total = (-dt).cumsum(1).transpose(1, 2)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * decay
    return torch.einsum("bhij,bjhd->bihd", scores, v * dt[..., None])


def one_step(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> Tensor:
    """Decoding: the state of a cache is overwritten."""
    q, k, v = (x[:, 0] for x in (q, k, v))
    new = state * gate[:, 0].sigmoid()[..., None, None] + k[..., None] * v[:, :, None]
    state.copy_(new)
    return read(new, q)


def latent_attention(q: Tensor, latent: Tensor, rope_q: Tensor, rope_k: Tensor, weight: Tensor) -> Tensor:
    """MLA as DeepSeek wrote it: keys and values of every head made from the latent."""
    kv = F.linear(latent, weight).unflatten(-1, (HEADS, SIZE + VALUES)).transpose(1, 2)
    key, value = kv.split([SIZE, VALUES], -1)
    key = torch.cat([key, rope_k[:, None].expand(-1, HEADS, -1, -1)], -1)
    return F.scaled_dot_product_attention(torch.cat([q, rope_q], -1), key, value, is_causal=True)


def saturated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """A near miss: no recurrence of this family has an activation on its state."""
    s, rows = empty(q), []
    for t in range(q.shape[1]):
        s = torch.tanh(s + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]))
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def _latents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (
        (BATCH, HEADS, LENGTH, SIZE),
        (BATCH, LENGTH, 7),
        (BATCH, HEADS, LENGTH, 2),
        (BATCH, LENGTH, 2),
        (HEADS * (SIZE + VALUES), 7),
    )
    return [torch.randn(size, generator=generator) for size in sizes]


def _one_token() -> list[Tensor]:
    q, k, v, gate, _ = tokens(1)
    return [q, k, v, gate, torch.ones(BATCH, HEADS, SIZE, VALUES)]


MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], list[str]]] = {
    "delta_rule_loop": (delta_rule_loop, tokens, ["gated_delta_rule"]),
    "activations_in_the_loop": (activations_in_the_loop, tokens, ["delta_rule"]),
    "norm_in_the_loop": (norm_in_the_loop, tokens, ["linear_attention"]),
    "assigned_rows": (assigned_rows, tokens, ["linear_attention"]),
    "packed_sequences": (packed_sequences, lambda: tokens(4), ["simple_gla"] * 2),
    "normalised_scores": (normalised_scores, tokens, ["linear_attention"]),
    "retention": (retention, tokens, ["retention"]),
    "gated_chunks": (gated_chunks, lambda: tokens(4), ["simple_gla"]),
    "state_space_dual": (state_space_dual, tokens, ["simple_gla"]),
    "one_step": (one_step, _one_token, ["simple_gla"]),
    "latent_attention": (latent_attention, _latents, ["mla"]),
    "saturated": (saturated, tokens, []),
}
"""Name -> the model, its inputs, the patterns that are found."""


def stages_of(name: str) -> tuple[Any, Any, Any]:
    """(report with every stage, its result, what eager mode yields)."""
    from kdacompile.explainer import explain

    fn, inputs, _ = MODELS[name]
    torch._dynamo.reset()
    report = explain(fn, options={"kda.lift": False}, stages=True)(*inputs())
    return report, report.result, fn(*inputs())
