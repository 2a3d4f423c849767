"""Almost the pattern, and not it: published neighbours of the family, gates and norms that only look like the op's own,
masks and windows that are off, and axes taken for one another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.near_misses import delta_write, near_miss, outer, read, scan, zeros

# -- published neighbours -----------------------------------------------------------------------------------------


@near_miss("kda", "q k v g beta", scale=1.0, length=6)
def rwkv7_like(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """RWKV-7: the erased key is scaled per channel, the written one is not."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        rate = torch.sigmoid(g[:, t]) * beta[:, t].unsqueeze(-1)
        s = s * g[:, t].exp().unsqueeze(-1) - outer(rate * k[:, t], read(s, k[:, t])) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("simple_gla", "q k v g beta", expect="either", scale=1.0, length=6)
def mlstm_with_its_normaliser(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """xLSTM: the matrix memory over a normaliser bounded from below, which may be divided by after the loop."""
    n = k.new_zeros(k.shape[0], k.shape[2], k.shape[3])
    s, outs = zeros(k, v), []
    for t in range(q.shape[1]):
        f, i = g[:, t].exp().unsqueeze(-1), beta[:, t].unsqueeze(-1)
        s = f.unsqueeze(-1) * s + outer(i * k[:, t], v[:, t])
        n = f * n + i * k[:, t]
        outs.append(read(s, q[:, t]) / (n * q[:, t]).sum(-1, keepdim=True).abs().clamp(min=1.0))
    return torch.stack(outs, 1)


@near_miss("gla", "q k v g", expect="either", scale=1.0, length=6)
def gated_slots(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated slot attention: a softmax between two gated passes, each of which is GLA."""
    write = 1 - g.exp()

    def first(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-2) + outer(k[:, t], write[:, t])
        return s, read(s, q[:, t])

    def second(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1) + outer(write[:, t], v[:, t])
        return s, read(s, slots[:, t])

    slots = scan(zeros(k, k), q.shape[1], first).softmax(-1)
    return scan(zeros(k, v), q.shape[1], second)


@near_miss("gla", "q k v alpha", expect="either", scale=1.0, length=6)
def hgrn2_ties_the_key_to_the_gate(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """HGRN2: GLA with 1 - alpha for a key."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        f = alpha[:, t]
        s = f.unsqueeze(-1) * s + outer(1 - f, v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v beta", expect="either", scale=1.0, length=6)
def longhorn(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Longhorn: GLA with the gate 1 - beta k^2."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        b = beta[:, t].unsqueeze(-1)
        s = (1 - b * k[:, t].square()).unsqueeze(-1) * s + outer(b * k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gated_delta_rule", "q k v g beta", scale=1.0, length=6)
def comba_like(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Comba: the old value is read before the decay and with a strength of its own."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        error = v[:, t] - 0.5 * read(s, k[:, t])
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], beta[:, t].unsqueeze(-1) * error)
        return s, read(s, q[:, t] - 0.1 * k[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0, length=6)
def delta_with_weight_decay_on_error(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A regression step with an l2 penalty on what the key does not span."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        b = beta[:, t][..., None, None]
        s = s + b * (outer(k[:, t], v[:, t] - read(s, k[:, t])) - 0.1 * s * (1 - k[:, t].square()).unsqueeze(-1))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0, length=8)
def ttt_in_mini_batches(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """TTT-Linear: every error of a mini-batch is taken against the state at its beginning."""
    q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
    s = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    outs = []
    for q_c, k_c, v_c, b_c in zip(*(x.split(4, 2) for x in (q, k, v, beta)), strict=True):
        error = b_c.unsqueeze(-1) * (v_c - k_c @ s)
        outs.append(q_c @ s + (q_c @ k_c.mT).tril() @ error)
        s = s + k_c.mT @ error
    return torch.cat(outs, 2).transpose(1, 2)


@near_miss("delta_rule", "q k v beta", scale=1.0, length=6)
def strength_per_value_channel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    strength = beta.unsqueeze(-1) * torch.sigmoid(v)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s + outer(k[:, t], strength[:, t] * (v[:, t] - read(s, k[:, t])))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, length=6, tags=frozenset({"square"}))
def decay_along_the_values(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-2) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


# -- gates, strengths and norms that only look like the op's ------------------------------------------------------


@near_miss("gla", "q k v gate_logit", expect="either", scale=1.0, activation="logsigmoid", length=6)
def softplus_of_another_slope(q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor) -> Tensor:
    g = -F.softplus(-gate_logit, beta=2.0)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v gate_logit", expect="either", scale=1.0, activation="logsigmoid", length=6)
def softplus_with_an_early_threshold(q: Tensor, k: Tensor, v: Tensor, gate_logit: Tensor) -> Tensor:
    g = -F.softplus(-gate_logit, threshold=1.0)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta_logit", expect="either", scale=1.0, length=6)
def sigmoid_that_misses_one(q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor) -> Tensor:
    beta = 1 / (1.01 + torch.exp(-beta_logit))

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta_logit", expect="either", scale=1.0, length=6)
def hard_sigmoid(q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor) -> Tensor:
    beta = F.hardsigmoid(beta_logit)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", expect="either", scale=1.0, strongest_gate=-9.0, length=6)
def gate_bounded_upstream(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    bounded = g.clamp(min=-5.0)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * bounded[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


def delta_of(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", expect="either", scale=1.0, l2norm_eps=1e-2, length=6)
def norms_with_two_epsilons(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-1)
    return delta_of(q, k, v, beta)


@near_miss("delta_rule", "q k v beta", expect="either", scale=1.0, l2norm_eps=1e-6, length=6)
def norm_over_the_heads(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q, k = (x * torch.rsqrt(x.square().sum(2, keepdim=True) + 1e-6) for x in (q, k))
    return delta_of(q, k, v, beta)


@near_miss("delta_rule", "q k v beta", expect="either", scale=1.0, l2norm_eps=1e-6, length=6)
def norm_of_queries_alone(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return delta_of(q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6), 0.5 * k, v, beta)


@near_miss("delta_rule", "q k v beta", expect="either", scale=1.0, groups=2, length=6)
def heads_repeated_in_the_other_order(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """``repeat`` where the op means ``repeat_interleave``."""
    return delta_of(q.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), v, beta)


@near_miss("delta_rule", "q k v beta", expect="either", scale=1.0, length=6)
def keys_of_the_neighbouring_head(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return delta_of(q, k[:, :, torch.tensor([1, 2, 0])], v, beta)


@near_miss("gla", "q k v alpha", expect="either", scale=1.0, length=6)
def interpolation_the_other_way(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = torch.lerp(s, outer(k[:, t], v[:, t]), alpha[:, t].unsqueeze(-1))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v", expect="either", scale=1.0, length=6)
def mean_over_the_past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Divided by the position, as a running mean is."""
    count = torch.arange(1, q.shape[1] + 1, dtype=q.dtype)[:, None, None]
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
    return (q.unsqueeze(-1) * states).sum(-2) / count


# -- masks, windows and sums that are off -------------------------------------------------------------------------


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=6)
def both_directions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v)


@near_miss("linear_attention", "q k v", expect="either", scale=1.0, layout="bhtd", length=6)
def looks_ahead_of_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).triu(1) @ v


@near_miss("retention", "q k v gamma", scale=1.0, layout="bhtd", length=6)
def decay_both_ways(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    n = torch.arange(q.shape[2], dtype=q.dtype)
    return (q @ k.mT * gamma[:, None, None] ** (n[:, None] - n).abs()) @ v


@near_miss("gla", "q k v alpha", scale=1.0, layout="bhtd", strongest_gate=-0.5, length=6)
def product_along_the_channels(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    decay = alpha.cumprod(-1)
    return ((q * decay) @ (k / decay).mT).tril() @ v


@near_miss("gla", "q k v g", scale=1.0, layout="bhtd", length=8)
def decay_to_the_end_counts_the_key(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """A flipped cumulative sum that takes in the key's own gate."""
    s, outs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for q_c, k_c, v_c, g_c in zip(*(x.split(4, dim=2) for x in (q, k, v, g)), strict=True):
        begin, end = g_c.cumsum(2), g_c.flip(2).cumsum(2).flip(2)
        inside = ((q_c * begin.exp()) @ (k_c * (-begin).exp()).mT).tril() @ v_c
        outs.append(inside + (q_c * begin.exp()) @ s)
        s = s * begin[:, :, -1].exp().unsqueeze(-1) + (k_c * end.exp()).mT @ v_c
    return torch.cat(outs, 2)


@near_miss("linear_attention", "q k v", scale=1.0, layout="bhtd", length=8)
def overlapping_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q_w, k_w, v_w = (x.unfold(2, 4, 2).transpose(-1, -2) for x in (F.pad(x, (0, 0, 2, 0)) for x in (q, k, v)))
    return ((q_w @ k_w.mT).tril() @ v_w)[..., 2:, :].flatten(2, 3)


@near_miss("linear_attention", "q k v", scale=1.0, length=6)
def outputs_in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, out = zeros(k, v), torch.empty_like(v)
    for t in range(q.shape[1]):
        s = s + outer(k[:, t], v[:, t])
        out.index_copy_(1, torch.tensor([t ^ 1 if t < 8 else t]), read(s, q[:, t]).unsqueeze(1))
    return out


@near_miss("delta_rule", "q k v beta", scale=1.0, layout="bhtd", length=6)
def full_system_solved(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A general solver on a matrix that is not triangular: tokens see later ones."""
    b = beta.unsqueeze(-1)
    system = torch.eye(k.shape[2], dtype=k.dtype) + 0.1 * b * k @ k.mT
    return torch.tril(q @ k.mT) @ torch.linalg.solve(system, b * v)


# -- axes taken for one another: the recurrence along another axis ------------------------------------------------


@near_miss("linear_attention", "q k v", expect="either", scale=1.0, length=3)
def recurrence_over_the_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many heads as tokens, and the loop runs over the heads."""
    s, outs = k.new_zeros(k.shape[0], k.shape[1], k.shape[3], v.shape[3]), []
    for h in range(q.shape[2]):
        s = s + outer(k[:, :, h], v[:, :, h])
        outs.append(torch.einsum("btkv,btk->btv", s, q[:, :, h]))
    return torch.stack(outs, 2)


@near_miss("linear_attention", "q k v", expect="either", scale=1.0, length=2)
def recurrence_over_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, outs = k.new_zeros(k.shape[1], k.shape[2], k.shape[3], v.shape[3]), []
    for b in range(q.shape[0]):
        s = s + outer(k[b], v[b])
        outs.append(torch.einsum("thkv,thk->thv", s, q[b]))
    return torch.stack(outs)


@near_miss("simple_gla", "q k v g", expect="either", scale=1.0, length=3)
def gates_with_tokens_and_heads_swapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, :, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)
