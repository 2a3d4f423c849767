"""Variants of attention over a latent: matched with the roles they have, or left alone with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile.report.report import Report
from tests.compare import relative_error
from tests.mla import variants_of_scores
from tests.mla.layers import RANK, ROPE, WIDTH
from tests.mla.variants import LEFT, MATCHED, OTHERS

assert variants_of_scores.MATCHED is MATCHED  # they have registered themselves


def both(cls: type[nn.Module], tokens: int) -> tuple[Report, Tensor]:
    """What is found over 13 cached tokens, and eager's result; inputs that are overwritten come out alike."""
    torch.manual_seed(0)
    module = cls()
    sizes = ((tokens, WIDTH), (13, RANK), (13, ROPE))
    own = [torch.randn(2, many, width) for many, width in sizes]
    theirs = [x.clone() for x in own]
    torch._dynamo.reset()
    options: Any = {"kda.inner": "eager"}
    with torch.no_grad():
        report, expected = kdacompile.explain(module, options=options)(*own), module(*theirs)
    assert all(map(torch.equal, own, theirs))
    assert relative_error(report.result, expected) < 1e-6
    return report, expected


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", MATCHED)
def test_matched(name: str, tokens: int) -> None:
    cls, roles = MATCHED[name]
    report, _ = both(cls, tokens)
    assert [set(match.roles) for match in report.matches] == [set(roles)] * (2 if name == "Twice" else 1), str(report)
    assert not report.rejections, str(report)


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    cls, (reason,) = LEFT[name]
    report, expected = both(cls, 5)
    assert not report.matches and any(reason in r.reason for r in report.rejections), str(report)
    assert torch.equal(report.result, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_passed_over(name: str) -> None:
    report, expected = both(OTHERS[name], 5)
    assert not report.matches and not report.rejections, str(report)
    assert torch.equal(report.result, expected)
