"""More near misses in token loops: shifted inputs, rounding, extra terms, and cousins from other families."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.near_misses import KDA, delta_write, near_miss, outer, read, scan, zeros


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def rwkv_bonus(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    bonus = torch.linspace(0.2, 1.4, q.shape[-1], dtype=q.dtype)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        kv = outer(k[:, t], v[:, t])
        out = read(s + bonus.unsqueeze(-1) * kv, q[:, t])
        return s * g[:, t].exp().unsqueeze(-1) + kv, out

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def integer_gate(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    decay = g.int().to(g.dtype).exp()

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * decay[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gated_delta_rule", KDA, scale=1.0, expect="either")
def rounded_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s * g[:, t].exp()[..., None, None], k[:, t], v[:, t], beta[:, t].round())
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either")
def query_of_previous_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s * g[:, t].exp().unsqueeze(-1), k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, max(t - 1, 0)])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def gate_of_next_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    last = q.shape[1] - 1

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, min(t + 1, last)].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v", scale=1.0, expect="either")
def backwards_in_time(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        t = q.shape[1] - 1 - t
        s = s + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token).flip(1)


@near_miss("linear_attention", "q k v", scale=1.0, tags=frozenset({"square"}))
def state_transposed_every_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s.transpose(-1, -2) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0)
def state_rounded_to_half(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = (s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])).half().to(q.dtype)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v", scale=1.0, expect="either")
def two_states_by_turns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    states = [zeros(k, v), zeros(k, v)]
    outs = []
    for t in range(q.shape[1]):
        states[t % 2] = states[t % 2] + outer(k[:, t], v[:, t])
        outs.append(read(states[t % 2], q[:, t]))
    return torch.stack(outs, dim=1)


@near_miss("linear_attention", "q k v", scale=1.0, expect="either")
def normaliser(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos' linear attention: elu + 1 features and a denominator."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    total = k.cumsum(dim=1)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t]) / ((q[:, t] * total[:, t]).sum(-1, keepdim=True) + 1e-6)

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v alpha", scale=1.0, expect="either", differs=False, edits={"alpha": lambda a: a * 1.5})
def factor_above_one(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * alpha[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def factor_below_zero(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """cos(g) as the decay: a factor with both signs, which no log gate can carry."""
    decay = torch.cos(g * 2)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * decay[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v alpha", scale=1.0, expect="either", differs=False, edits={"alpha": lambda a: a * (a > 0.5)})
def factor_exactly_zero(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Legal, and inf - inf in a log-space chunk form."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * alpha[:, t].unsqueeze(-1) + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0)
def momentum(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    velocity = zeros(k, v)
    s, outs = zeros(k, v), []
    for t in range(q.shape[1]):
        velocity = 0.9 * velocity + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read(s, k[:, t])))
        s = s + velocity
        outs.append(read(s, q[:, t]))
    return torch.stack(outs, dim=1)


@near_miss("delta_rule", "q k v beta", scale=1.0, expect="either")
def two_householder_steps(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """DeltaProduct: two writes a token, one read."""
    second = k.flip(-1)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        s = delta_write(s, second[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0)
def maximum_instead_of_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = torch.maximum(s * g[:, t].exp().unsqueeze(-1), outer(k[:, t], v[:, t]))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("simple_gla", "q k v g", scale=1.0, edits={"v": lambda v: v.masked_fill(v > 2.0, torch.inf)})
def nan_to_num_on_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp()[..., None, None] + outer(k[:, t], v[:, t])
        s = torch.nan_to_num(s, nan=0.0, posinf=3.0, neginf=-3.0)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v", scale=1.0, expect="either")
def outputs_accumulate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, total, outs = zeros(k, v), torch.zeros_like(v[:, 0]), []
    for t in range(q.shape[1]):
        s = s + outer(k[:, t], v[:, t])
        total = total + read(s, q[:, t])
        outs.append(total)
    return torch.stack(outs, dim=1)


@near_miss("linear_attention", "q k v", scale=1.0, expect="either")
def scale_of_position(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t]) / (t + 1)

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either", differs=False, gradients=True)
def state_detached_half_way(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The forward is the pattern; the gradient is not."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s.detach() if t == 4 else s
        s = delta_write(s * g[:, t].exp().unsqueeze(-1), k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either", differs=False, gradients=True)
def gate_detached(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """No gradient flows to the gate: an op that gives it one is wrong."""
    decay = g.detach().exp()

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s * decay[:, t].unsqueeze(-1), k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def dropout_on_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        kept = F.dropout(k[:, t], p=0.5, training=True)
        s = s * g[:, t].exp().unsqueeze(-1) + outer(kept, v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("linear_attention", "q k v", layout="bhtd", expect="decline")
def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@near_miss("simple_gla", "q k v g", scale=1.0, length=4, differs=False)
def one_head_of_a_loop_adds_little(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Heads one by one, and to the last one's state a number is added that no comparison of results shows."""
    heads = []
    for h in range(q.shape[2]):
        s, outs = k.new_zeros(k.shape[0], k.shape[3], v.shape[3]), []
        for t in range(q.shape[1]):
            s = s * g[:, t, h].exp()[:, None, None] + k[:, t, h][..., None] * v[:, t, h][:, None]
            s = s + 1e-9 if h == q.shape[2] - 1 else s
            outs.append((s * q[:, t, h][..., None]).sum(1))
        heads.append(torch.stack(outs, 1))
    return torch.stack(heads, 2)
