"""Prompts and training steps so short that the model's own products are faster are left to Inductor, as matches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdacompile.explainer import explain
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report

INDUCTOR: dict[str, Any] = {"kda.inner": "inductor"}


def parallel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


def by_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outs = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype), []
    for t in range(q.shape[2]):
        state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
        outs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outs, 2)


def explained(
    tokens: int,
    options: dict[str, Any] = INDUCTOR,
    dtype: torch.dtype = torch.float32,
    *,
    train: bool = False,
    dynamic: bool = False,
    function: Any = parallel,
) -> Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(1, 16, tokens, 128, dtype=dtype, requires_grad=train) for _ in range(3)]
    return explain(function, dynamic=dynamic, options=options)(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True])
def test_a_short_one_is_left_to_inductor(dtype: torch.dtype, train: bool) -> None:
    options = {**INDUCTOR, "kda.strict": True, "kda.expect": {"linear_attention": 1}}
    report = explained(16, options, dtype, train=train)
    (declined,) = report.declined
    assert (declined.pattern, declined.code) == ("linear_attention", "cost")
    assert ("training on 16 tokens" if train else "a prompt of 16 tokens") in declined.reason
    assert not report.matches and not report.rejections


@pytest.mark.parametrize(
    "how",
    [
        {"tokens": 1024},
        {"tokens": 16, "options": {**INDUCTOR, "kda.cost_model": False}},
        {"tokens": 16, "options": {"kda.inner": "eager"}},
        {"tokens": 16, "dtype": torch.float16},
        {"tokens": 16, "dynamic": True},
        {"tokens": 16, "function": by_token},
    ],
    ids=["a long one", "switched off", "eager runs the rest", "not measured", "one graph for every length", "a loop"],
)
def test_others_are_rewritten(how: dict[str, Any]) -> None:
    report = explained(**how)
    assert report.counts == {"linear_attention": 1} and not report.declined, str(report)


class Lightning(nn.Module):
    """Retention whose decays are a buffer, which a match takes for constants."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        n = torch.arange(tokens)
        since = n[:, None] - n
        rates = torch.tensor([0.1, 0.2])[:, None, None]
        self.within = nn.Buffer(torch.where(since >= 0, torch.exp(-rates * since), 0.0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * self.within) @ v


def test_what_holds_by_the_values_of_a_buffer_is_told_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 16, 32) for _ in range(3)]
    with torch.no_grad():
        report = explain(Lightning(16), options={**INDUCTOR, "kda.expect": {"retention": 1}})(*inputs)
    assert [(found.pattern, found.code) for found in report.declined] == [("retention", "cost")], str(report)
    assert not report.rejections


class Projected(nn.Module):
    """Queries, keys and values of one tensor, so that they have one length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(128, 3 * 128))

    def forward(self, x: Tensor) -> Tensor:
        return parallel(*(x @ self.weight).bfloat16().unflatten(-1, (1, -1)).transpose(1, 2).chunk(3, -1))


def told(compiled: Any, x: Tensor) -> tuple[int, list[str]]:
    """How many graphs were compiled for this, and what was matched or declined."""
    with torch.no_grad(), collecting() as report:
        compiled(x)
    assert all("fewer than" in found.reason for found in report.declined if x.shape[1] == 24)
    return len(report.graphs), [*report.counts, *(found.code for found in report.declined)]


def test_lengths_that_are_open_are_left_up_to_the_first_that_an_op_takes_less_for() -> None:
    """The second length is open, and left with a guard; one graph more serves what lies beyond, and short ones too."""
    torch._dynamo.reset()
    compiled = torch.compile(Projected(), backend="kda", options=INDUCTOR)
    found = [told(compiled, torch.randn(16, tokens, 128)) for tokens in (16, 24, 40, 4000, 3000, 20)]
    assert found == [(1, ["cost"]), (1, ["cost"]), (0, []), (1, ["linear_attention"]), (0, []), (0, [])]


def test_a_length_that_the_caller_wants_open_is_rewritten() -> None:
    torch._dynamo.reset()
    x = torch.randn(16, 16, 128)
    torch._dynamo.mark_dynamic(x, 1)
    assert told(torch.compile(Projected(), backend="kda", options=INDUCTOR), x) == (1, ["linear_attention"])
