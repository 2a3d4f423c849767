"""Almost the pattern, and not it: token loops. A backend may decline or rewrite correctly, never change a result.

``expect="decline"``: no part of this is a sequence of the family, so no sequence match may be reported.
``expect="either"``: some correct rewrite exists (a piece, or the whole with something left outside).
``differs`` says whether the output differs from the token recurrence on the same inputs, chosen so that taking it for
the pattern shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spellings.registry import Spelling

Edit = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NearMiss:
    name: str
    fn: Callable[..., Any]
    likeness: Spelling  # the pattern it could be taken for: draws the inputs and gives the tempting answer
    expect: str = "decline"
    differs: bool = True
    edits: dict[str, Edit] = field(default_factory=dict)  # inputs that reach the difference
    gradients: bool = False  # the difference shows in the backward only

    def make_inputs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        likeness = self.likeness
        k_dim, v_dim = (8, 8) if "square" in likeness.tags else (8, 12)
        drawn = likeness.make_inputs(K=k_dim, V=v_dim, dtype=dtype, seed=seed)
        pairs = zip(likeness.takes, drawn, strict=True)
        return tuple(self.edits[name](x) if name in self.edits else x for name, x in pairs)

    def tempting(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """What the pattern it resembles would return."""
        return self.likeness.expected(inputs)[0]


REGISTRY: dict[str, NearMiss] = {}


def near_miss(
    pattern: str,
    takes: str,
    *,
    expect: str = "decline",
    differs: bool = True,
    edits: dict[str, Edit] | None = None,
    gradients: bool = False,
    length: int = 9,
    **traits: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        likeness = Spelling(fn.__name__, fn, pattern, tuple(takes.split()), lengths=(length,), **traits)
        if fn.__name__ in REGISTRY:
            raise ValueError(f"two near misses are called {fn.__name__}")
        REGISTRY[fn.__name__] = NearMiss(fn.__name__, fn, likeness, expect, differs, edits or {}, gradients)
        return fn

    return wrap


Token = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def scan(start: Tensor, length: int, token: Token) -> Tensor:
    """The loop all of these share; ``token`` returns the new state and the token's output."""
    state, outs = start, []
    for t in range(length):
        state, out = token(state, t)
        outs.append(out)
    return torch.stack(outs, dim=1)


def first_gate(g: Tensor, value: float) -> Tensor:
    """The first token's log gate set to one value."""
    return torch.cat([torch.full_like(g[:, :1], value), g[:, 1:]], dim=1)


def zeros(k: Tensor, v: Tensor) -> Tensor:
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def read(s: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", s, x)


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def delta_write(s: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return s + outer(k, beta.unsqueeze(-1) * (v - read(s, k)))


KDA = "q k v g beta"


@near_miss("kda", KDA, scale=1.0)
def decay_after_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t]) * g[:, t].exp().unsqueeze(-1)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either")
def output_before_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1)
        out = read(s, q[:, t])
        return delta_write(s, k[:, t], v[:, t], beta[:, t]), out

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, expect="either")
def output_before_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        out = read(s, q[:, t])
        return s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t]), out

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0)
def old_value_read_before_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        write = beta[:, t].unsqueeze(-1) * (v[:, t] - read(s, k[:, t]))
        s = s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], write)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either")
def one_odd_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1)
        s = delta_write(s, k[:, t], v[:, t], beta[:, t] if t != 5 else beta[:, t] * 2)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0)
