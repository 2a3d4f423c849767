"""What a loop does to each token's result: done to all of them after the loop, so that their reads are in one place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.graph.ir import Op
from kdacompile.patterns.canonical import rules
from kdacompile.patterns.recurrence import spec
from tests.backend.test_hoist import BATCH, HEADS, SIZE, VALUES, explained, read
from tests.compare import worst_error

Row = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What becomes of a row: of S^T q, and the token's value, query and sum of keys."""


def rows(q: Tensor, k: Tensor, v: Tensor, row: Row) -> list[Tensor]:
    s, total = q.new_zeros(BATCH, HEADS, SIZE, VALUES), q.new_zeros(BATCH, HEADS, SIZE)
    found: list[Tensor] = []
    for t in range(q.shape[1]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        total = total + k[:, t]
        found.append(row(read(s, q[:, t]), v[:, t], q[:, t], total))
    return found


def gated_skip(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Mamba-2's skip with a factor per head, an output gate."""
    d = torch.arange(1.0, HEADS + 1)
    return torch.stack(rows(q, k, v, lambda o, x, q, z: (o + d[:, None] * x) * F.silu(x)), dim=1)


def normed_and_projected(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    weight = torch.arange(4.0 * HEADS * VALUES).cos().view(4, -1)
    layer: Row = lambda o, x, q, z: F.linear(F.layer_norm(o, (VALUES,)).flatten(1), weight)[:, None]  # noqa: E731
    return torch.cat(rows(q, k, v, layer), dim=1)


def normalised(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The first linear attention: S^T q over z^T q."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return torch.stack(rows(q, k, v, lambda o, x, q, z: o / ((q * z).sum(-1, keepdim=True) + 1e-6)), dim=1)


def normalised_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Performer's: sums of keys and states within chunks, an einsum that reads and divides, rows of two tokens."""
    q, k = q.exp(), k.exp()
    state, total = q.new_zeros(BATCH, 1, HEADS, SIZE, VALUES), q.new_zeros(BATCH, 1, HEADS, SIZE)
    found: list[Tensor] = []
    for q_i, k_i, v_i in zip(q.split(2, 1), k.split(2, 1), v.split(2, 1), strict=True):
        totals = total + k_i.cumsum(1)
        states = state + torch.einsum("bthk,bthv->bthkv", k_i, v_i).cumsum(1)
        inverse = 1 / torch.einsum("bthk,bthk->bth", q_i, totals + 1e-6)
        found.append(torch.einsum("bthkv,bthk,bth->bthv", states, q_i, inverse))
        state, total = states[:, -1:], totals[:, -1:]
    return torch.cat(found, 1)


def one_chunk_apart(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Rows of two tokens, the second of which are not divided."""
    q, k = q.exp(), k.exp()
    state = q.new_zeros(BATCH, 1, HEADS, SIZE, VALUES)
    found: list[Tensor] = []
    for i, (q_i, k_i, v_i) in enumerate(zip(q.split(2, 1), k.split(2, 1), v.split(2, 1), strict=True)):
        states = state + torch.einsum("bthk,bthv->bthkv", k_i, v_i).cumsum(1)
        inverse = 1 / (q_i * k_i).sum(-1) if i == 0 else (q_i * k_i).sum(-1)
        found.append(torch.einsum("bthkv,bthk,bth->bthv", states, q_i, inverse))
        state = states[:, -1:]
    return torch.cat(found, 1)


def one_row_apart(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """What is done to one row is not done to the others."""
    found = rows(q, k, v, lambda o, x, q, z: torch.tanh(o))
    return torch.stack([*found[:-1], torch.sigmoid(found[-1])], dim=1)


def overwritten_after(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Values change after each row is made: read after the loop, they would be others."""
    v = v.clone()
    skip: list[Tensor] = []
    for t, o in enumerate(rows(q, k, v, lambda o, x, q, z: o)):
        skip.append(torch.tanh(o) + v[:, 0])
        v[:, 0] = v[:, t] + 1
    return torch.stack(skip, dim=1)


def twice(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two results of the same rows, and one row by itself."""
    found = rows(q, k, v, lambda o, x, q, z: torch.tanh(o))
    return torch.stack(found), torch.stack(found), found[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [gated_skip, normed_and_projected, normalised, normalised_chunks])
def test_rows_are_worked_on_after_the_loop(fn: Callable[..., Tensor], grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for layers within a group: it takes long, and there are none."""
    monkeypatch.setattr(spec, "inner_groups", lambda graph, group: iter(()))  # type: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("fn", [one_row_apart, one_chunk_apart, overwritten_after, twice])
def test_what_differs_between_rows_stays(fn: Callable[..., Tensor]) -> None:
    ours, expected, _ = explained(fn)
    assert worst_error(ours, expected) <= 1e-5


@pytest.mark.usefixtures("shallow")
def test_a_wrong_sink_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its proof sees it: a projection of the rows that forgets the last dimension's order."""
    right = rules.moves

    def wrong(op: Op, front: int) -> object:
        found = right(op, front) or []
        return [("transpose", (-1, -2)), *found] if found[:1] == [("flatten", (2, 3))] else found

    monkeypatch.setattr(rules, "moves", wrong)
    ours, expected, report = explained(normed_and_projected)
    assert worst_error(ours, expected) <= 1e-5
    assert not report.matches
