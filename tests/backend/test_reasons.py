"""What the report says of near misses in loops: which operator stands in the way, and where it acts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.backend.test_hoist import explained, read
from tests.compare import worst_error

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
        (scores_read, "an intermediate value of the region is read by pow outside it"),
    ],
)
def test_the_operator_in_the_way_is_named(fn: Callable[..., Tensor], reason: str) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) == 0.0
    assert not report.matches
    assert [reason in rejection.reason for rejection in report.rejections] == [True], str(report)
