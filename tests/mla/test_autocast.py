"""Attention weights that are rounded under autocast: as autocast rounds them by itself, or otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from tests.compare import relative_error

HEADS, LATENT, WIDTH = 4, 24, 16


def attention(q: Tensor, latent: Tensor, weight: Tensor, dtype: torch.dtype, autocast: bool = True) -> Tensor:
    """q [B, H, T, K], latent [B, T, R]; the product with the values runs under autocast or without it."""
    expanded = torch.nn.functional.linear(latent, weight).unflatten(-1, (HEADS, 2 * WIDTH)).transpose(1, 2)
    keys, values = expanded.split(WIDTH, -1)
    weights = ((q @ keys.transpose(-1, -2)).float() * WIDTH**-0.5).softmax(-1).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return weights @ values if autocast else weights.float() @ values.float()


def run(dtype: torch.dtype, autocast: bool) -> tuple[set[str], set[str], float, float]:
    """What was matched, the codes of what was not, and how far ours and eager's results are from fp32's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = torch.randn(2, HEADS, 12, WIDTH), torch.randn(2, 12, LATENT), torch.randn(2 * HEADS * WIDTH, LATENT) * 0.3
    exact = attention(*args, torch.float32, autocast=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        report = explain(attention)(*args, dtype, autocast)
        eager = attention(*args, dtype, autocast)
    assert report.result.dtype == eager.dtype
    found = {match.pattern for match in report.matches}, {rejection.code for rejection in report.rejections}
    return *found, relative_error(report.result, exact), relative_error(eager, exact)


def test_what_autocast_rounds_by_itself() -> None:
    found, _, ours, theirs = run(torch.bfloat16, autocast=True)
    assert found == {"mla"}
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float16, True), (torch.bfloat16, False)],
    ids=["to another dtype", "where autocast is off"],
)
def test_what_the_model_rounds(dtype: torch.dtype, autocast: bool) -> None:
    found, codes, ours, theirs = run(dtype, autocast)
    assert not found
    assert "rounding" in codes
    assert ours == pytest.approx(theirs, rel=1e-2)
