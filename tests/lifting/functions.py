"""Functions that capture would unroll: what is lifted, and what must not be."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 8
HEADS, KEY, VALUE = 2, 8, 6

sharpness = 1.0
calls: list[int] = []


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunked_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None = None, chunk: int = CHUNK) -> Any:
    """GLA in chunks; [B, T, H, D]."""
    length = q.shape[1]
    pad = (chunk - length % chunk) % chunk
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2).float() for x in (q, k, v, g))
    q = q * q.shape[-1] ** -0.5
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[1], q.shape[-1], v.shape[-1])
    out = torch.zeros_like(v)
    mask = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    for start in range(0, length + pad, chunk):
        here = slice(start, start + chunk)
        decay = g[:, :, here].cumsum(2)
        reads, writes = q[:, :, here] * decay.exp(), k[:, :, here] * (-decay).exp()
        scores = (reads @ writes.transpose(-1, -2)).masked_fill(mask, 0)
        out[:, :, here] = reads @ state + scores @ v[:, :, here]
        last = decay[:, :, -1:]
        state = state * last.transpose(-1, -2).exp() + (k[:, :, here] * (last - decay).exp()).mT @ v[:, :, here]
    return out[:, :, :length].transpose(1, 2), state


def recurrent_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Token by token, with a helper."""
    q, k = normalized(q), normalized(k)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def recurrent_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a decay from a global."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * (0.5 * sharpness) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def whole_chunks_only(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    if q.shape[1] % CHUNK:
        raise ValueError("the length must be a multiple of the chunk")
    out = v
    for _ in range(1):
        out = chunked_gla(q, k, v, g)[0]
    return out


# -- never lifted -----------------------------------------------------------------------------------------------------


def changes_its_mind(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * 2 if q.shape[1] > 20 else out
    return out


def writes_its_argument(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    for _ in range(1):
        v.mul_(2)
    return recurrent_gla(q, k, v, g)


def draws(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    for _ in range(1):
        q = q + 0 * torch.rand_like(q)
    return recurrent_gla(q, k, v, g)


def cuts_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    for _ in range(1):
        q = q.detach()
    return recurrent_gla(q, k, v, g)


def keeps_count(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    for _ in range(1):
        calls.append(q.shape[1])
    return recurrent_gla(q, k, v, g)


def clamps_the_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        state = state.clamp(-30, 30)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)
