"""Masks by length become the op's lengths, if they say nothing else; otherwise they stay masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kdacompile
from kdacompile.report.report import Report
from tests.compare import relative_error
from tests.mla.absorbed import RANK, Mqa
from tests.mla.spellings import HEADS
from tests.mla.test_recognised import EAGER, inputs

Hide = Callable[[Tensor, Tensor], Tensor]
CACHED = 12


class Limited(Mqa):
    """One query a request, which sees as many tokens as ``hide`` leaves of the scores ``[B, H, 1, S]``."""

    def __init__(self, hide: Hide) -> None:
        super().__init__()
        self.hide = hide

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, limit: Tensor) -> Tensor:  # type: ignore[override]
        q, cache = torch.cat(self.queries(x), dim=-1).transpose(1, 2), torch.cat([latent, rope], dim=-1)
        scores = self.hide(q @ cache.unsqueeze(1).mT * self.scale, limit)
        return scores.softmax(-1) @ cache[..., :RANK].unsqueeze(1)


def explained(hide: Hide, limit: Tensor) -> tuple[Report, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, arguments = Limited(hide), (*inputs(1, CACHED, batch=len(limit)), limit)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        return report, relative_error(report.result, module(*arguments))


def below(scores: Tensor, limit: Tensor) -> Tensor:
    seen = torch.arange(CACHED) < limit[:, None, None, None]
    return scores.masked_fill(~seen, float("-inf"))


def at_most(scores: Tensor, limit: Tensor) -> Tensor:
    return torch.where(limit[:, None, None, None] >= torch.arange(CACHED), scores, float("-inf"))


def added(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill((torch.arange(CACHED) > limit[:, None])[:, None, None], float("-inf"))


@pytest.mark.parametrize("hide", [below, at_most, added])
@pytest.mark.parametrize("limits", [(3, 7), (1, CACHED - 1), (5, CACHED + 4)])
def test_lengths_instead_of_the_mask(hide: Hide, limits: tuple[int, ...]) -> None:
    report, error = explained(hide, torch.tensor(limits))
    assert [sorted(match.roles) for match in report.matches] == [["cache", "lengths", "q"]], str(report)
    assert error < 1e-6


def test_lengths_that_the_graph_overwrites_stay_a_mask() -> None:
    def hide(scores: Tensor, limit: Tensor) -> Tensor:
        seen = torch.arange(CACHED) < limit.view(-1, 1, 1, 1)
        limit.add_(1)
        return scores.masked_fill(~seen, float("-inf"))

    torch._dynamo.reset()
    module, arguments = Limited(hide), inputs(1, CACHED)
    mine, theirs = torch.tensor([3, 7]), torch.tensor([3, 7])
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments, mine)
        expected = module(*arguments, theirs)
    assert len(report.matches) == 1, str(report)
    assert relative_error(report.result, expected) < 1e-6
    assert torch.equal(mine, theirs)


def finite(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(CACHED) >= limit[:, None, None, None], -1e9)


def from_one(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(1, CACHED + 1) > limit[:, None, None, None], float("-inf"))


def per_head(scores: Tensor, limit: Tensor) -> Tensor:
    limit = limit[:, None, None, None] + torch.arange(HEADS)[None, :, None, None]
    return scores.masked_fill(torch.arange(CACHED) >= limit, float("-inf"))


def suffix(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(CACHED) < limit[:, None, None, None], float("-inf"))


@pytest.mark.parametrize("hide", [finite, from_one, per_head, suffix])
def test_other_masks_stay_masks(hide: Hide) -> None:
    """The last of them hides what lies below; a finite number leaves an average where all is hidden."""
    report, error = explained(hide, torch.tensor([3, 7]))
    assert ["mask" in match.roles for match in report.matches] == [True], str(report)
    assert error < 1e-6
