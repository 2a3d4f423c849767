"""Streams that hyper-connections mix are no recurrence: not searched where no region can be, and never reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile.patterns.recurrence.cuts import Surroundings
from tests.backend.test_effort import counting
from tests.compare import relative_error

STREAMS, WIDTH = 2, 24


class Connection(nn.Module):
    """A layer between what is read of the streams and what is put back; ``mixes``: the streams are mixed as well."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.weights = nn.Linear(STREAMS * WIDTH, 2 * STREAMS + STREAMS * STREAMS)
        self.norm, self.layer, self.mixes = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), mixes

    def forward(self, streams: Tensor) -> Tensor:
        read, put, mix = self.weights(streams.flatten(2)).split([STREAMS, STREAMS, STREAMS * STREAMS], -1)
        token = (torch.sigmoid(read).unsqueeze(-1) * streams).sum(2)
        made = torch.tanh(self.layer(self.norm(token)))
        if self.mixes:
            streams = mix.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) @ streams
        return torch.sigmoid(put).unsqueeze(-1) * made.unsqueeze(-2) + streams


def explained(program: Any, *given: Tensor) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(program, options={"kda.inner": "eager", "kda.lift": False})(*given)
        assert relative_error(report.result, program(*given)) < 1e-5
    return report


@pytest.mark.parametrize("mixes", [False, True])
def test_hyper_connections_are_no_near_miss(mixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Connection(mixes=mixes) for _ in range(4)))
    cuts = counting(monkeypatch, Surroundings, "minimum_cut")
    report = explained(model, torch.randn(2, 30, STREAMS, WIDTH))
    assert not report.matches
    assert not report.rejections, str(report)
    assert mixes or not cuts


def test_a_layer_that_hangs_together_with_another_is_found() -> None:
    """By the residual, and by a gate that is made of what the one before has yielded."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(2):
            o = (q @ k.mT).tril() @ v
            v = v + o * torch.sigmoid(o)
            q = q * torch.sigmoid(v.sum(-1, keepdim=True))
        return v

    given = [torch.randn(2, 3, 20, 8) for _ in range(3)]
    assert [match.pattern for match in explained(program, *given).matches] == ["linear_attention"]


def test_steps_with_little_in_front_of_them_are_found() -> None:
    """One token, few heads and keys, batches in front: what streams look like, with a state."""

    def program(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * state).sum(-2), state

    given = torch.randn(2, 3, 4, 6), *(torch.randn(2, 3, size) for size in (4, 4, 6))
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(program, options={"kda.inner": "eager"})(*given)
    assert [match.mode for match in report.matches] == ["step"], str(report)
