"""Token loops with a delta term, as people write them: KDA, gated delta rule, delta rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.spellings.registry import spelling, variant

LENGTHS = (7, 1, 2, 33)


@spelling("kda", "q k v g beta", lengths=LENGTHS)
def kda_multiply_sum_setitem(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    batch, length, heads, k_dim = q.shape
    q = q * k_dim**-0.5
    out = torch.zeros_like(v)
    s = v.new_zeros(batch, heads, k_dim, v.shape[-1])
    for t in range(length):
        s = s * g[:, t, :, :, None].exp()
        old = (s * k[:, t, :, :, None]).sum(-2)
        s = s + k[:, t].unsqueeze(-1) * ((v[:, t] - old) * beta[:, t, :, None]).unsqueeze(-2)
        out[:, t] = (s * q[:, t].unsqueeze(-1)).sum(-2)
    return out


@spelling("kda", "q k v g beta state", returns_state=True, lengths=LENGTHS)
def kda_einsum_list_stack(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    s, outs = state, []
    for t in range(q.shape[1]):
        s = s * torch.exp(g[:, t])[..., None]
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s)
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], error)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[-1] ** -0.5, s))
    return torch.stack(outs, dim=1), s


@spelling("kda", "q k v alpha beta", layout="bhtd", scale=1.0, lengths=LENGTHS)
def kda_factor_matmul_cat(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    outs = []
    for q_t, k_t, v_t, a_t, b_t in zip(
        q.unbind(2), k.unbind(2), v.unbind(2), alpha.unbind(2), beta.unbind(2), strict=True
    ):
        state = a_t.unsqueeze(-1) * state
        read = torch.matmul(k_t.unsqueeze(-2), state)
        state = state + torch.matmul((b_t.unsqueeze(-1) * k_t).unsqueeze(-1), v_t.unsqueeze(-2) - read)
        outs.append(q_t.unsqueeze(-2) @ state)
    return torch.cat(outs, dim=2)


@spelling("kda", "q k v g beta state", state_layout="vk", returns_state=True, lengths=LENGTHS)
def kda_value_key_state(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    decay = g.exp()
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, :]
        delta = beta[:, t, :, None] * (v[:, t] - (state @ k[:, t, :, :, None]).squeeze(-1))
        state = state + delta[..., :, None] * k[:, t, :, None, :]
        out[:, t] = (state @ q[:, t, :, :, None])[..., 0] / q.shape[-1] ** 0.5
    return out, state


@spelling("kda", "q k v g beta", lengths=LENGTHS, scale=1.0)
def kda_transition_matrix(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The paper's form: S = (I - b k k^T) diag(alpha) S + b k v^T."""
    batch, length, heads, k_dim = k.shape
    eye = torch.eye(k_dim, dtype=q.dtype)
    s = torch.zeros(batch, heads, k_dim, v.shape[-1], dtype=q.dtype)
    outs = []
    for t in range(length):
        k_t, b_t = k[:, t], beta[:, t, :, None, None]
        transition = (eye - b_t * k_t.unsqueeze(-1) * k_t.unsqueeze(-2)) * g[:, t].exp().unsqueeze(-2)
        s = transition @ s + b_t * (k_t.unsqueeze(-1) @ v[:, t].unsqueeze(-2))
        outs.append((s.transpose(-1, -2) @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outs, 1)


@spelling("kda", "q k v g beta state", returns_state=True, lengths=LENGTHS)
def kda_in_place_state(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5
    s = state.clone()
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        s.mul_(g[:, t].exp().unsqueeze(-1))
        delta = (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])).mul_(beta[:, t].unsqueeze(-1))
        s += k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * scale
    return out, s


@spelling("gated_delta_rule", "q k v g beta", layout="bhtd", lengths=LENGTHS)
def gdn_bhtd_setitem(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    batch, heads, length, k_dim = q.shape
    q = q / k_dim**0.5
    h = torch.zeros(batch, heads, k_dim, v.size(-1), dtype=v.dtype)
    out = torch.zeros(batch, heads, length, v.size(-1), dtype=v.dtype)
    for i in range(length):
        h = h * g[:, :, i].exp()[..., None, None]
        u = v[:, :, i] - (h * k[:, :, i][..., None]).sum(-2)
        u = u * beta[:, :, i][..., None]
        h = h + k[:, :, i].unsqueeze(-1) * u.unsqueeze(-2)
        out[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i], h)
    return out


