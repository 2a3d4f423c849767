"""Scores whose rows are divided by numbers, or whose mask was: the recurrence, and what it yields is divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kdacompile.explainer import explain
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import relative_error, worst_error

T, H, K, V = 12, 3, 4, 5

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The weights of values, given scores ``[B, H, T, T]``, decays ``[H, T, T]`` and positive numbers ``[H, T, 1]``."""


def decays(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    place = torch.arange(length)
    gap = place[:, None] - place
    return torch.where(gap >= 0, torch.tensor([0.9, 0.95, 0.98])[:, None, None] ** gap, 0.0).to(dtype)


def program(weigh: Weigh) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (weigh(q @ k.mT, decays(q.shape[2], q.dtype), rows) @ v).transpose(1, 2)

    return run


def given(batch: int = 2, length: int = T, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(length)
    sizes = [(batch, length, H, K), (batch, length, H, K), (batch, length, H, V)]
    drawn = [torch.randn(size, generator=rng) for size in sizes]
    return [x.to(dtype) for x in (*drawn, 1 + torch.rand(H, length, 1, generator=rng))]


def counts(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)[:, None]


ROWS: dict[str, Weigh] = {
    "the retention paper's": lambda a, d, r: a * (d / d.sum(-1, keepdim=True).sqrt()),
    "of all scores": lambda a, d, r: a * d / d.sum(-1, keepdim=True).sqrt(),
    "given": lambda a, d, r: a * d / r,
    "of the mask": lambda a, d, r: (d / r) * a,
    "how many tokens there are": lambda a, d, r: a * d / (torch.arange(a.shape[-1]) + 1)[:, None],
    "their root": lambda a, d, r: a * d / counts(a).sqrt(),
    "of the mask, by their number": lambda a, d, r: a * (d / counts(d)),
    "of a mask alone": lambda a, d, r: a * (torch.ones_like(d).tril() / counts(d)),
    "with a batch": lambda a, d, r: a * (d / d.sum(-1, keepdim=True))[None],
    "twice": lambda a, d, r: a * (d / r) / counts(a),
    "by a reciprocal": lambda a, d, r: a * d * (1 / r),
}


def explained(fn: Callable[..., Tensor], args: list[Tensor]) -> Report:
    torch._dynamo.reset()
    return explain(fn, options={"kda.lift": False})(*args)


def patterns(report: Report) -> list[str]:
    return [match.pattern for match in report.matches]


@pytest.mark.parametrize("name", ROWS)
def test_rows_and_gradients(name: str) -> None:
    fn, args = program(ROWS[name]), [x.requires_grad_() for x in given()]
    report = explained(fn, args)
    assert patterns(report) == ["linear_attention" if "alone" in name else "retention"], str(report)
    equal(fn, args, report)


def equal(fn: Callable[..., Tensor], args: list[Tensor], report: Report) -> None:
    """Results and gradients are eager's, and no other gradients are cut."""
    results = report.result, fn(*args)
    assert worst_error(*results) <= 1e-5, str(report)
    have, want = (torch.autograd.grad(x.sin().sum(), args, allow_unused=True, materialize_grads=True) for x in results)
    for one, other in zip(have, want, strict=True):
        assert torch.equal(one == 0, other == 0), str(report)
        assert relative_error(one, other) <= 1e-4, str(report)


@pytest.mark.parametrize("name", ["the retention paper's", "given", "their root"])
def test_in_bfloat16(name: str) -> None:
    fn, args = program(ROWS[name]), given(dtype=torch.bfloat16)
    report = explained(fn, args)
    assert patterns(report) == ["retention"], str(report)
    want = fn(*[x.double() for x in args])
    assert worst_error(report.result, want) <= worst_error(fn(*args), want) + 2e-3


@pytest.mark.parametrize("name", ["the retention paper's", "given"])
def test_open_batches(name: str) -> None:
    fn = program(ROWS[name])
    torch._dynamo.reset()
    run = torch.compile(fn, backend="kda", options={"kda.lift": False, "kda.cost_model": False})
    with collecting() as report, torch.no_grad():
        for batch in (2, 3, 5):
            assert worst_error(run(*given(batch)), fn(*given(batch))) <= 1e-5
    assert patterns(report) == ["retention"] * 2, str(report)


class Retention(nn.Module):
    """Decays that a module keeps, one a head."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Buffer(torch.log(1 - 2.0 ** (-5 - torch.arange(H))))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        place = torch.arange(q.shape[1])
        mask = ((place[:, None] - place) * self.decay[:, None, None]).exp().tril()
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (q @ k.mT * mask @ v).transpose(1, 2)


def test_a_module() -> None:
    model, args = Retention(), given()
    torch._dynamo.reset()
    report = explain(model)(*args)
    assert patterns(report) == ["retention"], str(report)
    assert worst_error(report.result, model(*args)) <= 1e-5


LEFT: dict[str, Weigh] = {
    "columns": lambda a, d, r: a * d / r.mT,
    "columns of the mask": lambda a, d, r: a * (d / d.sum(-2, keepdim=True)),
    "each number": lambda a, d, r: a * d / (r + r.mT),
    "sums of what is not masked": lambda a, d, r: a * d / (a * a).sum(-1, keepdim=True).sqrt(),
    "sums of squares": lambda a, d, r: a * d / (1 + (a * d).square().sum(-1, keepdim=True)),
    "the largest": lambda a, d, r: a * d / (1 + (a * d).abs().amax(-1, keepdim=True)),
    "before the mask is added": lambda a, d, r: a / r + d,
    "added to what is divided": lambda a, d, r: (a * d + 1) / r,
    "of another row": lambda a, d, r: a * d / r.roll(1, 1),
    "scores that are cut": lambda a, d, r: (a * d).detach() / r,
    "a quotient that is cut": lambda a, d, r: (a * d / r).detach(),
    "a quotient that is cut in place": lambda a, d, r: (a * d / r).detach_(),
    "a mask that is cut in place": lambda a, d, r: a * (d / r).detach_(),
    "numbers that are cut": lambda a, d, r: a * d / r.detach(),
    "without gradients": lambda a, d, r: a * quietly(d, r),
    "numbers of scores": lambda a, d, r: a * d / a[..., :1].exp(),
}


def quietly(d: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        return d / r


@pytest.mark.parametrize("name", LEFT)
def test_near_misses_equal_eager(name: str) -> None:
    fn, args = program(LEFT[name]), [x.requires_grad_() for x in given()]
    if not fn(*args).requires_grad:
        args = [x.detach() for x in args]
        assert worst_error(explained(fn, args).result, fn(*args)) <= 1e-5
    else:
        equal(fn, args, explained(fn, args))
