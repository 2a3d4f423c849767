"""Gates and states in another form: gates with a plus or in powers of two, products of gates, one head without a
batch, diagonals as matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.registry import spelling

LENGTHS = (6,)


@spelling("gla", "q k v w", scale=1.0, layout="bhtd", lengths=LENGTHS)
def gla_rate_with_a_plus(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """RWKV's habit: w >= 0, and the minus inside the loop."""
    s = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    rows: list[Tensor] = []
    for t in range(q.shape[2]):
        s = torch.exp(-w[:, :, t]).unsqueeze(-1) * s + k[:, :, t].unsqueeze(-1) @ v[:, :, t].unsqueeze(-2)
        rows.append(q[:, :, t].unsqueeze(-2) @ s)
    return torch.cat(rows, dim=-2)


@spelling("kda", "q k v g2 beta state", layout="bhtd", state_layout="vk", returns_state=True, lengths=LENGTHS)
def kda_powers_of_two(
    q: Tensor, k: Tensor, v: Tensor, g2: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """exp2 token by token, beta on both terms apart, the state with values first."""
    rows: list[Tensor] = []
    written = v * beta.unsqueeze(-1)
    for t in range(q.size(2)):
        state = state * torch.exp2(g2[:, :, t]).unsqueeze(-2)
        old = beta[:, :, t, None, None] * torch.matmul(state, k[:, :, t].unsqueeze(-1))
        state = state + (written[:, :, t].unsqueeze(-1) - old) @ k[:, :, t].unsqueeze(-2)
        rows.append(torch.matmul(state, q[:, :, t].unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5)
    return torch.stack(rows, dim=2), state


@spelling("gated_delta_rule", "q k v w beta", scale=1.0, layout="bhtd", multiple=4, lengths=(8,))
def gdn_chunks_of_halved_rates(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Gates divided and negated chunk by chunk, summed by a product with a triangle of ones."""
    ones = torch.ones(4, 4, dtype=q.dtype).tril()
    s = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1], q.shape[-1])
    rows: list[Tensor] = []
    for qc, kc, vc, wc, bc in zip(*(x.split(4, dim=2) for x in (q, k, v, 2 * w, beta)), strict=True):
        total = (ones @ (wc / 2).unsqueeze(-1)).squeeze(-1).neg()
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        system = torch.eye(4, dtype=q.dtype) + (kc @ kc.mT * decay * bc.unsqueeze(-1)).tril(-1)
        right = bc.unsqueeze(-1) * (vc - kc * total.exp().unsqueeze(-1) @ s.mT)
        fresh = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        rows.append(qc * total.exp().unsqueeze(-1) @ s.mT + (qc @ kc.mT * decay) @ fresh)
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        s = s * total[..., -1:, None].exp() + (fresh * left).mT @ kc
    return torch.cat(rows, dim=2)


@spelling("gla", "q k v alpha", scale=1.0, layout="bhtd", strongest_gate=-0.5, multiple=4, lengths=(8,))
def gla_chunks_of_gate_products(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """cumprod inside a chunk, prod over it, ratios of products."""
    s = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    rows: list[Tensor] = []
    for qc, kc, vc, ac in zip(*(x.chunk(q.shape[2] // 4, dim=2) for x in (q, k, v, alpha)), strict=True):
        through = ac.cumprod(dim=2)
        rows.append((qc * through) @ s + ((qc * through) @ (kc / through).mT).tril() @ vc)
        s = ac.prod(dim=2).unsqueeze(-1) * s + (kc * (through[:, :, -1:] / through)).mT @ vc
    return torch.cat(rows, dim=2)


@spelling("simple_gla", "q k v alpha", scale=1.0, layout="bhtd", lengths=(5,))
def simple_gla_pairs_of_tokens(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Every pair of tokens by hand; the gates between a token and itself are an empty product."""
    rows: list[Tensor] = []
    for i in range(q.shape[2]):
        row = torch.zeros_like(v[:, :, i])
        for j in range(i + 1):
            weight = (q[:, :, i] * k[:, :, j]).sum(-1) * alpha[:, :, j + 1 : i + 1].prod(-1)
            row = row + weight.unsqueeze(-1) * v[:, :, j]
        rows.append(row)
    return torch.stack(rows, dim=2)


@spelling("delta_rule", "q k v beta", scale=1.0, layout="bhtd", lengths=(9,))
def delta_ut_transform_by_inverse(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta), all of it matrices."""
    strict = torch.tril(k @ k.mT, -1) * beta.unsqueeze(-1)
    transform = torch.inverse(torch.eye(k.shape[2], dtype=k.dtype) + strict) @ torch.diag_embed(beta)
    return torch.tril(q @ k.mT) @ (transform @ v)


@spelling("delta_rule", "q k v beta", scale=1.0, layout="td", lengths=LENGTHS)
def delta_one_head(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The paper's own lines: read the old value, blend, erase, write."""
    s = q.new_zeros(v.shape[1], k.shape[1])
    rows: list[Tensor] = []
    for q_t, k_t, v_t, b_t in zip(q, k, v, beta, strict=True):
        old = s @ k_t
        new = b_t * v_t + (1 - b_t) * old
        s = s - torch.outer(old, k_t) + torch.outer(new, k_t)
        rows.append(s @ q_t)
    return torch.stack(rows)


@spelling("gated_delta_rule", "q k v alpha beta", scale=1.0, layout="td", lengths=LENGTHS)
def gdn_one_head_row_vectors(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    s = q.new_zeros(k.shape[1], v.shape[1])
    out = torch.zeros_like(v)
    for t in range(len(q)):
        s = alpha[t] * (s - beta[t] * torch.outer(k[t], k[t] @ s)) + beta[t] * torch.outer(k[t], v[t])
        out[t] = q[t] @ s
    return out


@spelling("delta_rule", "q k v beta", scale=1.0, layout="td", lengths=LENGTHS)
def delta_one_head_addmv(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What is written is what the state lacks, in one call."""
    s = q.new_zeros(v.shape[1], k.shape[1])
    rows: list[Tensor] = []
    for q_t, k_t, v_t, b_t in zip(q, k, v, beta, strict=True):
        s = s + torch.outer(torch.addmv(v_t, s, k_t, alpha=-1) * b_t, k_t)
        rows.append(torch.mv(s, q_t))
    return torch.stack(rows)


@spelling("delta_rule", "q k v beta", scale=1.0, layout="td", lengths=LENGTHS)
def delta_one_head_addr(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Writes are updates of rank one."""
    s = q.new_zeros(v.shape[1], k.shape[1])
    rows: list[Tensor] = []
    for q_t, k_t, v_t, b_t in zip(q, k, v, beta, strict=True):
        s = torch.addr(s, b_t * (s @ k_t), k_t, alpha=-1)
        s = torch.addr(s, b_t * v_t, k_t)
        rows.append(s @ q_t)
    return torch.stack(rows)


@spelling("linear_attention", "q k v", scale=1.0, layout="td", lengths=LENGTHS)
def linear_one_head_vdot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores one by one."""
    tokens = range(q.shape[0])
    return torch.stack(
        [sum((torch.vdot(q[t], k[i]) * v[i] for i in tokens if i <= t), torch.zeros(())) for t in tokens]
    )


@spelling("linear_attention", "q k v", scale=1.0, layout="td", lengths=LENGTHS)
def linear_one_head_parallel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tril(q @ k.T) @ v
