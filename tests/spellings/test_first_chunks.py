"""The first chunk of a chunked spelling: what it reads of its empty state, and the state after it, are the op's too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.report.report import Report
from tests.compare import relative_error

B, H, T, K, V = 2, 3, 8, 4, 5
BOUND = 1e-5

Program = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Keys = Callable[[Tensor, Tensor], Tensor]
"""What is written to the state, of keys and of how each decays to the chunk's end."""


def chunk(keys: Keys, empty: float = 0.0) -> Program:
    """Lightning attention over one chunk, as MiniMax has it."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rates = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
        n = torch.arange(T) + 1.0
        since = n[:, None] - n
        within = torch.where(since >= 0, torch.exp(-rates * since), 0.0)
        state = torch.full((B, H, K, V), empty)
        o = (q * torch.exp(-rates * n[:, None])) @ state + (q @ k.mT * within) @ v
        after = state * torch.exp(-rates * T) + keys(k, torch.exp(-rates * (T - n[:, None]))).mT @ v
        return o, after

    return program


def rewritten(program: Program) -> tuple[Report, int, float]:
    """The report, how many matrix products the rewritten graph has left, and the error of what it computes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = torch.randn(B, H, T, K), torch.randn(B, H, T, K), torch.randn(B, H, T, V)
    report = explain(program, stages=True)(*inputs)
    wanted = program(*inputs)
    error = max(relative_error(one, other) for one, other in zip(report.result, wanted, strict=True))
    left = next((stage.text for stage in report.stages if stage.name == "rewritten"), "matmul(")
    return report, left.count("matmul("), error


def test_state_and_outputs_are_one_op() -> None:
    report, left, error = rewritten(chunk(lambda k, decay: k * decay))
    assert report.counts == {"retention": 1} and not left, str(report)
    assert error < BOUND


@pytest.mark.parametrize(
    "program",
    [
        chunk(lambda k, decay: k),
        chunk(lambda k, decay: k * decay * decay),
        chunk(lambda k, decay: k.flip(2) * decay),
        chunk(lambda k, decay: k * decay, empty=1.0),
    ],
    ids=["not decayed", "decayed twice", "other keys", "not empty"],
)
def test_other_states_are_computed_as_they_are(program: Program) -> None:
    _, left, error = rewritten(program)
    assert left and error < BOUND
