"""Write gates that a loop makes of a number a token are one recurrence; what only looks so is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import relative_error, worst_error

B, T, H, K, V = 2, 9, 3, 4, 5

Program = Callable[..., tuple[Tensor, Tensor]]

FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda b: 2 * b,
    "half": lambda b: b / 2,
    "negative": lambda b: -b,
    "twice an activation": lambda b: 2 * b.sigmoid(),
    "half within": lambda b: 2 * (b * 0.5).sigmoid(),
    "squared": lambda b: b * b,
    "a power": lambda b: b**2,
    "added to itself": lambda b: b + b,
}

LOOPS = [("kda", "channel", True), ("gated_delta_rule", "head", True), ("gla", "channel", False)]


def loop(kind: str, delta: bool, factor: Callable[[Tensor], Tensor], late: bool = False, shift: int = 0) -> Program:
    """``late``: the gate is laid out like a row of values first. ``shift``: it is another token's."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            decay = g[:, t].exp()
            state = state * (decay[..., None] if kind == "channel" else decay[..., None, None])
            key = k[:, t, :, :, None]
            given = b[:, max(t - shift, 0)]
            beta = factor(given[..., None]) if late else factor(given)[..., None]
            write = beta * (v[:, t] - (key * state).sum(-2) if delta else v[:, t])
            state = state + key * write[..., None, :]
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1), state

    return run


def arguments(kind: str, batch: int = B, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows = (batch, T, H)
    g = -torch.rand(*rows, K) if kind == "channel" else -torch.rand(rows)
    k = torch.nn.functional.normalize(torch.randn(*rows, K), dim=-1)
    drawn = [torch.randn(*rows, K), k, torch.randn(*rows, V), g, torch.rand(rows), torch.randn(batch, H, K, V)]
    return [each.to(dtype) for each in drawn]


def explained(fn: Program, args: list[Tensor]) -> Report:
    torch._dynamo.reset()
    return explain(fn, options={"kda.lift": False})(*args)


def patterns(report: Report) -> list[str]:
    return [match.pattern for match in report.matches if match.mode == "sequence"]


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_and_gradients(pattern: str, kind: str, delta: bool, late: bool, name: str) -> None:
    fn = loop(kind, delta, FACTORS[name], late)
    args = [each.requires_grad_() for each in arguments(kind)]
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= 1e-5
    grads = [torch.autograd.grad(o.sin().sum() + state.square().sum(), args) for o, state in (report.result, fn(*args))]
    assert max(map(relative_error, *grads)) <= 1e-4


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
def test_in_bfloat16(pattern: str, kind: str, delta: bool) -> None:
    fn, args = loop(kind, delta, FACTORS["twice"]), arguments(kind, dtype=torch.bfloat16)
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    want = fn(*[each.double() for each in args])
    assert worst_error(report.result, want) <= worst_error(fn(*args), want) + 1e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_within_a_loop_that_wants_no_gradient(mode: Callable[[], Any], late: bool) -> None:
    """Parameters want a gradient where none is recorded: nothing is cut there."""
    bias = torch.nn.Parameter(torch.rand(H, 1) if late else torch.rand(H))
    fn, args = loop("head", True, lambda b: (b + bias).sigmoid(), late), arguments("head")
    with mode():
        report = explained(fn, args)
        assert patterns(report) == ["gated_delta_rule"], str(report)
        assert worst_error(report.result, fn(*args)) <= 1e-5


@pytest.mark.parametrize("name", ["twice", "twice an activation"])
def test_open_sizes(name: str) -> None:
    fn = loop("head", True, FACTORS[name], late=True)
    torch._dynamo.reset()
    run = torch.compile(fn, backend="kda", options={"kda.lift": False})
    with collecting() as report:
        for batch in (2, 3, 5):
            args = arguments("head", batch)
            assert worst_error(run(*args), fn(*args)) <= 1e-5
    assert patterns(report) == ["gated_delta_rule"] * 2, str(report)


@pytest.mark.parametrize(("kind", "delta"), [(kind, delta) for _, kind, delta in LOOPS])
def test_left_or_the_same(kind: str, delta: bool) -> None:
    """Gates of other tokens, and such as differ from value to value."""
    several = torch.linspace(0.5, 1, V)
    for fn in (
        loop(kind, delta, FACTORS["twice"], shift=1),
        loop(kind, delta, lambda b: b * several, late=True),
        loop(kind, delta, lambda b: 2 * b + several, late=True),
    ):
        args = arguments(kind)
        report = explained(fn, args)
        assert worst_error(report.result, fn(*args)) <= 1e-5
