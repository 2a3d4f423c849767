"""``tensor.item()`` in a captured graph (``capture_scalar_outputs``): a decay read as a number is one that is read as a
tensor, and what is computed from such numbers otherwise stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from kdacompile import collecting, explain
from tests.compare import relative_error


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def distance(tokens: int) -> Tensor:
    return torch.arange(tokens)[:, None] - torch.arange(tokens)


def stacked(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """A mask for each slope: lightning attention."""
    masks = [torch.exp(-slope.item() * distance(q.shape[2])) for slope in slopes]
    return (q @ k.mT * torch.stack(masks).tril()) @ v


def filled(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Its rows are filled one by one."""

    def mask(slope: float) -> Tensor:
        rows = torch.full((q.shape[2], q.shape[2]), float("-inf"))
        for i in range(q.shape[2]):
            rows[i, : i + 1] = -torch.flip(slope * torch.arange(i + 1), [0])
        return rows.exp()

    return (q @ k.mT * torch.stack([mask(slope.item()) for slope in slopes])) @ v


def per_head(q: Tensor, k: Tensor, v: Tensor, gammas: Tensor) -> Tensor:
    """A power of the number, one head after the other."""
    heads = range(q.shape[1])
    masks = [(gammas[i].item() ** distance(q.shape[2])).tril() for i in heads]
    return torch.stack([(q[:, i] @ k[:, i].mT * masks[i]) @ v[:, i] for i in heads], 1)


_POWERS = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="torch 2.11 breaks the graph at a power of such a number"
)

Given = tuple[Tensor, Tensor, Tensor]


def inputs() -> tuple[Given, Tensor]:
    """q, k and v, and a slope for each head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, size, generator=generator) for size in (8, 8, 5))
    return (q, k, v), torch.tensor([0.5, 0.25, 0.125])


@pytest.mark.parametrize("fn", [stacked, filled, pytest.param(per_head, marks=_POWERS)])
def test_a_slope_read_as_a_number_is_a_decay(fn: Callable[..., Tensor]) -> None:
    tensors, slopes = inputs()
    report = explain(fn)(*tensors, slopes)
    assert [match.pattern for match in report.matches] == ["retention"], str(report)
    assert relative_error(report.result, fn(*tensors, slopes)) < 1e-6


def test_the_number_is_read_at_every_call() -> None:
    tensors, slopes = inputs()
    with torch.no_grad():
        compiled = torch.compile(stacked, backend="kda", options={"kda.inner": "eager"})
        for factor in (1.0, 3.0):
            assert relative_error(compiled(*tensors, slopes * factor), stacked(*tensors, slopes * factor)) < 1e-6


def test_gradients_reach_queries_through_it() -> None:
    tensors, slopes = inputs()
    found: list[Any] = []
    for fn in (stacked, torch.compile(stacked, backend="kda", options={"kda.inner": "eager"})):
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        given = q, k, v
        found.append(torch.autograd.grad(fn(*given, slopes).square().sum(), given))
    for own, theirs in zip(*found, strict=True):
        assert relative_error(own, theirs) < 1e-5


def test_a_slope_with_gradients_is_cut_off_by_item() -> None:
    tensors, slopes = inputs()
    slopes.requires_grad_()
    query = tensors[0].requires_grad_()
    torch.compile(stacked, backend="kda", options={"kda.inner": "eager"})(*tensors, slopes).sum().backward()
    assert slopes.grad is None and query.grad is not None


def test_a_decision_and_other_numbers_are_torchs() -> None:
    def decides(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        if slopes[0].item() > 1:
            return stacked(q, k, v, slopes)
        return stacked(q, k, v, slopes * 2) * slopes[1].item() ** 2

    tensors, slopes = inputs()
    with torch.no_grad(), collecting():
        for factor in (1.0, 3.0):
            compiled = torch.compile(decides, backend="kda", options={"kda.inner": "eager"})
            assert relative_error(compiled(*tensors, slopes * factor), decides(*tensors, slopes * factor)) < 1e-6
