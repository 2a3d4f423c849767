"""Running near misses: what is not the recurrence is left alone, and what is returned is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kdacompile
from kdacompile.report.report import Report
from tests.compare import copies, worst_error

BOUND = 2e-5
Program = Callable[..., Any]


def explained(program: Program, inputs: tuple[Tensor, ...], **options: Any) -> Report:
    torch._dynamo.reset()
    return kdacompile.explain(program, options={"kda.lift": False, **options})(*inputs)


def refused(program: Program, inputs: tuple[Tensor, ...], bound: float = BOUND, *, whole: bool = True) -> Report:
    """The report of a program that must not be matched, and whose results must be eager's. ``whole=False``: a part of
    it may be the recurrence and be matched.
    """
    own, theirs = copies(inputs), copies(inputs)
    expected = program(*theirs)
    report = explained(program, own)
    assert not whole or not [match for match in report.matches if match.mode == "sequence"], str(report)
    assert worst_error((report.result, own), (expected, theirs)) <= bound, str(report)
    return report


def matched(program: Program, inputs: tuple[Tensor, ...], pattern: str, bound: float = BOUND) -> Report:
    """The report of a program that is this pattern, shown exactly, and whose results are eager's."""
    own, theirs = copies(inputs), copies(inputs)
    expected = program(*theirs)
    report = explained(program, own)
    assert [match.pattern for match in report.matches] == [pattern], str(report)
    assert [match.checked for match in report.matches] == ["exactly"], str(report)
    assert worst_error((report.result, own), (expected, theirs)) <= bound, str(report)
    return report


def tokens(
    T: int, B: int = 1, H: int = 2, K: int = 8, V: int = 12, *, gate: float = -0.3, channel: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """q, k, v, g, beta, state in ``[B, T, H, ..]``; unit keys, log gates between ``gate`` and 0."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    g = gate * torch.rand(B, T, H, *([K] if channel else []), generator=rng)
    beta = torch.rand(B, T, H, generator=rng)
    return {
        "q": normal(B, T, H, K),
        "k": k,
        "v": normal(B, T, H, V),
        "g": g,
        "beta": beta,
        "state": normal(B, H, K, V),
    }
