"""A function with the transformers signature that needs no transformers, for the benchmark's own tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kdacompile.patterns.recurrence.definition import token_recurrence


def naive_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    o, state = token_recurrence(q, k, v, g.exp(), beta, delta=True, scale=q.shape[-1] ** -0.5)
    return o.to(v), state.to(v)
