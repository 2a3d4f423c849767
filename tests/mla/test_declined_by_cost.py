"""Prompts whose op would take longer than Inductor's own code are left to it, as matches, unless told otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile.bench.latent_prompts import SMALL, Layer
from kdacompile.errors import StrictError
from kdacompile.explainer import explain
from kdacompile.lowering.cpu.attention_cost import Prompt
from kdacompile.report.report import Report

LENGTH = 64
EAGER: dict[str, Any] = {"kda.inner": "eager"}


def explained(options: dict[str, Any] | None = None, *, dtype: torch.dtype = torch.float32) -> Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = Prompt(1, LENGTH, LENGTH, *SMALL, causal=True)
    layer = Layer(case).to(dtype)
    sizes = (1, case.heads, LENGTH, case.nope + case.rope), (1, LENGTH, case.rank), (1, LENGTH, case.rope)
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    return explain(layer, dynamic=False, options={**EAGER, **(options or {})})(*inputs, None)


def test_it_is_said_and_counts_as_matched() -> None:
    report = explained({"kda.strict": True, "kda.expect": {"mla": 1}})
    (declined,) = report.declined
    assert (declined.pattern, declined.code) == ("mla", "cost")
    assert f"training on {LENGTH} tokens" in declined.reason
    assert not report.matches and not report.rejections
    assert "1 x mla declined by cost" in str(report) and "near-misses" in str(report)
    assert Report.from_json(report.to_json()).declined == report.declined
    with pytest.raises(StrictError, match="estimated"):
        explained({"kda.expect": {"mla": 2}})


@pytest.mark.parametrize(
    "how",
    [{"options": {"kda.cost_model": False}}, {"dtype": torch.float16}],
    ids=["switched off", "not measured"],
)
def test_others_are_rewritten(how: dict[str, Any]) -> None:
    report = explained(**how)
    assert report.counts == {"mla": 1} and not report.declined, str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_half_precision_too(dtype: torch.dtype) -> None:
    assert [found.code for found in explained(dtype=dtype).declined] == ["cost"]