@spelling("gated_delta_rule", "q k v alpha beta state", returns_state=True, scale=1.0, lengths=LENGTHS)
def gdn_factor_bmm(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    batch, length, heads, k_dim = q.shape
    v_dim = v.shape[-1]
    flat = lambda x: x.transpose(1, 2).reshape(batch * heads, length, *x.shape[3:])  # noqa: E731
    q, k, v, alpha, beta = flat(q), flat(k), flat(v), flat(alpha), flat(beta)
    s = state.reshape(batch * heads, k_dim, v_dim)
    outs = []
    for t in range(length):
        s = s * alpha[:, t, None, None]
        write = beta[:, t, None, None] * (v[:, t : t + 1] - torch.bmm(k[:, t : t + 1], s))
        s = s + torch.bmm(k[:, t : t + 1].transpose(1, 2), write)
        outs.append(torch.bmm(q[:, t : t + 1], s))
    out = torch.cat(outs, dim=1).view(batch, heads, length, v_dim).transpose(1, 2)
    return out, s.view(batch, heads, k_dim, v_dim)


@spelling("gated_delta_rule", "q k v g beta", lengths=LENGTHS)
def gdn_outer_by_einsum_expanded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The two products multiplied out: S = a S - b k (k^T a S) + b k v^T."""
    s = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=q.dtype)
    outs = []
    for t in range(q.size(1)):
        s = torch.exp(g[:, t]).view(*g.shape[::2], 1, 1) * s
        bk = beta[:, t].unsqueeze(-1) * k[:, t]
        erase = torch.einsum("bhk,bhj,bhjv->bhkv", bk, k[:, t], s)
        s = s - erase + torch.einsum("bhk,bhv->bhkv", bk, v[:, t])
        outs.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(outs, dim=1) * q.size(-1) ** -0.5


@spelling("gated_delta_rule", "q k v g beta", layout="bhtd", lengths=LENGTHS)
def gdn_value_key_state_index(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = q.new_zeros(q.size(0), q.size(1), v.size(-1), q.size(-1))
    out = torch.empty_like(v)
    for t in range(q.size(2)):
        state = state * g[..., t].exp()[:, :, None, None]
        pred = torch.einsum("bhvk,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bhv,bhk->bhvk", (v[:, :, t] - pred) * beta[:, :, t, None], k[:, :, t])
        out[:, :, t, :] = torch.einsum("bhvk,bhk->bhv", state, q[:, :, t])
    return out.mul(q.size(-1) ** -0.5)


@spelling("gated_delta_rule", "q k v g beta state", returns_state=True, lengths=LENGTHS)
def gdn_old_minus_new(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The Gated DeltaNet paper's view: interpolate between the old value and the new one."""
    outs = []
    for t in range(q.shape[1]):
        decayed = g[:, t].exp()[..., None, None] * state
        v_old = (k[:, t].unsqueeze(-2) @ decayed).squeeze(-2)
        v_new = beta[:, t, :, None] * v[:, t] + (1 - beta[:, t, :, None]) * v_old
        state = decayed - k[:, t, :, :, None] * v_old[:, :, None, :] + k[:, t, :, :, None] * v_new[:, :, None, :]
        outs.append(((q[:, t] * q.shape[-1] ** -0.5).unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, dim=1), state


@spelling("delta_rule", "q k v beta", layout="bhtd", lengths=LENGTHS)
def delta_bhtd_clone(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    s = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]).to(v)
    q = q * (q.shape[-1] ** -0.5)
    for i in range(q.shape[2]):
        k_i, v_i = k[:, :, i], v[:, :, i].clone()
        v_i = (v_i - (s.clone() * k_i[..., None]).sum(-2)) * beta[:, :, i, None]
        s = s.clone() + k_i.unsqueeze(-1) * v_i.unsqueeze(-2)
        out[:, :, i] = torch.einsum("bhd,bhdm->bhm", q[:, :, i], s)
    return out


@spelling("delta_rule", "q k v beta state", scale=1.0, state_layout="vk", returns_state=True, lengths=LENGTHS)
def delta_fast_weight(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Fast-weight programmer notation: W += beta (v - W k) (x) k; y = W q."""
    w, ys = state, []
    for t in range(q.shape[1]):
        w = w + (beta[:, t, :, None] * (v[:, t] - (w * k[:, t, :, None]).sum(-1)))[..., None] * k[:, t, :, None]
        ys.append((w * q[:, t, :, None]).sum(-1))
    return torch.stack(ys, 1), w


class KimiRecurrence(nn.Module):
    """A module that owns nothing but the loop, with a helper method for one token."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def token(self, s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = s * g.exp()[..., None]
        s = s + (k * beta[..., None])[..., None] * (v - torch.einsum("...kv,...k->...v", s, k))[..., None, :]
        return s, torch.einsum("...kv,...k->...v", s, q)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        q = q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        s = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if state is None else state
        outs = []
        for t in range(q.shape[1]):
            s, out = self.token(s, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
            outs.append(out.unsqueeze(1))
        return torch.cat(outs, dim=1), s


spelling("kda", "q k v g beta", name="kda_module", returns_state=True, lengths=LENGTHS)(KimiRecurrence())
variant("kda_module", "state", KimiRecurrence(0.5), takes=("q", "k", "v", "g", "beta", "state"), scale=0.5)


@spelling("kda", "q k v g beta", lengths=LENGTHS)
def kda_time_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Time moved to the front, as for nn.RNN, and iterated over directly."""
    q, k, v, a, beta = (x.movedim(1, 0) for x in (q, k, v, g.exp(), beta))
    s, outs = 0.0 * k[0].unsqueeze(-1) * v[0].unsqueeze(-2), []
    for q_t, k_t, v_t, a_t, b_t in zip(q, k, v, a, beta, strict=True):
        s = s * a_t.unsqueeze(-1)
        s = s + torch.einsum("bhi,bhj->bhij", k_t, b_t.unsqueeze(-1) * (v_t - torch.einsum("bhi,bhij->bhj", k_t, s)))
        outs.append(torch.einsum("bhi,bhij->bhj", q_t, s))
    return torch.stack(outs).movedim(0, 1) * q.shape[-1] ** -0.5


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, lengths=LENGTHS)
def gdn_heads_one_by_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    heads = []
    for h in range(q.shape[2]):
        s, outs = k.new_zeros(k.shape[0], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t, h].exp()[:, None, None]
            error = (v[:, t, h] - (s * k[:, t, h][..., None]).sum(1)) * beta[:, t, h][:, None]
            s = s + k[:, t, h][..., None] * error[:, None]
            outs.append((s * q[:, t, h][..., None]).sum(1))
        heads.append(torch.stack(outs, 1))
    return torch.stack(heads, 2)
