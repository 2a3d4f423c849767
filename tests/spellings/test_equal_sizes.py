"""Tensors of one shape: K equal to V, a batch of one, one head. Sizes then say little about who is who."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from kdacompile.patterns.recurrence import bindings, first_tokens

SIZES = [(1, 20, 2, 16), (1, 20, 1, 4), (3, 20, 1, 4), (1, 6, 2, 4), (1, 16, 16, 16), (2, 20, 2, 8)]


def gla(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The gate is a factor per channel; ``sum`` in place of a product with q."""
    state, out = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), list[Tensor]()
    for t in range(q.shape[1]):
        state = state * alpha[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1)


def linear(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    return torch.einsum("bhts,bshv->bthv", scores, v)


def delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    state, out = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), list[Tensor]()
    for t in range(q.shape[1]):
        state = state * alpha[:, t, :, None, None]
        new = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1)


PROGRAMS = {"gla": gla, "linear_attention": linear, "gated_delta_rule": delta}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pattern", PROGRAMS)
def test_roles_are_found_where_all_shapes_are_equal(pattern: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sizes) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    alpha = torch.rand(sizes if pattern == "gla" else sizes[:3])
    args = q, k, v, alpha, torch.rand(sizes[:3])
    fn = PROGRAMS[pattern]
    report = kdacompile.explain(fn)(*args)
    assert [match.pattern for match in report.matches] == [pattern], report.rejections
    torch.testing.assert_close(report.result, fn(*args), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pattern", PROGRAMS)
def test_wrong_readings_are_refuted_on_a_corner(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a model's widths a wrong reading has states of gigabytes: all columns are run for the right one alone."""
    whole: list[tuple[int, ...]] = []
    definition = first_tokens.token_recurrence

    def counted(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **options: object) -> tuple[Tensor, Tensor]:
        if v.shape[3] > 4:
            whole.append(tuple(v.shape))
        return definition(q, k, v, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(first_tokens, "token_recurrence", counted)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, 8, 8) for _ in range(3))
    alpha = torch.rand(q.shape if pattern == "gla" else q.shape[:3])
    report = kdacompile.explain(PROGRAMS[pattern], options={"kda.lift": False})(q, k, v, alpha, torch.rand(2, 12, 8))
    assert [match.pattern for match in report.matches] == [pattern], report.rejections
    assert whole.count(tuple(v.shape)) == 1 and len(set(whole)) == len(whole), whole  # once at every size


def squared_weights(x: Tensor, c: Tensor, k_rope: Tensor, w: Tensor) -> Tensor:
    """No attention, since its weights are squared: what it is made of could be much, as far as sizes tell."""
    q = torch.cat(x.view(4, 4, 4, 8).split([4, 4], -1), -1).transpose(1, 2)
    k_nope, v = (c @ w.mT).view(4, 8, 4, 8).split([4, 4], -1)
    k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, 4, -1)], -1)
    scores = q @ k.transpose(1, 2).mT
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    return ((weights**2) @ v.transpose(1, 2)).transpose(1, 2)


def test_ways_that_lead_nowhere_are_gone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    leads_on = bindings.Bindings._leads_on  # pyright: ignore[reportPrivateUsage]
    onward = bindings.Bindings._onward  # pyright: ignore[reportPrivateUsage]
    looking = False

    def asked(self: bindings.Bindings) -> bool:
        nonlocal looking
        steps.append(0)
        looking = True
        found = any(leads_on(self, partial, cost) for cost, partial in self.readings)
        looking = False
        return found

    def counted(*args: Any) -> Any:
        steps[-1] += looking
        return onward(*args)

    monkeypatch.setattr(bindings.Bindings, "__bool__", asked)
    monkeypatch.setattr(bindings.Bindings, "_onward", counted)
    torch.manual_seed(0)
    args = torch.randn(4, 4, 32), torch.randn(4, 8, 4), torch.randn(4, 8, 4), torch.randn(32, 4)
    report = kdacompile.explain(squared_weights)(*args)
    assert not report.matches
    assert 0 < max(steps) < 200, steps  # 65,000 where each way is gone
