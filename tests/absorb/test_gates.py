"""Gate activations and beta's sigmoid: absorbed where they are the function, left alone where they are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.absorb.mixers import BATCH, HEADS, LENGTH, SIZE, draw, mix, only, plain

Gate = Callable[..., Tensor]

TOKEN = draw(BATCH, LENGTH, HEADS, seed=6) * 8
CHANNEL = draw(BATCH, LENGTH, HEADS, SIZE, seed=7) * 8
MERGED = CHANNEL.flatten(2)
RATE = draw(HEADS, seed=8) * 0.5
BIAS = draw(HEADS, seed=9)
BIASES = draw(HEADS, SIZE, seed=10)


def absorbed(gate: Gate, *arguments: Tensor, tolerance: float = 1e-5) -> tuple[str, ...]:
    """What is absorbed into the core when its gate is ``gate(*arguments)``."""
    given = plain()
    given.pop("g")
    match = only(
        lambda q, k, v, beta, *rest: mix(q, k, v, gate(*rest), beta),
        [given["q"], given["k"], given["v"], given["beta"], *arguments],
        tolerance=tolerance,
    )
    return match.absorbed


def written_out(x: Tensor, threshold: float = 20.0) -> Tensor:
    return torch.where(x > threshold, x, torch.log(1.0 + torch.exp(x)))


def stable(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x)) + torch.log1p(torch.exp(-torch.where(x > 0, x, -x)))


SOFTPLUS: dict[str, tuple[Gate, tuple[Tensor, ...], bool]] = {
    "token": (lambda x, a, b: -a.exp() * F.softplus(x + b), (TOKEN, RATE, BIAS), True),
    "token_upcast_rate": (lambda x, a, b: -(a.float().exp() * F.softplus(b + x.float())), (TOKEN, RATE, BIAS), True),
    "token_no_bias": (lambda x, a: -a.exp() * F.softplus(x), (TOKEN, RATE), False),
    "token_heads_first": (
        lambda x, a, b: -(a.exp()[:, None] * F.softplus(x.transpose(1, 2) + b[:, None])).transpose(1, 2),
        (TOKEN, RATE, BIAS),
        True,
    ),
    "channel": (lambda x, a, b: -a.exp()[:, None] * F.softplus(x + b), (CHANNEL, RATE, BIASES), True),
    "channel_bias_per_head": (
        lambda x, a, b: -a.exp()[:, None] * F.softplus(x + b[:, None]),
        (CHANNEL, RATE, BIAS),
        True,
    ),
    "channel_merged": (
        lambda x, a, b: -a.exp().view(1, 1, -1, 1) * written_out((x + b.view(1, 1, -1)).unflatten(-1, (HEADS, SIZE))),
        (MERGED, RATE, BIASES.flatten()),
        True,
    ),
    "log1p": (lambda x, a: -a.exp() * torch.where(x <= 30, x.exp().log1p(), x), (TOKEN, RATE), False),
    "stable": (lambda x, a: -a.exp() * stable(x), (TOKEN, RATE), False),
    "relu": (lambda x, a: -a.exp() * (F.relu(x) + torch.log1p(torch.exp(-x.abs()))), (TOKEN, RATE), False),
    "logsigmoid": (lambda x, a: a.exp() * F.logsigmoid(-x), (TOKEN, RATE), False),
    "in_place": (lambda x, a, b: -a.exp() * F.softplus(x.clone().add_(b)), (TOKEN, RATE, BIAS), True),
}


@pytest.mark.parametrize("name", SOFTPLUS)
def test_softplus(name: str) -> None:
    gate, arguments, biased = SOFTPLUS[name]
    found = absorbed(gate, *arguments)
    assert "gate_softplus" in found
    assert ("dt_bias" in found) == biased


SIGMOID: dict[str, tuple[Gate, tuple[Tensor, ...], bool]] = {
    "token": (lambda x, a, b: -5.0 * torch.sigmoid(a.exp() * (x + b)), (TOKEN, RATE, BIAS), True),
    "channel": (lambda x, a, b: -5.0 * torch.sigmoid(a.exp()[:, None] * (x + b)), (CHANNEL, RATE, BIASES), True),
    "merged": (
        lambda x, a, b: torch.sigmoid(a.exp().view(-1, 1) * (x + b).view(BATCH, LENGTH, HEADS, SIZE)) * -0.7,
        (MERGED, RATE, BIASES.flatten()),
        True,
    ),
    "no_rate": (lambda x: x.sigmoid().neg() * 3.0, (TOKEN,), False),
}


@pytest.mark.parametrize("name", SIGMOID)
def test_bounded_sigmoid(name: str) -> None:
    gate, arguments, biased = SIGMOID[name]
    found = absorbed(gate, *arguments)
    assert "gate_sigmoid" in found
    assert ("dt_bias" in found) == biased


@pytest.mark.parametrize(
    "gate",
    [lambda x: F.logsigmoid(x) / 16, lambda x: -F.softplus(-x) * 0.5, lambda x: torch.sigmoid(x).log()],
    ids=["divided", "softplus", "log_of_sigmoid"],
)
def test_logsigmoid(gate: Gate) -> None:
    assert "gate_logsigmoid" in absorbed(gate, CHANNEL)


NEAR: dict[str, tuple[Gate, tuple[Tensor, ...]]] = {
    "threshold_5": (lambda x, a: -a.exp() * written_out(x, 5.0), (TOKEN, RATE)),
    "softplus_threshold_5": (lambda x, a: -a.exp() * F.softplus(x, threshold=5.0), (TOKEN, RATE)),
    "softplus_beta_2": (lambda x, a: -a.exp() * F.softplus(x, beta=2.0), (TOKEN, RATE)),
    "plain_rate": (lambda x, a: -a.abs() * F.softplus(x), (TOKEN, RATE)),
    "rate_per_channel": (lambda x, a: -a.exp() * F.softplus(x), (CHANNEL, BIASES)),
    "clamped": (lambda x, a: (-a.exp() * F.softplus(x)).clamp(min=-30.0), (TOKEN, RATE)),
    "rounded": (lambda x, a: (-a.exp() * F.softplus(x)).bfloat16().float(), (TOKEN, RATE)),
    "shifted": (lambda x: -F.softplus(x) - 0.01, (TOKEN,)),
    "threshold_per_channel": (
        lambda x: -torch.where(x > torch.arange(SIZE) * 4.0 + 4.0, x, torch.log(1.0 + torch.exp(x))),
        (CHANNEL,),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_of_gates_stay_outside(name: str) -> None:
    gate, arguments = NEAR[name]
    rounds = 2e-2 if name == "rounded" else 1e-5  # a gradient rounded to bfloat16 on the way may fall either way
    assert not [what for what in absorbed(gate, *arguments, tolerance=rounds) if what.startswith("gate")]


def test_a_rate_in_another_form_is_part_of_the_logit() -> None:
    """``a * x`` is no ``exp(A_log) * x``; the sigmoid of the product is absorbed all the same."""
    assert absorbed(lambda x, a: -2.0 * torch.sigmoid(a * x), TOKEN, RATE) == ("gate_sigmoid",)


def with_beta(fn: Gate, logit: Tensor) -> tuple[str, ...]:
    given = plain()
    return only(
        lambda b, q, k, v, g: mix(q, k, v, g, fn(b)), [logit, *(given[n] for n in ("q", "k", "v", "g"))]
    ).absorbed


WRITTEN_OUT: dict[str, Gate] = {
    "divided": lambda x: 1 / (1 + torch.exp(-x)),
    "reciprocal": lambda x: (-x).exp().add(1).reciprocal(),
    "power": lambda x: (1 + torch.exp(-x)) ** -1,
    "tanh": lambda x: 0.5 * (torch.tanh(0.5 * x) + 1),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_sigmoid_in_pieces(name: str) -> None:
    """Of beta, and of a bounded gate: the region must begin below its exponential, which is no gate's."""
    sigmoid = WRITTEN_OUT[name]
    assert with_beta(sigmoid, TOKEN / 4) == ("sigmoid_beta",)
    assert absorbed(lambda x: -5 * sigmoid(x), CHANNEL / 4) == ("gate_sigmoid",)


def test_sigmoid_of_beta() -> None:
    assert with_beta(torch.sigmoid, TOKEN) == ("sigmoid_beta",)
    assert with_beta(lambda b: b.transpose(1, 2).contiguous().sigmoid().transpose(1, 2), TOKEN) == ("sigmoid_beta",)


@pytest.mark.parametrize(
    "fn",
    [
        lambda b: 2 * torch.sigmoid(b),
        lambda b: torch.sigmoid(b) ** 2,
        lambda b: b.sigmoid().clamp(max=0.9),
        F.hardsigmoid,
        lambda b: 1 / (1.01 + torch.exp(-b)),
    ],
    ids=["doubled", "squared", "clamped", "hard", "nearly"],
)
def test_other_functions_of_beta_stay_outside(fn: Gate) -> None:
    assert "sigmoid_beta" not in with_beta(fn, TOKEN)
