"""Functions that looking at them once failed on: sizes that coincide, and results that only some lengths have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from tests.backend.layers import delta_arguments, gated_delta_loop


def heads_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Linear attention with a gate per token over [B, H, T, D]."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outs: list[Tensor] = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None] + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 2)


def keeps_a_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, and its state after the 21st token if there is one."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    keep: Tensor | None = None
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = (state * k[:, t].unsqueeze(-1)).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * ((v[:, t] - old) * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        if t == 20:
            keep = state
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1), keep


def keeps_a_token(*args: Tensor) -> tuple[Tensor, Tensor]:
    out, _ = keeps_a_state(*args)
    return out, out[:, 20]


def explained(fn: Any, *args: Tensor) -> None:
    """The function, called by another, as by itself."""
    torch._dynamo.reset()
    with torch.no_grad():
        report = explain(lambda *tensors: fn(*tensors), options={"kda.strict": True})(*args)
        torch.testing.assert_close(report.result, fn(*args), rtol=1e-4, atol=1e-5)


def test_as_many_requests_as_heads() -> None:
    q, k, v = (torch.randn(4, 4, 32, 8) for _ in range(3))
    explained(heads_first, q, k, v, -torch.rand(4, 4, 32))


def test_as_many_requests_as_tokens() -> None:
    explained(gated_delta_loop, *delta_arguments(batch=12, length=12))


@pytest.mark.parametrize("fn", [keeps_a_state, keeps_a_token])
def test_one_tokens_state_as_a_result(fn: Any) -> None:
    explained(fn, *delta_arguments(length=40))
