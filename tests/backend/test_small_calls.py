"""Calls so small that making them takes longer than they save are left to Inductor, as matches, where it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdacompile.bench.latent_prompts import Layer
from kdacompile.explainer import explain
from kdacompile.lowering.cpu.attention_cost import Prompt
from kdacompile.lowering.cpu.step_cost import OTHERS, WORTH, least_states
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.mla.spellings import RANK, ROPE, WIDTH, Naive

INDUCTOR: dict[str, Any] = {"kda.inner": "inductor"}


class Step(nn.Module):
    """One token of the gated delta rule, the state written back."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        decayed = state * g.exp()[:, :, None, None]
        delta = (v - (decayed * k[..., None]).sum(-2)) * beta[..., None]
        new = decayed + k[..., None] * delta[..., None, :]
        state.copy_(new)
        return (new * q[..., None]).sum(-2)


def step(width: int, options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, width, dtype=dtype) for _ in range(3))
    g, beta = -torch.rand(1, 2), torch.rand(1, 2)
    state = torch.zeros(1, 2, width, width)
    with torch.no_grad():
        return explain(Step(), options=options)(q, k, v, g.to(dtype), beta.to(dtype), state)


def test_a_step_over_a_small_state_is_left_to_inductor() -> None:
    report = step(16, {**INDUCTOR, "kda.strict": True, "kda.expect": {"gated_delta_rule": 1}})
    (declined,) = report.declined
    assert (declined.pattern, declined.code) == ("gated_delta_rule", "cost")
    assert "one token over 512 numbers" in declined.reason
    assert not report.matches and not report.rejections


@pytest.mark.parametrize(
    ("width", "how"),
    [(256, INDUCTOR), (16, {**INDUCTOR, "kda.cost_model": False}), (16, {"kda.inner": "eager"})],
    ids=["a large one", "switched off", "eager runs the rest"],
)
def test_others_are_rewritten(width: int, how: dict[str, Any]) -> None:
    report = step(width, how)
    assert report.counts == {"gated_delta_rule": 1} and not report.declined, str(report)


def test_the_size_that_decides() -> None:
    assert least_states("token", False) == WORTH["token", False]
    assert least_states("channel", True) == OTHERS


def test_of_an_open_batch_what_is_small_is_guarded() -> None:
    """The first batch is fixed; of others, one from which on the op is worth its call is captured once more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(Step(), backend="kda", options=INDUCTOR)
    limit = OTHERS // (2 * 64 * 64)
    with torch.no_grad(), collecting() as report:
        for batch in (3, 4, limit - 1, limit, limit + 3):
            q, k, v = (torch.randn(batch, 2, 64) for _ in range(3))
            state = torch.zeros(batch, 2, 64, 64)
            inputs = q, k, v, -torch.rand(batch, 2), torch.rand(batch, 2)
            other = state.clone()
            torch.testing.assert_close(compiled(*inputs, state), Step()(*inputs, other), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(state, other, atol=1e-5, rtol=1e-5)
    assert [found.code for found in report.declined] == ["cost", "cost"]
    assert report.counts == {"gated_delta_rule": 1}


@pytest.mark.parametrize(("tokens", "left"), [(1, True), (16, True), (256, False)])
def test_small_prompts_of_mla(tokens: int, left: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = Prompt(1, tokens, tokens, 4, 12, 8, 20, 24, causal=True)
    layer = Layer(case)
    sizes = (1, case.heads, tokens, case.nope + case.rope), (1, tokens, case.rank), (1, tokens, case.rope)
    with torch.no_grad():
        report = explain(layer, dynamic=False, options=INDUCTOR)(*(torch.randn(size) for size in sizes), None)
    assert [found.code for found in report.declined] == ["cost"] * left, str(report)
    assert report.counts == ({} if left else {"mla": 1})


def test_what_is_left_is_no_near_miss_of_another_pattern() -> None:
    """The scores and values of latent attention look like a recurrence without its roles, until they are known."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args = Naive(), [torch.randn(2, 6, size) for size in (WIDTH, RANK, ROPE)]
    with torch.no_grad():
        report = explain(model, options={**INDUCTOR, "kda.strict": True})(*args)
    assert [found.code for found in report.declined] == ["cost"] and not report.rejections, str(report)
