"""A state that every token rounds is another function, be the given state or gates kept in the narrow dtype or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kdacompile

HALF = torch.bfloat16


def operands() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 4) for _ in range(3))
    return q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(2, 9, 3), torch.randn(2, 3, 4, 4)


def at_the_start(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state.to(HALF).to(q.dtype)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * v[:, t])[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1), state


def read_early(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state.to(HALF).to(q.dtype)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        told = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - told))[:, :, None]
    return torch.stack(rows, 1), state


def narrow_gates(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    gates = beta.to(HALF)
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * (gates[:, t, :, None].float() * v[:, t])[:, :, None]
        state = state.to(HALF).to(q.dtype)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1), state


def once(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A cache in the narrow dtype: it is read once, and what goes back is rounded behind the last token."""
    rows: list[Tensor] = []
    state = state.to(HALF).to(q.dtype)
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * v[:, t])[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1), state


@pytest.mark.parametrize("fn", [at_the_start, read_early, narrow_gates])
def test_rounding_between_tokens_is_part_of_the_function(fn: object) -> None:
    report = kdacompile.explain(fn)(*operands())  # type: ignore[arg-type]
    assert not report.matches
    assert "rounding" in {rejection.code for rejection in report.rejections}
    for x, y in zip(report.result, fn(*operands()), strict=True):  # type: ignore[operator]
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def test_a_state_that_was_rounded_before_is_an_operand() -> None:
    report = kdacompile.explain(once)(*operands())
    assert [match.pattern for match in report.matches] == ["linear_attention"], report.rejections
    for x, y in zip(report.result, once(*operands()), strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
