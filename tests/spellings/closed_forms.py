"""Chunks and closed forms: cumprod, flipped sums, windows, prefix doubling, other solvers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.registry import spelling

LENGTHS = (12,)


@spelling("gla", "q k v alpha", scale=1.0, layout="bhtd", strongest_gate=-0.5, lengths=(11,))
def gla_parallel_cumprod(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Factors by cumprod, not logarithms by cumsum."""
    decay = alpha.cumprod(dim=-2)
    scores = torch.tril((q * decay) @ (k / decay).mT)
    return scores @ v


@spelling("simple_gla", "q k v alpha", scale=1.0, strongest_gate=-0.5, lengths=(11,))
def simple_gla_cumprod_ratio(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    a = torch.cumprod(alpha, 1).transpose(1, 2)
    ratio = torch.where(torch.ones(a.shape[-1], a.shape[-1]).tril().bool(), a.unsqueeze(-1) / a.unsqueeze(-2), 0.0)
    return torch.einsum("bihd,bjhd,bhij,bjhv->bihv", q, k, ratio.to(q.dtype), v)


@spelling("gla", "q k v g", scale=1.0, layout="bhtd", multiple=4, returns_state=True, lengths=LENGTHS)
def gla_chunks_flipped_cumsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The decay from each key to the end of its chunk as a cumulative sum run backwards."""
    s = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outs = []
    for q_c, k_c, v_c, g_c in zip(*(x.split(4, dim=2) for x in (q, k, v, g)), strict=True):
        begin = g_c.cumsum(2)
        end = torch.flip(torch.cumsum(torch.flip(g_c, [2]), 2), [2]) - g_c
        gap = begin.unsqueeze(3) - begin.unsqueeze(2)
        gap = gap.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1)[..., None], float("-inf"))
        inside = torch.einsum("bhid,bhjd,bhijd->bhij", q_c, k_c, gap.exp())
        outs.append(inside @ v_c + (q_c * begin.exp()) @ s)
        s = s * begin[:, :, -1].exp().unsqueeze(-1) + (k_c * end.exp()).mT @ v_c
    return torch.cat(outs, 2), s


@spelling("linear_attention", "q k v", scale=1.0, layout="bhtd", multiple=4, lengths=LENGTHS)
def linear_chunks_unfold(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunks as windows, the states before them as an exclusive cumulative sum."""
    q, k, v = (x.unfold(2, 4, 4).transpose(-1, -2) for x in (q, k, v))
    kv = k.mT @ v
    before = kv.cumsum(2) - kv
    return (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3)


@spelling("retention", "q k v gamma", scale=1.0, layout="bhtd", multiple=4, lengths=LENGTHS)
def retention_chunks_tensor_split(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    gamma = gamma.view(-1, 1, 1)
    n = torch.arange(4, dtype=q.dtype)
    within = torch.pow(gamma, (n[:, None] - n).clamp(min=0)) * torch.ones(4, 4, dtype=q.dtype).tril()
    s, outs = torch.zeros(1, dtype=q.dtype), []
    count = q.shape[2] // 4
    for q_c, k_c, v_c in zip(*(torch.tensor_split(x, count, dim=2) for x in (q, k, v)), strict=True):
        outs.append((q_c @ k_c.mT * within) @ v_c + gamma ** (n[:, None] + 1) * (q_c @ s if outs else 0 * v_c))
        kv = (k_c * gamma ** (3 - n[:, None])).mT @ v_c
        s = gamma**4 * s + kv if len(outs) > 1 else kv
    return torch.concat(outs, 2)


@spelling("simple_gla", "q k v g state", scale=1.0, multiple=4, returns_state=True, lengths=LENGTHS)
def simple_gla_chunks_stacked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All chunks at once in token-major layout, then a short scan over their states."""
    q, k, v, g = (torch.stack(x.chunk(x.shape[1] // 4, dim=1), dim=1) for x in (q, k, v, g))
    total = g.cumsum(2)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    gap = torch.where(mask[..., None], total.unsqueeze(3) - total.unsqueeze(2), -torch.inf).exp()
    inside = torch.einsum("bnihk,bnjhk,bnijh,bnjhv->bnihv", q, k, gap, v)
    writes = torch.einsum("bnjhk,bnjh,bnjhv->bnhkv", k, (total[:, :, -1:] - total).exp(), v)
    before = []
    for n in range(q.shape[1]):
        before.append(state)
        state = state * total[:, n, -1].exp()[..., None, None] + writes[:, n]
    across = torch.einsum("bnihk,bnih,bnhkv->bnihv", q, total.exp(), torch.stack(before, 1))
    return (inside + across).flatten(1, 2), state


@spelling("gla", "q k v alpha", scale=1.0, lengths=(9,))
def gla_prefix_doubling(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """All states at once by a scan of log T steps (Hillis and Steele)."""
    a = alpha.unsqueeze(-1)
    s = k.unsqueeze(-1) * v.unsqueeze(-2)
    step = 1
    while step < q.shape[1]:
        s = torch.cat([s[:, :step], s[:, step:] + a[:, step:] * s[:, :-step]], 1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
        step *= 2
    return (q.unsqueeze(-1) * s).sum(-2)


@spelling("delta_rule", "q k v beta", scale=1.0, layout="bhtd", lengths=(9,))
def delta_general_solve(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A general solver where a triangular one would do."""
    beta = beta.unsqueeze(-1)
    system = torch.eye(k.shape[2], dtype=k.dtype) + torch.tril(beta * k @ k.mT, -1)
    return torch.tril(q @ k.mT) @ torch.linalg.solve(system, beta * v)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, layout="bhtd", lengths=(9,))
def gdn_inverse_of_strict_part(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    size = k.shape[2]
    total = g.cumsum(-1)
    ones = torch.ones(size, size, dtype=k.dtype)
    gap = torch.exp((total[..., :, None] - total[..., None, :]).masked_fill(ones.triu(1).bool(), 0))
    inverse = torch.inverse(torch.eye(size, dtype=k.dtype) + k @ k.mT * gap * beta[..., None] * ones.tril(-1))
    return (q @ k.mT * gap * ones.tril()) @ (inverse @ (v * beta[..., None]))


@spelling("delta_rule", "q k v beta", scale=1.0, layout="bhtd", lengths=(8,), multiple=8)
def delta_inverse_by_doubling(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """(I + A)^-1 = (I - A)(I + A^2)(I + A^4).. : the strict part is nilpotent."""
    size = k.shape[2]
    eye = torch.eye(size, dtype=k.dtype)
    power = -(beta.unsqueeze(-1) * (k @ k.transpose(-1, -2))).tril(diagonal=-1)
    inverse = eye + power
    reach = 2
    while reach < size:
        power = power @ power
        inverse = inverse @ (eye + power)
        reach *= 2
    return (q @ k.transpose(-1, -2)).tril() @ inverse @ (v * beta.unsqueeze(-1))


@spelling("linear_attention", "q k v", scale=1.0, layout="bhtd", lengths=(11,))
def linear_strict_part_and_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    past = torch.tril(q @ k.mT, diagonal=-1) @ v
    return past + (q * k).sum(-1, keepdim=True) * v


@spelling("linear_attention", "q k v", scale=1.0, layout="bhtd", lengths=(11,))
def linear_scores_without_their_future(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.swapaxes(-2, -1))
    return torch.matmul(scores - scores.triu(1), v)


@spelling("linear_attention", "q k v", lengths=(11,))
def linear_mask_by_where_flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, length, heads, size = q.shape
    q, k, v = (x.permute(0, 2, 1, 3).reshape(batch * heads, length, -1) for x in (q * size**-0.5, k, v))
    scores = torch.baddbmm(torch.zeros(1, dtype=q.dtype), q, k.transpose(1, 2))
    causal = torch.tril(torch.ones(length, length)) > 0
    o = torch.bmm(torch.where(causal, scores, torch.zeros_like(scores)), v)
    return o.view(batch, heads, length, -1).permute(0, 2, 1, 3)


@spelling("retention", "q k v log_gamma", scale=1.0, layout="bhtd", lengths=(11,))
def retention_parallel_relu_of_distance(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor) -> Tensor:
    n = torch.arange(q.shape[2]).to(q.dtype)
    distance = n.view(-1, 1) - n.view(1, -1)
    decay = torch.exp(torch.relu(distance) * log_gamma[:, None, None]) * (distance >= 0)
    return torch.einsum("bhnd,bhmd,hnm,bhme->bhne", q, k, decay, v)


@spelling("simple_gla", "q k v g", scale=1.0, layout="bhtd", lengths=(11,))
def simple_gla_decay_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The decay matrix as a cumulative product along one side of a matrix of factors."""
    length = q.shape[2]
    factors = g.exp().unsqueeze(-1).expand(*g.shape, length)
    factors = factors.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(-1), 1.0)
    decay = factors.cumprod(-2).tril()
    return (decay * (q @ k.mT)) @ v


@spelling("simple_gla", "x dt a b c", scale=1.0, multiple=4, returns_state=True, state_layout="vk", lengths=LENGTHS)
def mamba2_discrete_chunks(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The four-step listing of the Mamba-2 paper: inputs already multiplied by dt, chunk states by segment sums."""
    batch, length, heads, size = x.shape
    chunks = length // 4
    da = (dt * a).reshape(batch, chunks, 4, heads).permute(0, 3, 1, 2)
    x = (x * dt.unsqueeze(-1)).reshape(batch, chunks, 4, heads, size)
    b, c = (y.reshape(batch, chunks, 4, heads, -1) for y in (b, c))
    total = torch.cumsum(da, dim=-1)
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, _segment_sum(da).exp(), x)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(total[:, :, :, -1:] - total), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(_segment_sum(F.pad(total[:, :, :, -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)
    states, final = states[:, :-1], states[:, -1]
    across = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(total))
    return (inside + across).reshape(batch, length, heads, size), final


def _segment_sum(x: Tensor) -> Tensor:
    size = x.size(-1)
    x = x.unsqueeze(-1).expand(*x.shape, size)
    x = x.masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(-1), 0)
    return torch.cumsum(x, dim=-2).masked_fill(~torch.ones(size, size, dtype=torch.bool).tril(0), -torch.inf)


@spelling("gla", "q k v g", scale=1.0, lengths=(9,))
def gla_states_by_cumsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Every prefix state from one cumulative sum of writes that the decay has been divided out of."""
    total = g.cumsum(1).unsqueeze(-1)
    states = (k.unsqueeze(-1) * v.unsqueeze(-2) * (-total).exp()).cumsum(1) * total.exp()
    return torch.einsum("bthk,bthkv->bthv", q, states)


@spelling("gated_delta_rule", "q k v g beta", scale=1.0, layout="bhtd", multiple=4, lengths=LENGTHS)
def gdn_chunks_with_wy_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Chunks in the WY form: rows w and u built one by one, no matrix inverse."""
    s = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outs = []
    for first in range(0, q.shape[2], 4):
        now = slice(first, first + 4)
        q_c, k_c, v_c, b_c = q[:, :, now], k[:, :, now], v[:, :, now], beta[:, :, now, None]
        total = g[:, :, now].cumsum(-1)[..., None]
        errors: list[Tensor] = []
        for i in range(4):
            row = v_c[:, :, i] - (k_c[:, :, i, None] * total[:, :, i, None].exp() @ s)[:, :, 0]
            for j in range(i):
                decay = (total[:, :, i] - total[:, :, j]).exp()
                row = row - (k_c[:, :, i] * k_c[:, :, j]).sum(-1, keepdim=True) * decay * errors[j]
            errors.append(b_c[:, :, i] * row)
        u = torch.stack(errors, 2)
        inside = (q_c @ k_c.mT * (total - total.mT).exp()).tril()
        outs.append((q_c * total.exp()) @ s + inside @ u)
        s = s * total[:, :, -1:].exp() + (k_c * (total[:, :, -1:] - total).exp()).mT @ u
    return torch.cat(outs, 2)