def tanh_on_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = torch.tanh(s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t]))
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0)
def state_clipped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s * g[:, t].exp().unsqueeze(-1), k[:, t], v[:, t], beta[:, t]).clamp(-0.5, 0.5)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("gla", "q k v g", scale=1.0, edits={"v": lambda v: v * 1e5})
def state_threshold_at_1e4(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Random probes of unit scale never reach the branch."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].exp().unsqueeze(-1) + outer(k[:, t], v[:, t])
        s = torch.where(s.abs() > 1e4, 1e4 * s.sign(), s)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss(
    "kda",
    KDA + " state",
    scale=1.0,
    expect="either",
    edits={"g": lambda g: first_gate(g, -40.0), "state": lambda s: s * 1e14},
)
def clamp_gate_inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = s * g[:, t].clamp(min=-30).exp().unsqueeze(-1)
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(state, q.shape[1], token)


@near_miss(
    "gla",
    "q k v g state",
    scale=1.0,
    expect="either",
    edits={"g": lambda g: first_gate(g, -16.0), "state": lambda s: s * 1e8},
)
def small_gate_is_zero(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        kept = torch.where(g[:, t] < -15, 0.0, g[:, t].exp()).unsqueeze(-1)
        s = s * kept + outer(k[:, t], v[:, t])
        return s, read(s, q[:, t])

    return scan(state, q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0, edits={"k": lambda k: k * 3}, expect="either")
def normalised_error(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """NLMS: the write divided by |k|^2 + eps."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        norm = (k[:, t] * k[:, t]).sum(-1) + 1e-6
        s = delta_write(s, k[:, t], v[:, t], beta[:, t] / norm)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", "q k v g beta state", scale=1.0, expect="either", differs=False)
def intermediate_state_escapes(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    outs, escaped = [], state
    for t in range(q.shape[1]):
        state = delta_write(state * g[:, t].exp().unsqueeze(-1), k[:, t], v[:, t], beta[:, t])
        if t == 3:
            escaped = state
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, dim=1), state, escaped


@near_miss("gla", "q k v g", scale=1.0, expect="either", differs=False)
def view_of_state_mutated_later(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is a view of a state that later tokens overwrite: it must show the last token."""
    s, outs, view = zeros(k, v), [], None
    for t in range(q.shape[1]):
        s.mul_(g[:, t].exp().unsqueeze(-1)).add_(outer(k[:, t], v[:, t]))
        if t == 2:
            view = s[..., 0]
        outs.append(read(s, q[:, t]))
    assert view is not None
    return torch.stack(outs, dim=1), view


@near_miss("gla", "q k v g state", scale=1.0, expect="either", differs=False)
def caller_state_overwritten(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """Every token writes the caller's tensor: the change must be visible after the call."""
    outs = []
    for t in range(q.shape[1]):
        state.mul_(g[:, t].exp().unsqueeze(-1))
        state.add_(outer(k[:, t], v[:, t]))
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, dim=1)


@near_miss("delta_rule", "q k v beta", scale=1.0, expect="either", differs=False)
def values_overwritten(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The caller's values become the deltas."""
    s, outs = zeros(k, v), []
    for t in range(q.shape[1]):
        v[:, t] -= read(s, k[:, t])
        s = s + outer(k[:, t], v[:, t] * beta[:, t].unsqueeze(-1))
        outs.append(read(s, q[:, t]))
    return torch.stack(outs, dim=1)


@near_miss("delta_rule", "q k v beta", scale=1.0, l2norm_eps=1e-6, expect="either", edits={"k": lambda k: k * 1e-3})
def functional_normalize(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """F.normalize divides by max(norm, eps): not x * rsqrt(sum + eps)."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta beta_logit", scale=1.0)
def erase_and_write_strengths(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, beta_logit: Tensor) -> Tensor:
    """Two betas: one for what is erased, one for what is written."""

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        erase = beta[:, t].unsqueeze(-1) * read(s, k[:, t])
        s = s + outer(k[:, t], beta_logit[:, t].sigmoid().unsqueeze(-1) * v[:, t] - erase)
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("delta_rule", "q k v beta", scale=1.0)
def erase_by_another_key(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A generalised (diagonal plus low rank) delta rule: reads with k, erases along the token before's key."""
    other = torch.roll(k, 1, dims=1)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        b = beta[:, t].unsqueeze(-1)
        s = s - outer(other[:, t], b * read(s, k[:, t])) + outer(k[:, t], b * v[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0)
def heads_mixed_every_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    mix = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.1, 0.0, 0.9]], dtype=q.dtype)

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = torch.einsum("ij,bjkv->bikv", mix, s) * g[:, t].exp().unsqueeze(-1)
        s = delta_write(s, k[:, t], v[:, t], beta[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)


@near_miss("kda", KDA, scale=1.0, expect="either")
def one_head_is_special(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    strength = beta.clone()
    strength[:, :, 1] *= 0.5

    def token(s: Tensor, t: int) -> tuple[Tensor, Tensor]:
        s = delta_write(s * g[:, t].exp().unsqueeze(-1), k[:, t], v[:, t], strength[:, t])
        return s, read(s, q[:, t])

    return scan(zeros(k, v), q.shape[1], token)
