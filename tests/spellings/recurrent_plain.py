"""Token loops without a delta term: GLA, simple GLA (Mamba-2), retention, linear attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.spellings.registry import spelling

LENGTHS = (7, 1, 2, 33)


@spelling("gla", "q k v g", layout="bhtd", lengths=LENGTHS)
def gla_outer_setitem(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    batch, heads, length, k_dim = q.shape
    h = q.new_zeros(batch, heads, k_dim, v.shape[-1])
    out = torch.zeros_like(v)
    for i in range(length):
        kv = k[:, :, i, :, None] * v[:, :, i, None, :]
        h = h * g[:, :, i].exp()[..., None] + kv
        out[:, :, i] = ((q[:, :, i] * k_dim**-0.5)[..., None] * h).sum(-2)
    return out


@spelling("gla", "q k v alpha state", scale=1.0, returns_state=True, lengths=LENGTHS)
def gla_factor_addcmul(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(q.shape[1]):
        state = torch.addcmul(alpha[:, t].unsqueeze(-1) * state, k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-2))
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1), state


@spelling("gla", "q k v g", state_layout="vk", lengths=LENGTHS)
def gla_value_key_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s = torch.zeros(q.shape[0], q.shape[2], v.shape[3], q.shape[3], dtype=q.dtype)
    outs = []
    for t in range(q.shape[1]):
        s.mul_(g[:, t, :, None].exp()).add_(v[:, t, :, :, None] * k[:, t, :, None, :])
        outs.append((s @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outs, dim=1) * (q.shape[-1] ** -0.5)


@spelling("gla", "q k v g beta", lengths=LENGTHS)
def gla_with_input_gate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    s = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        s = s + torch.einsum("bhk,bhv,bh->bhkv", k[:, t], v[:, t], beta[:, t])
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], s) * q.shape[-1] ** -0.5
    return out


@spelling("simple_gla", "q k v g state", returns_state=True, lengths=LENGTHS)
def simple_gla_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    q = q * q.shape[-1] ** -0.5
    out = v.new_zeros(v.shape)
    for i in range(q.shape[1]):
        kv = k[:, i].unsqueeze(-1) * v[:, i].unsqueeze(-2)
        state = state * g[:, i].exp().unsqueeze(-1).unsqueeze(-1) + kv
        out[:, i] = (q[:, i].unsqueeze(-1) * state).sum(-2)
    return out, state


@spelling("simple_gla", "x dt a b c", scale=1.0, lengths=LENGTHS)
def mamba2_recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """h = exp(dt A) h + dt x (x) B; y = h C, with the state as [B, H, P, N]."""
    h = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[-1])
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)
        h = decay[..., None, None] * h + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        ys.append(torch.einsum("bhpn,bhn->bhp", h, c[:, t]))
    return torch.stack(ys, dim=1)


@spelling("simple_gla", "q k v alpha beta", layout="bhtd", scale=1.0, lengths=LENGTHS)
def mlstm_like_forget_input_gate(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """An mLSTM without its normaliser: forget gate and input gate, C = f C + i k v^T."""
    c = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    hs = []
    for t in range(q.shape[2]):
        f, i = alpha[:, :, t, None, None], beta[:, :, t, None, None]
        c = f * c + i * (k[:, :, t, :, None] @ v[:, :, t, None, :])
        hs.append((q[:, :, t, None, :] @ c)[:, :, 0])
    return torch.stack(hs, dim=2)


@spelling("retention", "q k v gamma", layout="bhtd", lengths=LENGTHS)
def retention_loop(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    s = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for n in range(q.shape[2]):
        s = gamma.view(1, -1, 1, 1) * s + k[:, :, n : n + 1].transpose(-1, -2) @ v[:, :, n : n + 1]
        outs.append(q[:, :, n : n + 1] @ s * q.shape[-1] ** -0.5)
    return torch.cat(outs, dim=2)


class Retention(nn.Module):
    """RetNet's fixed decays as a buffer: gamma_h = 1 - 2^(-5-h)."""

    decay: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = self.decay.to(q.dtype)[:, None, None]
        outs = []
        for q_n, k_n, v_n in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
            state = state * decay + k_n.unsqueeze(-1) * v_n.unsqueeze(-2)
            outs.append((q_n.unsqueeze(-1) * state).sum(dim=-2))
        return torch.stack(outs, dim=1), state


spelling(
    "retention",
    "q k v state",
    name="retention_module",
    scale=1.0,
    returns_state=True,
    constant_decay=tuple(1 - 2.0 ** (-5 - h) for h in range(3)),
    lengths=LENGTHS,
)(Retention(3))


@spelling("linear_attention", "q k v", layout="bhtd", lengths=LENGTHS)
def linear_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    out = torch.zeros_like(v)
    for t in range(q.shape[2]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        out[:, :, t] = torch.einsum("bhkv,bhk->bhv", s, q[:, :, t] * q.shape[-1] ** -0.5)
    return out


@spelling("linear_attention", "q k v state", scale=1.0, returns_state=True, lengths=LENGTHS)
def linear_loop_iadd(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    s = state.clone()
    outs = []
    for t in range(q.shape[1]):
        s += k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(outs, dim=1), s


@spelling("linear_attention", "q k v beta", scale=1.0, state_layout="vk", lengths=LENGTHS)
def linear_loop_beta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    w = torch.zeros(q.shape[0], q.shape[2], v.shape[3], q.shape[3], dtype=q.dtype)
    ys = []
    for t in range(q.shape[1]):
        w = w + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t] * beta[:, t, :, None])
        ys.append(torch.einsum("bhvk,bhk->bhv", w, q[:, t]))
    return torch.stack(ys, 1)
