"""What the report says of near misses in loops: which operator stands in the way, and where it acts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kdacompile
from tests.backend.test_hoist import explained, read
from tests.compare import relative_error, worst_error

Between = Callable[[Tensor], Tensor]


def loop(q: Tensor, k: Tensor, v: Tensor, on_state: Between | None = None, on_write: Between | None = None) -> Tensor:
    s = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        fresh = v[:, t] if on_write is None else on_write(v[:, t] - read(s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], fresh)
        s = s if on_state is None else on_state(s)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def bounded_state(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return loop(q, k, v, on_state=lambda s: s.clamp(-5.0, 5.0))


def saturating_state(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return loop(q, k, v, on_state=torch.tanh)


def unknown_on_the_state(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return loop(q, k, v, on_state=torch.asinh)


def bounded_error(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return loop(q, k, v, on_write=lambda u: u.clamp(-1.0, 1.0))


def bounded_scores(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ k.mT).tril().clamp(-1.0, 1.0) @ v


def turned(q: Tensor, k: Tensor) -> list[Tensor]:
    """Queries and keys in complex numbers, each turned by its place."""
    angles = torch.arange(q.shape[1])[:, None, None] * torch.linspace(0.1, 1.0, q.shape[-1])
    turn = torch.polar(torch.ones_like(angles), angles)
    return [(x * turn).transpose(1, 2) for x in (q, k)]


def complex_scores(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    (q, k), v = turned(q, k), v.transpose(1, 2)
    n = torch.arange(q.shape[2])
    decay = torch.where(n[:, None] >= n, 0.9 ** (n[:, None] - n), 0.0)
    return ((q @ k.mH) * decay @ v.to(q.dtype)).real


def complex_states(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    (q, k), v = turned(q, k), v.transpose(1, 2)
    s, rows = torch.zeros((), dtype=q.dtype), []
    for t in range(q.shape[2]):
        s = 0.9 * s + k[:, :, t, :, None].conj() @ v[:, :, t, None].to(q.dtype)
        rows.append((q[:, :, t, None] @ s).real)
    return torch.cat(rows, 2)


def scores_read(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT).tril()
    return scores @ v, scores.square()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (bounded_state, "on the state (clamp)"),
        (saturating_state, "on the state (tanh)"),
        (unknown_on_the_state, "an unknown operator on the state (asinh)"),
        (bounded_error, "on the state (clamp)"),
        (bounded_scores, "between products of activations (clamp)"),
        (complex_scores, "complex numbers between products of activations"),
        (complex_states, "complex numbers between products of activations"),
        (scores_read, "an intermediate value of the region is read by pow outside it"),
    ],
)
def test_the_operator_in_the_way_is_named(fn: Callable[..., Tensor], reason: str) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) == 0.0
    assert not report.matches
    assert [reason in rejection.reason for rejection in report.rejections] == [True], str(report)


def test_an_operator_in_the_way_of_one_head_is_named_beside_the_others() -> None:
    """Heads go through the loop one by one, and the state of the last one is bounded."""

    def heads(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        made: list[Tensor] = []
        for h, bound in ((0, None), (1, None), (2, 5.0)):
            one = (x[:, :, h : h + 1] for x in (q, k, v))
            made.append(loop(*one, on_state=None if bound is None else lambda s: s.clamp(-5.0, 5.0)))
        return made

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 3, size, generator=generator) for size in (8, 8, 12))
    torch._dynamo.reset()
    report = kdacompile.explain(heads, options={"kda.lift": False})(q, k, v)
    assert worst_error(report.result, heads(q, k, v)) <= 1e-5
    assert len(report.matches) == 2, str(report)
    assert ["on the state (clamp)" in rejection.reason for rejection in report.rejections] == [True], str(report)


@pytest.mark.parametrize("stacked", [True, False])
def test_gates_along_the_values_are_no_near_miss_without_a_word(stacked: bool) -> None:
    """The first half of gated slot attention, heads in front of the tokens."""

    def slots(q: Tensor, k: Tensor, s: Tensor, g: Tensor) -> Tensor:
        state, made, written = 0.0, list[Tensor](), torch.zeros_like(s)
        for t in range(q.shape[2]):
            state = state * g[:, :, t].exp()[..., None, :] + k[:, :, t][..., None] * s[:, :, t][..., None, :]
            made.append((q[:, :, t][..., None] * state).sum(-2))
            written[:, :, t] = made[-1]
        return torch.stack(made, 2) if stacked else written

    generator = torch.Generator().manual_seed(0)
    q, k, s, g = (torch.randn(2, 3, 6, size, generator=generator) for size in (8, 8, 5, 5))
    torch._dynamo.reset()
    report = kdacompile.explain(slots)(q, k, s, -g.abs())
    assert relative_error(report.result, slots(q, k, s, -g.abs())) == 0.0
    assert not report.matches
    assert [rejection.code for rejection in report.rejections] == ["roles"], str(report)
