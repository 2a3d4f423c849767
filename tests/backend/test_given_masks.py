"""Scores masked with an argument: what it hides shows only at run time, and the report says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kdacompile
from tests.compare import relative_error


def masked_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * mask) @ v


def masked_by_selection(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, q @ k.mT, 0.0) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask[None], 0.0) @ v


def weights_of_a_masked_product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT * mask
    return scores / scores.sum(-1, keepdim=True) @ v


def decays_given(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * (0.9 * mask)) @ v


GIVEN = [masked_product, masked_by_selection, filled, weights_of_a_masked_product, decays_given]


def explained(fn: Callable[..., Tensor], *inputs: Tensor) -> kdacompile.Report:
    torch._dynamo.reset()
    return kdacompile.explain(fn)(*inputs)


def heads_first(tokens: int = 9) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.rand(2, 3, tokens, size) for size in (8, 8, 12))
    return q, k, v, torch.ones(tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.parametrize("fn", GIVEN, ids=lambda fn: fn.__name__)
def test_a_mask_that_is_an_argument_is_said(fn: Callable[..., Tensor]) -> None:
    """2Mamba2Furious tests its kernels against such functions: nothing was said of them, or that they differ."""
    inputs = heads_first()
    report = explained(fn, *inputs)
    assert [rejection.code for rejection in report.rejections] == ["mask"], report
    assert "masked with an argument [9, 9]" in report.rejections[0].reason
    assert relative_error(report.result, fn(*inputs)) < 1e-6


@pytest.mark.parametrize("fn", GIVEN[:3], ids=lambda fn: fn.__name__)
def test_a_mask_that_is_made_or_kept_is_none(fn: Callable[..., Tensor]) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(9, 9, dtype=torch.bool).tril())

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fn(q, k, v, self.mask)

    def made(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fn(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril())

    for model in (Layer(), made):
        report = explained(model, *heads_first()[:3])
        assert [match.pattern for match in report.matches] == ["linear_attention"], report


def test_decays_and_padding_are_no_masks_that_are_given() -> None:
    """A square of decays, whatever is wrong with it, is computed; and padding is spread from a row."""

    def decays(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        g = q[..., 0].cumsum(-1)
        return (q @ k.mT * (g[..., None] - g[..., None, :]).tril() ** 2) @ v

    def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        seen = mask[-1].expand(9, 9) & torch.ones(9, 9, dtype=torch.bool).tril()
        return (q @ k.mT).masked_fill(~seen, 0.0) @ v

    for fn in (decays, padded):
        assert all(rejection.code != "mask" for rejection in explained(fn, *heads_first()).rejections)
