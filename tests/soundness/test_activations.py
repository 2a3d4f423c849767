"""Absorbed activations: bands, however narrow or far, keep a function out of the op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import copies, worst_error
from tests.soundness.programs import explained, tokens


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = state * g[:, t, :, None, None].exp()
        state = state + key @ ((v[:, t, :, None] - key.mT @ state) * beta[:, t, :, None, None])
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


BETAS: dict[str, Callable[[Tensor], Tensor]] = {
    "a band of the sigmoid": lambda x: torch.where(
        x.sigmoid() > 0.51, torch.where(x.sigmoid() < 0.53, 0.0, x.sigmoid()), x.sigmoid()
    ),
    "a band of the logit": lambda x: torch.where((x > 0.501), torch.where(x < 0.503, 0.0, x.sigmoid()), x.sigmoid()),
    "closed far below": lambda x: torch.where(x < -2000.0, 0.5, x.sigmoid()),
    "open far above": lambda x: torch.where(x > 1e6, 0.25, x.sigmoid()),
    "a clamp of the sigmoid": lambda x: x.sigmoid().clamp(1e-3, 1 - 1e-3),
    "a clamp of the logit": lambda x: x.clamp(-1500.0, 1.25).sigmoid(),
    "a narrow step": lambda x: torch.where(
        (x * 3 + 1 > 2.0), torch.where(x * 3 + 1 < 2.0001, 0.0, x.sigmoid()), x.sigmoid()
    ),
    "a band of the square": lambda x: torch.where((x * x - 25.0).abs() < 0.1, 0.0, x.sigmoid()),
    "one number alone": lambda x: torch.where(x == 5.0, 0.5, x.sigmoid()),
    "a logit that is rounded": lambda x: ((x * 100).round() / 100).sigmoid(),
    "a row whose mean is large": lambda x: x.sigmoid() * torch.where(x.mean(1, keepdim=True) > 1e4, 0.5, 1.0),
    "straight in the middle": F.hardsigmoid,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "a band of softplus": lambda x: (
        -torch.where(F.softplus(x) > 0.9, torch.where(F.softplus(x) < 0.91, 5.0, F.softplus(x)), F.softplus(x))
    ),
    "an early threshold": lambda x: -torch.where(x > 5.0, x, torch.log1p(x.exp())),
    "softplus' own threshold": lambda x: -F.softplus(x, threshold=3.0),
    "a floor far below": lambda x: (-F.softplus(x)).clamp(min=-4000.0),
    "a band far above": lambda x: (
        -torch.where((x > 3000.0), torch.where(x < 3001.0, 0.0, F.softplus(x)), F.softplus(x))
    ),
    "a ceiling": lambda x: (-F.softplus(x)).clamp(max=-1e-2),
    "a floor by the larger of two": lambda x: torch.maximum(-F.softplus(x), torch.tensor(-5.5)),
    "another norm far above": lambda x: -F.softplus(x) / torch.where(x > 2000.0, 2.0, 1.0),
    "a log-sigmoid that ends": lambda x: torch.where(x < -2900.0, -1.0, F.logsigmoid(x)),
    "a logit that ends": lambda x: -F.softplus(-x.clamp(min=-7.0)),
    "a bend": lambda x: -F.softplus(x + 1e-3 * F.relu(x - 7.0)),
}


def worst(name: str, beta: Callable[[Tensor], Tensor], gate: Callable[[Tensor], Tensor]) -> None:
    """Compiled against eager on logits of all sizes, those of every band among them."""

    def program(q: Tensor, k: Tensor, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return loop(q, k, v, gate(x), beta(y))

    given = tokens(40)
    x = torch.linspace(-3.0, 3.0, 80).view(1, 40, 2)
    y = torch.linspace(0.02, 0.13, 80).view(1, 40, 2)
    special = torch.tensor([0.502, 0.33334, -2500.0, 2e6, -5.0, 5.0, 7.0, 3000.5, -3000.0, 5000.0])
    x, y = x.clone(), y.clone()
    x.view(-1)[5:75:7], y.view(-1)[5:75:7] = special, special
    inputs = given["q"], given["k"], given["v"], x, y
    own = copies(inputs)
    report = explained(program, own)
    assert worst_error(report.result, program(*inputs)) <= 2e-5, f"{name}: {report}"


@pytest.mark.parametrize("name", BETAS)
def test_betas_that_are_no_sigmoid(name: str) -> None:
    worst(name, BETAS[name], lambda x: -F.softplus(x))


@pytest.mark.parametrize("name", GATES)
def test_gates_that_are_no_softplus(name: str) -> None:
    worst(name, torch.sigmoid, GATES[name])


SPELLED: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: -torch.where(x > 20.0, x, torch.log1p(x.exp())),
    "relu and log1p": lambda x: -(F.relu(x) + torch.log1p((-x.abs()).exp())),
    "maximum": lambda x: -(torch.maximum(x, torch.zeros_like(x)) + torch.log1p((-x.abs()).exp())),
    "two branches": lambda x: -torch.where(x * 2 >= 1.0, x + torch.log1p((-x).exp()), torch.log1p(x.exp())),
}


@pytest.mark.parametrize("name", SPELLED)
def test_gates_that_are(name: str) -> None:
    given = tokens(12)
    inputs = given["q"], given["k"], given["v"], torch.linspace(-3.0, 3.0, 24).view(1, 12, 2), given["beta"]
    report = explained(lambda q, k, v, x, b: loop(q, k, v, SPELLED[name](x), b), inputs)
    assert ["gate_softplus" in match.absorbed for match in report.matches] == [True], str(report)
