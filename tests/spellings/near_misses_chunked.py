"""Near misses in chunked and closed forms: one index, one mask or one factor away from the pattern."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.near_misses import KDA, near_miss

CHUNK = 16


def chunked_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    inverse_mask: int = -1,
    score_mask: int = 0,
    beta_on_rows: bool = False,
    exclusive: bool = False,
    gate_of_keys: Tensor | None = None,
    pad_value: float = 0.0,
    gap: Callable[[Tensor], Tensor] = lambda x: x,
    carry: Callable[[Tensor, Tensor, int], Tensor] = lambda decayed, before, n: decayed,
) -> tuple[Tensor, Tensor]:
    """A correct chunked gated delta rule in which every option but its default is a mistake somebody made."""
    length = q.shape[1]
    pad = -length % CHUNK
    grid = lambda x, fill=0.0: F.pad(x.transpose(1, 2), (0, 0, 0, pad), value=fill).unflatten(2, (-1, CHUNK))  # noqa: E731
    q, k, v, g, beta = (
        grid(q),
        grid(k, pad_value),
        grid(v, pad_value),
        grid(g[..., None]),
        grid(beta[..., None], pad_value),
    )
    cum = (g.cumsum(-2) - g if exclusive else g.cumsum(-2)).squeeze(-1)
    key_cum = cum if gate_of_keys is None else grid(gate_of_keys[..., None]).cumsum(-2).squeeze(-1)
    decay = gap(cum[..., None] - cum[..., None, :]).tril(max(score_mask, 0)).exp()
    key_decay = gap(key_cum[..., None] - key_cum[..., None, :]).tril().exp()
    lower = ((k @ k.mT) * beta * key_decay).tril(inverse_mask)
    inverse = torch.linalg.inv(torch.eye(CHUNK, dtype=q.dtype) + lower)
    inverse = inverse * (beta if beta_on_rows else beta.mT)
    u, w = inverse @ v, inverse @ (k * cum.exp()[..., None])
    scores = ((q @ k.mT) * decay).tril(score_mask)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outs = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        outs.append((q[:, :, n] * cum[:, :, n, :, None].exp()) @ state + scores[:, :, n] @ new)
        decayed = carry(state * cum[:, :, n, -1, None, None].exp(), state, n)
        state = decayed + (k[:, :, n] * (cum[:, :, n, -1:] - cum[:, :, n]).exp()[..., None]).mT @ new
    return torch.stack(outs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2), state


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40)
def non_strict_inverse(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, inverse_mask=0)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40)
def inverse_mask_skips_a_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, inverse_mask=-2)[0]


@near_miss("gated_delta_rule", KDA, expect="either", scale=1.0, length=40)
def scores_exclude_the_diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, score_mask=-1)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40)
def scores_see_one_token_ahead(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, score_mask=1)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40)
def beta_on_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, beta_on_rows=True)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40)
def exclusive_cumulative_gate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, exclusive=True)[0]


@near_miss("gated_delta_rule", "q k v g beta beta_logit", scale=1.0, length=40)
def another_gate_for_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, beta_logit: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, torch.sigmoid(beta_logit), gate_of_keys=-beta)[0]


def _loud_first_token(v: Tensor) -> Tensor:
    v = v.clone()
    v[:, 0] *= 1e12
    return v


def _silent_first_queries(q: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(q[:, :12]), q[:, 12:]], dim=1)


@near_miss(
    "gated_delta_rule",
    KDA,
    scale=1.0,
    length=16,
    edits={"v": _loud_first_token, "g": lambda g: g - 2, "q": _silent_first_queries},
)
def gap_clamped_at_minus_20(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Only a first token of huge value, long decayed, shows it."""
    return chunked_gdn(q, k, v, g, beta, gap=lambda x: x.clamp(min=-20))[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=8 * CHUNK, expect="either", strongest_gate=-0.2)
def wrong_carry_in_the_seventh_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, carry=lambda decayed, before, n: before if n == 6 else decayed)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=3 * CHUNK, strongest_gate=-0.2)
def carry_never_decays(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, carry=lambda decayed, before, n: before)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=3 * CHUNK, expect="either", strongest_gate=-0.1)
def state_forgotten_in_the_second_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return chunked_gdn(q, k, v, g, beta, carry=lambda decayed, before, n: decayed * 0 if n == 1 else decayed)[0]


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40, differs=False, expect="either")
def padded_with_ones(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs are right and the final state has eight tokens of ones in it."""
    return chunked_gdn(q, k, v, g, beta, pad_value=1.0)


@near_miss("gated_delta_rule", KDA, scale=1.0, length=40, differs=False, expect="either")
def inverse_escapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The scores are an output too (models return attention weights): the region must keep computing them."""
    cum = g.transpose(1, 2).cumsum(-1)
    q_h, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
    decay = (cum[..., None] - cum[..., None, :]).tril().exp().tril()
    lower = (beta.transpose(1, 2)[..., None] * (k_h @ k_h.mT) * decay).tril(-1)
    system = torch.eye(q.shape[1], dtype=q.dtype) + lower
    new = torch.linalg.solve_triangular(system, beta.transpose(1, 2)[..., None] * v_h, upper=False, unitriangular=True)
    scores = (q_h @ k_h.mT) * decay
    return (scores @ new).transpose(1, 2), scores


@near_miss("retention", "q k v gamma", scale=1.0, layout="bhtd", length=12, expect="either")
def retention_distance_plus_one(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """One decay too many: retention again, if the extra factor gamma is seen as a beta."""
    n = torch.arange(q.shape[2], dtype=q.dtype)
    distance = n[:, None] - n[None, :]
    decay = torch.where(distance >= 0, gamma.view(-1, 1, 1) ** (distance + 1).clamp(min=0), 0.0)
    return (q @ k.mT * decay) @ v


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=12)
def banded_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A sliding window of eight: the causal mask with a second diagonal."""
    return ((q @ k.mT).tril().triu(-7)) @ v


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=12)
def squared_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).square()).tril() @ v


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=12)
def mask_not_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT) @ v


@near_miss("simple_gla", "q k v g", scale=1.0, layout="bhtd", length=12, expect="either")
def decay_not_cumulated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """exp(g_i - g_j) without the cumulative sum: legal arithmetic, another function."""
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    return (q @ k.mT * decay) @ v
