"""Gradients that are switched off in a part of a graph, autocast that is switched off where it is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from tests.compare import copies, worst_error

EAGER: dict[str, Any] = {"kda.inner": "eager"}
BATCH, HEADS, TOKENS, KEYS, VALUES = 2, 3, 6, 4, 5
Program = Callable[..., Any]


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, HEADS, TOKENS, size) for size in (KEYS, KEYS, VALUES)]


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A rule takes the sum of a row out of the scores, as one more column of the values."""
    scores = (q.exp() @ k.exp().mT).tril()
    return (scores / scores.sum(-1, keepdim=True)) @ v


def measured(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        size = v.square().mean()
    return normalised(q, k, v), size


def without_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models keep the angles of rotations in float32."""
    with torch.autocast("cpu", enabled=False):
        angles = torch.arange(TOKENS)[:, None].float() @ torch.ones(1, KEYS)
    return normalised(q * angles.cos(), k * angles.cos(), v)


def of_a_copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All of it without gradients, in the middle of what has them."""
    with torch.no_grad():
        first = normalised(q, k, v)
    return first * v + q.sum(-1, keepdim=True)


MATCHED: list[Program] = [measured, without_autocast]


@pytest.mark.parametrize("fn", MATCHED)
@pytest.mark.parametrize("grad", [False, True])
def test_rules_apply_around_the_part(fn: Program, grad: bool) -> None:
    report, own, theirs = explained(fn, grad)
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)
    same_gradients(report.result, own, fn(*theirs), theirs, grad)


def sums_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum of a row is a number to its gradients, and would be a column of a product that has them."""
    scores = (q.exp() @ k.exp().mT).tril()
    with torch.no_grad():
        total = scores.sum(-1, keepdim=True)
    return (scores / total) @ v


def one_token_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token's keys are made without gradients: those of all would be made in one call."""
    state, rows = torch.zeros(BATCH, HEADS, KEYS, VALUES), list[Tensor]()
    for t in range(TOKENS):
        with torch.set_grad_enabled(torch.is_grad_enabled() and t != 2):
            key = F.normalize(F.silu(k[:, :, t]), dim=-1)
        state = state + key[..., None] * v[:, :, t, None]
        rows.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(rows, 2)


def scores_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values have gradients, weights have none."""
    with torch.no_grad():
        scores = (q.exp() @ k.exp().mT).tril()
        scores = scores / scores.sum(-1, keepdim=True)
    return scores @ v


@pytest.mark.parametrize("fn", [of_a_copy, sums_alone, one_token_alone, scores_alone])
@pytest.mark.parametrize("grad", [False, True])
def test_gradients_where_the_mode_changes_within(fn: Program, grad: bool) -> None:
    report, own, theirs = explained(fn, grad)
    same_gradients(report.result, own, fn(*theirs), theirs, grad)


def test_autocast_that_is_switched_off_where_it_is_on() -> None:
    """There it does change what a product is rounded to."""
    given = inputs()
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have, want = kdacompile.explain(without_autocast, options=EAGER)(*given).result, without_autocast(*given)
    assert worst_error(have, want) < 2e-2
    assert have.dtype == want.dtype


def explained(fn: Program, grad: bool) -> tuple[Any, list[Tensor], Any]:
    own = [x.requires_grad_(grad) for x in inputs()]
    theirs = copies(own)
    torch._dynamo.reset()
    return kdacompile.explain(fn, options=EAGER)(*own), own, theirs


def same_gradients(have: Any, own: list[Tensor], want: Any, theirs: Any, grad: bool) -> None:
    assert worst_error(have, want) < 1e-5
    if not grad:
        return
    one, other = (y[0] if isinstance(y, tuple) else y for y in (have, want))
    cotangent = torch.randn_like(other)
    found, wanted = (
        torch.autograd.grad(y, x, cotangent, allow_unused=True, materialize_grads=True)
        for y, x in ((one, own), (other, theirs))
    )
    assert worst_error(found, wanted) < 1e-4
