"""Sequences of a packed batch whose rows one list, or one buffer, gathers; loops over some of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kdacompile
from tests.backend.test_hoist import BATCH, HEADS, SIZE, VALUES, explained, read
from tests.compare import worst_error

STARTS = (0, 2)


def empty() -> Tensor:
    return torch.zeros(BATCH, HEADS, SIZE, VALUES)


def one_list(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for start in STARTS:
        s = empty()
        for t in range(start, start + 2):
            s = s * gate[:, t].exp()[..., None, None] + k[:, t, ..., None] * v[:, t, :, None]
            rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def emptied_where_a_sequence_begins(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out, s = torch.zeros_like(v), empty()
    for t, (q_t, k_t, v_t, b_t) in enumerate(zip(*(x.unbind(1) for x in (q, k, v, logit)), strict=True)):
        s = empty() if t in STARTS else s
        fresh = b_t[..., None] * (v_t - read(s, k_t))
        s = s + k_t[..., None] * fresh[..., None, :]
        out[:, t] = read(s, q_t)
    return out


def each_token_is_taken_anew(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Three nodes are one token of k: each of them becomes a tensor of its sequence."""
    rows: list[Tensor] = []
    s = empty()
    for t in range(q.shape[1]):
        s = empty() if t in STARTS else s
        old = read(s, k[:, t])
        s = s - k[:, t, ..., None] * (logit[:, t, :, None] * old)[..., None, :]
        s = s + k[:, t][..., None] * (logit[:, t, :, None] * v[:, t])[..., None, :]
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


PACKED = [
    (one_list, "simple_gla"),
    (emptied_where_a_sequence_begins, "delta_rule"),
    (each_token_is_taken_anew, "delta_rule"),
]


@pytest.mark.parametrize(("fn", "pattern"), PACKED)
@pytest.mark.parametrize("grad", [False, True])
def test_each_sequence_is_recognised(fn: Callable[..., Tensor], pattern: str, grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == [pattern] * 2, str(report)


def decayed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, tokens: range) -> Tensor:
    rows: list[Tensor] = []
    s = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for t in tokens:
        s = s * gate[:, t].exp()[..., None, None] + k[:, t, ..., None] * v[:, t, :, None]
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("tokens", [range(4), range(3, 9), range(6, 12)], ids=["first", "between", "last"])
@pytest.mark.parametrize("size", [8, 16])
def test_a_loop_over_some_of_the_tokens(tokens: range, size: int) -> None:
    q, k, v = (torch.randn(2, 12, 3, width) for width in (size, size, 12))
    gate = -torch.rand(2, 12, 3)
    report = kdacompile.explain(decayed, options={"kda.lift": False})(q, k, v, gate, tokens)
    assert [match.pattern for match in report.matches] == ["simple_gla"], str(report)
    assert worst_error(report.result, decayed(q, k, v, gate, tokens)) <= 1e-5


def test_a_loop_over_every_second_token_is_computed_as_it_was() -> None:
    q, k, v = (torch.randn(2, 12, 3, width) for width in (8, 8, 12))
    gate = -torch.rand(2, 12, 3)
    report = kdacompile.explain(decayed, options={"kda.lift": False})(q, k, v, gate, range(0, 12, 2))
    assert worst_error(report.result, decayed(q, k, v, gate, range(0, 12, 2))) <= 1e-5


def one_row_read_without_gradients(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """A share of v that was made there would pass no gradient on to any row."""
    with torch.no_grad():
        first = v[:, 0].square()
    return torch.cat([one_list(q, k, v, gate, logit), first[:, None]], 1)


def test_a_mode_that_changes_is_left_alone() -> None:
    ours, expected, _ = explained(one_row_read_without_gradients, grad=True)
    assert worst_error(ours, expected) <= 1e-5


def not_quite_emptied(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """One entry of the state is kept."""
    rows: list[Tensor] = []
    s = empty()
    for t in range(q.shape[1]):
        if t in STARTS:
            s = torch.cat([s[..., :1, :], torch.zeros_like(s[..., 1:, :])], -2)
        s = s * gate[:, t].exp()[..., None, None] + k[:, t, ..., None] * v[:, t, :, None]
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, 1)


def tokens_on_their_own(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return torch.stack([read(k[:, t, ..., None] * v[:, t, :, None], q[:, t].tanh()) for t in range(q.shape[1])], 1)


def overwritten_once_it_is_assigned(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out, s = torch.zeros_like(v), empty()
    for t in range(q.shape[1]):
        s = empty() if t in STARTS else s
        s = s + k[:, t, ..., None] * v[:, t, :, None]
        row = read(s, q[:, t])
        out[:, t] = row
        if t == 1:
            row.mul_(3)
    return out


@pytest.mark.parametrize("fn", [not_quite_emptied, overwritten_once_it_is_assigned, tokens_on_their_own])
def test_what_is_no_packed_batch_stays(fn: Callable[..., Tensor]) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) <= 1e-5
    assert not [match for match in report.matches if match.mode == "sequence"], str(report)
