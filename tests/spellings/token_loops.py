"""Token loops over flat batches, with fused products in place, in containers, in published cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("gated_delta_rule", "q k v g beta state", scale=1.0, returns_state=True, lengths=LENGTHS)
def gdn_flat_batch_baddbmm(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Batch and heads merged into one dimension, every product a bmm or baddbmm."""
    batch, length, heads, size = k.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * heads, length, -1) for x in (q, k, v))
    g, beta = (x.transpose(1, 2).reshape(batch * heads, length, 1, 1) for x in (g, beta))
    s = state.reshape(batch * heads, size, -1)
    outs = []
    for t in range(length):
        s = s * g[:, t].exp()
        old = torch.bmm(k[:, t : t + 1], s)
        s = torch.baddbmm(s, k[:, t : t + 1].transpose(1, 2), beta[:, t] * (v[:, t : t + 1] - old))
        outs.append(torch.bmm(q[:, t : t + 1], s))
    o = torch.cat(outs, dim=1).reshape(batch, heads, length, -1).transpose(1, 2)
    return o, s.reshape(batch, heads, size, -1)


@spelling("gla", "q k v g", scale=1.0, lengths=LENGTHS)
def gla_einsum_other_letters(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    memory = torch.zeros(k.shape[0], k.shape[2], v.shape[3], k.shape[3], dtype=k.dtype)
    rows = []
    for i in range(k.shape[1]):
        memory = torch.einsum("nhm,nhdm->nhdm", g[:, i].exp(), memory)
        memory = memory + torch.einsum("...m,...d->...dm", k[:, i], v[:, i])
        rows.append(torch.einsum("nhdm,nhm->nhd", memory, q[:, i]))
    return torch.stack(rows).movedim(0, 1)


@spelling("retention", "q k v gamma", scale=1.0, lengths=LENGTHS)
def retention_index_copy(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    s = k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        s = gamma[:, None, None] * s + k[:, t, :, :, None] * v[:, t, :, None]
        out.index_copy_(1, torch.tensor([t]), (q[:, t, :, None] @ s).movedim(2, 1))
    return out


@spelling("simple_gla", "q k v alpha", scale=1.0, lengths=LENGTHS)
def simple_gla_index_put(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    s = torch.zeros((), dtype=k.dtype)
    out = v.new_zeros(v.shape)
    for t in range(q.shape[1]):
        s = alpha[:, t][..., None, None] * s + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out[:, torch.tensor([t])] = torch.einsum("bhk,bhkv->bhv", q[:, t], s).unsqueeze(1)
    return out


@spelling("gla", "q k v alpha state", scale=1.0, returns_state=True, lengths=LENGTHS)
def gla_lerp(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """An interpolation that pays its write weight back: lerp(kv, S, a) = a S + (1 - a) kv."""
    outs = []
    for t in range(q.shape[1]):
        a = alpha[:, t].unsqueeze(-1)
        new = (k[:, t] / (1 - alpha[:, t])).unsqueeze(-1) * v[:, t].unsqueeze(-2)
        state = torch.lerp(new, state, a)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1), state


@spelling("gla", "q k v g state", scale=1.0, returns_state=True, lengths=LENGTHS)
def gla_in_place_addcmul(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    s = state.clone()
    outs = []
    for t in range(q.shape[1]):
        s.mul_(g[:, t].exp()[..., None]).addcmul_(k[:, t, :, :, None], v[:, t, :, None, :])
        outs.append(torch.matmul(s.mT, q[:, t, :, :, None])[..., 0])
    return torch.stack(outs, 1), s


@spelling("linear_attention", "q k v state", scale=1.0, layout="bhtd", returns_state=True, lengths=LENGTHS)
def linear_in_place_baddbmm(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    s = state.flatten(0, 1).clone()
    outs = []
    for t in range(q.shape[2]):
        s.baddbmm_(k[:, :, t].flatten(0, 1).unsqueeze(2), v[:, :, t].flatten(0, 1).unsqueeze(1))
        outs.append(torch.bmm(q[:, :, t].flatten(0, 1).unsqueeze(1), s))
    o = torch.cat(outs, 1)
    return o.unflatten(0, q.shape[:2]), s.unflatten(0, q.shape[:2])


@dataclass
class Cache:
    state: Tensor
    seen: int = 0


@spelling("kda", "q k v g beta state", scale=1.0, returns_state=True, lengths=LENGTHS)
def kda_dataclass_cache(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    cache = Cache(state)

    def advance(x: tuple[Tensor, ...]) -> Tensor:
        q_t, k_t, v_t, g_t, b_t = x
        s = cache.state * g_t.exp()[..., None]
        s = s + (k_t * b_t[..., None])[..., None] * (v_t - (k_t[..., None] * s).sum(-2))[..., None, :]
        cache.state, cache.seen = s, cache.seen + 1
        return (q_t[..., None] * s).sum(-2)

    tokens = zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True)
    return torch.stack([advance(x) for x in tokens], dim=1), cache.state


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_strengths_folded_in(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """beta multiplied into k and v before the loop."""
    kb, vb = k * beta.unsqueeze(-1), v * beta.unsqueeze(-1)
    s = torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    outs = []
    for q_t, k_t, kb_t, vb_t in zip(*(x.split(1, dim=1) for x in (q, k, kb, vb)), strict=True):
        q_t, k_t, kb_t, vb_t = (x.transpose(1, 2) for x in (q_t, k_t, kb_t, vb_t))
        s = s + k_t.mT @ vb_t - kb_t.mT @ (k_t @ s)
        outs.append((q_t @ s).transpose(1, 2))
    return torch.cat(outs, 1)


@spelling("gated_delta_rule", "q k v alpha beta state", scale=1.0, returns_state=True, lengths=LENGTHS)
def gdn_householder_by_eye(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """S = S A with A = alpha (I - beta k k^T), the state kept [V, K] inside."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    s = state.mT
    outs = []
    for t in range(q.shape[1]):
        k_t, b_t = k[:, t], beta[:, t, :, None, None]
        step = alpha[:, t, :, None, None] * (eye - b_t * k_t.unsqueeze(-1) @ k_t.unsqueeze(-2))
        s = s @ step + b_t * v[:, t].unsqueeze(-1) @ k_t.unsqueeze(-2)
        outs.append((s @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outs, 1), s.mT


class DeltaCell(nn.Module):
    def forward(self, s: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        error = v - torch.einsum("bhkv,bhk->bhv", s, k)
        return s + torch.einsum("bhk,bhv->bhkv", k, error * beta[..., None])


class DeltaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({"write": DeltaCell()})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outs = {}
        for t in range(q.shape[1]):
            state = self.cells["write"](state, k[:, t], v[:, t], beta[:, t])
            outs[t] = torch.linalg.vecdot(state, q[:, t].unsqueeze(-1), dim=-2)
        return torch.stack(list(outs.values()), dim=1), state


spelling(
    "delta_rule",
    "q k v beta state",
    name="delta_cell_in_a_module_dict",
    scale=1.0,
    returns_state=True,
    lengths=LENGTHS,
)(DeltaLayer())


@spelling("simple_gla", "q k v g", layout="bhtd", lengths=LENGTHS)
def gated_retention_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated RetNet (YOCO, arXiv 2405.05254), the gate as a power of two."""
    log2_gate = g * 1.4426950408889634
    s = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outs = []
    for t in range(q.shape[2]):
        s = torch.exp2(log2_gate[:, :, t, None, None]) * s + k[:, :, t, :, None] * v[:, :, t, None, :]
        outs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t] / q.shape[-1] ** 0.5, s))
    return torch.stack(outs, 2)


@spelling("linear_attention", "q k v", scale=1.0, lengths=LENGTHS)
def linear_token_major(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[T, B, H, D] inside, the state read and written by tensordot-like products."""
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    s = torch.zeros(*k.shape[1:], v.shape[-1], dtype=k.dtype)
    o = torch.zeros(v.shape, dtype=v.dtype)
    for t in range(len(q)):
        s = s + k[t].unsqueeze(-1).matmul(v[t].unsqueeze(-2))
        o[t] = q[t].unsqueeze(-2).matmul(s).squeeze(-2)
    return o.transpose(0, 1)


@spelling("kda", "q k v g beta", groups=2, scale=1.0, lengths=LENGTHS)
def kda_grouped_by_index(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Key heads picked for each value head by an index tensor."""
    which = torch.arange(v.shape[2]) // 2
    q, k = q[:, :, which], k.index_select(2, which)
    s = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        delta = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s)) * beta[:, t].unsqueeze(-1)
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(out, 1)


@spelling("gated_delta_rule", "q k v g beta", groups=3, scale=1.0, lengths=LENGTHS)
def gdn_grouped_dimension(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Groups as a dimension of their own: the state is [B, G, R, K, V], keys are never repeated."""
    groups = v.shape[2] // k.shape[2]
    v, g, beta = (x.unflatten(2, (-1, groups)) for x in (v, g, beta))
    s = torch.zeros(*v.shape[:1], *v.shape[2:4], k.shape[-1], v.shape[-1], dtype=v.dtype)
    outs = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp()[..., None, None]
        old = torch.einsum("bgrkv,bgk->bgrv", s, k[:, t])
        s = s + torch.einsum("bgk,bgrv->bgrkv", k[:, t], beta[:, t, ..., None] * (v[:, t] - old))
        outs.append(torch.einsum("bgrkv,bgk->bgrv", s, q[:, t]))
    return torch.stack(outs, 1).flatten(2, 3)


@spelling("simple_gla", "x dt a b c state", scale=1.0, state_layout="vk", returns_state=True, lengths=LENGTHS)
def mamba2_minimal_step_loop(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A published Mamba-2 step (dA, dBx, then C), called once a token."""
    h = state
    ys = []
    for t in range(x.shape[1]):
        da = torch.exp(dt[:, t] * a)
        dbx = torch.einsum("bh,bhn,bhp->bhpn", dt[:, t], b[:, t], x[:, t])
        h = h * da.unsqueeze(-1).unsqueeze(-1) + dbx
        ys.append(torch.einsum("bhn,bhpn->bhp", c[:, t], h))
    return torch.stack(ys, dim=1), h


@spelling("delta_rule", "q k v beta_logit", scale=1.0, lengths=LENGTHS)
def delta_sigmoid_by_exp(q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor) -> Tensor:
    beta = 1 / (1 + torch.exp(-beta_logit))
    s = torch.zeros(k.shape[0], k.shape[2], v.shape[3], k.shape[3], dtype=k.dtype)
    outs = []
    for t in range(q.shape[1]):
        s = s + (beta[:, t, :, None] * (v[:, t] - (s @ k[:, t, :, :, None])[..., 0]))[..., None] * k[:, t, :, None]
        outs.append((s @ q[:, t, :, :, None])[..., 0])
    return torch.stack(outs, 1)


@spelling("delta_rule", "q k v beta", scale=1.0, lengths=LENGTHS)
def delta_negative_eigenvalues(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write strengths up to two, given halved."""
    strength = 2 * (beta / 2)
    s = torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    outs = []
    for t in range(q.shape[1]):
        k_t = k[:, t].unsqueeze(-1)
        s = torch.sub(
            s, k_t * ((s * k_t).sum(-2, keepdim=True) - v[:, t].unsqueeze(-2)) * strength[:, t, :, None, None]
        )
        outs.append((s * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, 1)


@spelling("linear_attention", "q k v", lengths=LENGTHS)
def linear_scale_on_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * k.shape[-1] ** -0.5
    s = torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    outs = []
    for t in range(q.shape[1]):
        s += torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outs += [torch.einsum("bhk,bhkv->bhv", q[:, t], s)]
    return torch.stack(outs, 1)


@spelling(
    "gla",
    "q k v g state",
    scale=1.0,
    returns_state=True,
    state_dtype=torch.bfloat16,
    dtypes=(torch.bfloat16,),
    lengths=LENGTHS,
)
def gla_bf16_state_upcast(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A cache in bfloat16, computed on in float32 and rounded once at the end."""
    s = state.float()
    outs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t, g_t = (x[:, t].float() for x in (q, k, v, g))
        s = s * g_t.exp().unsqueeze(-1) + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outs.append((q_t.unsqueeze(-1) * s).sum(-2).to(q.dtype))
    return torch.stack(outs, 1), s.to(state.dtype)
