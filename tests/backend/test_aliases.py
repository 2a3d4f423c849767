"""Inputs that share memory: what is written through one is read through the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from kdacompile.graph.build import overlap
from tests.compare import worst_error

B, H, K, V = 2, 3, 8, 12


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beside: Tensor) -> Tensor:
    """One token of simple GLA on a state that is kept in place, and a look at another input."""
    state.mul_(alpha[..., None, None])
    state.add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return torch.einsum("bhkv,bhk->bhv", state, q) + beside.sum()


def arguments(big: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v, alpha = (torch.rand(B, H, *n, generator=generator) for n in ((K,), (K,), (V,), ()))
    return {"state": big[:, :, :K], "q": q, "k": k, "v": v, "alpha": alpha, "beside": torch.ones(2)}


ALIASES: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "v is a row of the state": lambda big: {"v": big[:, :, 1]},
    "q is a column of the state": lambda big: {"q": big[:, :, :K, 2]},
    "another view is read": lambda big: {"beside": big[:, :, 2:]},
    "the same view twice": lambda big: {"beside": big[:, :, :K]},
}


def both(change: Callable[[Tensor], dict[str, Tensor]]) -> tuple[Any, Any, Any]:
    """(result, buffer) of the backend, those of eager, the report."""
    big = torch.randn(B, H, K + 4, V, generator=torch.Generator().manual_seed(0))
    ours, theirs = big.clone(), big.clone()
    expected = step(**{**arguments(theirs), **change(theirs)})
    torch._dynamo.reset()
    report = kdacompile.explain(step)(**{**arguments(ours), **change(ours)})
    return (report.result, ours), (expected, theirs), report


@pytest.mark.parametrize("name", ALIASES)
def test_a_write_is_seen_through_the_other_input(name: str) -> None:
    ours, theirs, report = both(ALIASES[name])
    assert worst_error(ours, theirs) <= 1e-6
    assert not report.matches
    assert any(rejection.code == "alias" for rejection in report.rejections), str(report)


def test_parts_of_one_buffer_that_do_not_overlap_are_rewritten() -> None:
    ours, theirs, report = both(lambda big: {"v": big[:, :, K]})
    assert worst_error(ours, theirs) <= 1e-6
    assert [match.pattern for match in report.matches] == ["simple_gla"], str(report)


def test_overlap_is_told_by_elements() -> None:
    x = torch.zeros(4, 6, 5)
    assert overlap(x[:, :3], x[:, 2:])
    assert not overlap(x[:, :3], x[:, 3:])
    assert not overlap(x[:, 0], x[:, 5])
    assert not overlap(x[..., 0::2], x[..., 1::2])
    assert overlap(x[..., 0::2], x[..., ::4])
    assert not overlap(x[:2], x[2:])
    assert overlap(x[1:3], x.transpose(0, 2))
    assert not overlap(x[:0], x)
    stacked = torch.empty(8, 40, 32, 128, 128, device="meta")  # too large to be looked at one by one
    assert not overlap(stacked[:, 3], stacked[:, 4])
    assert overlap(stacked[:, 3:5], stacked[:, 4])
