"""Activations written inside the loop: every token's, or every chunk's, is taken out in front of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from tests.compare import copies, worst_error

BATCH, LENGTH, HEADS, SIZE, VALUES = 2, 4, 3, 6, 5


def tokens(count: int, *rest: int) -> list[Tensor]:
    return [torch.randn(BATCH, LENGTH, HEADS, *rest) for _ in range(count)]


def read(state: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", state, key)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        key = F.normalize(k[:, t], dim=-1)
        s = s * torch.exp(-F.softplus(gate[:, t]))[..., None, None]
        fresh = torch.sigmoid(logit[:, t])[..., None] * (v[:, t] - read(s, key))
        s = s + torch.einsum("bhk,bhv->bhkv", key, fresh)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def gated_in_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v, gate = (x.transpose(1, 2) for x in (q, k, v, gate))
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for i in range(0, q.shape[2], 2):
        total = (F.logsigmoid(gate[:, :, i : i + 2]) / 16).cumsum(-1)[..., None]
        left, right = q[:, :, i : i + 2] * total.exp(), k[:, :, i : i + 2] * (-total).exp()
        rows.append(left @ s + (left @ right.mT).tril() @ v[:, :, i : i + 2])
        s = total[:, :, -1:].exp() * (s + right.mT @ v[:, :, i : i + 2])
    return torch.cat(rows, dim=2)


def overwritten_between(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The logits of later tokens change while the loop runs: taken out, they would be the old ones."""
    logit = logit.clone()
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], torch.sigmoid(logit[:, t])[..., None] * v[:, t])
        logit.add_(1.0)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def another_at_one_token(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        beta = torch.sigmoid(logit[:, t]) if t != 2 else torch.tanh(logit[:, t])
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[..., None] * (v[:, t] - read(s, k[:, t])))
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def explained(fn: Callable[..., Any], grad: bool = False) -> tuple[Any, Any, kdacompile.Report]:
    """(results and gradients of the backend, those of eager, the report)."""
    torch.manual_seed(0)
    inputs = [*tokens(2, SIZE), *tokens(1, VALUES), *tokens(2)]
    own, theirs = (copies(x.requires_grad_(grad) for x in inputs) for _ in range(2))
    torch._dynamo.reset()
    report = kdacompile.explain(fn, options={"kda.lift": False})(*own)
    ours, expected = report.result, fn(*theirs)
    if not grad:
        return ours, expected, report
    weight = torch.randn(ours.shape)
    left, right = (
        torch.autograd.grad((x * weight).sum(), given, allow_unused=True, materialize_grads=True)
        for x, given in ((ours, own), (expected, theirs))
    )
    return (ours, left), (expected, right), report


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("fn", "pattern"), [(gated_delta, "gated_delta_rule"), (gated_in_chunks, "simple_gla")])
def test_activations_in_the_loop(fn: Callable[..., Any], pattern: str, grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == [pattern], str(report)


@pytest.mark.parametrize("fn", [overwritten_between, another_at_one_token])
def test_what_differs_between_tokens_stays(fn: Callable[..., Any]) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) <= 1e-5
    assert report.matches or report.rejections


def test_without_a_new_match_the_graph_is_as_captured() -> None:
    """A saturated state is no recurrence: what was taken out is put back, call by call."""

    def saturated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
        s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
        rows: list[Tensor] = []
        for t in range(q.shape[1]):
            s = torch.tanh(s + torch.einsum("bhk,bhv->bhkv", k[:, t], logit[:, t].sigmoid()[..., None] * v[:, t]))
            rows.append(read(s, q[:, t]))
        return torch.stack(rows, dim=1)

    ours, expected, report = explained(saturated)
    assert torch.equal(ours, expected)
    assert not report.matches
    assert report.rejections
