"""Rows assigned to a buffer one by one, worked on before they are: the loop's work on them is done after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.recurrence import spec
from tests.backend.test_hoist import explained, read
from tests.backend.test_sink import rows
from tests.compare import worst_error

Fill = Callable[[Tensor, list[Tensor]], None]
"""Writes rows into a buffer [B, T, H, V]."""


def gated(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return rows(q, k, v, lambda o, x, q, z: F.silu(o) + 0.5 * x)


def in_the_loop(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The delta rule with everything in its loop."""
    out = torch.empty_like(v)
    s = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    for t in range(q.shape[1]):
        s = s * torch.exp(-F.softplus(gate[:, t]))[..., None, None]
        fresh = torch.sigmoid(logit[:, t])[..., None] * (v[:, t] - read(s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], fresh)
        out[:, t] = F.silu(read(s, q[:, t])) + v[:, t]
    return out


def normaliser(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = v.new_zeros(v.shape)
    found = rows(F.elu(q) + 1, F.elu(k) + 1, v, lambda o, x, q, z: o / ((q * z).sum(-1, keepdim=True) + 1e-6))
    for t, row in enumerate(found):
        out[:, t, :] = row
    return 2 * out


def into_slices(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v).transpose(1, 2)
    for t, row in enumerate(gated(q, k, v)):
        out[:, :, t : t + 1] = row[:, :, None]
    return out.transpose(1, 2).contiguous()


def backwards(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Written from the last to the first."""
    out = torch.empty_like(v)
    found = gated(q, k, v)
    for t in reversed(range(len(found))):
        out[:, t] = found[t]
    return out


def another_dtype(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.empty(v.shape, dtype=torch.float64)
    for t, row in enumerate(gated(q, k, v)):
        out[:, t] = row
    return out


RECOGNISED = [
    (in_the_loop, "gated_delta_rule"),
    (normaliser, "linear_attention"),
    (backwards, "linear_attention"),
    (another_dtype, "linear_attention"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("fn", "pattern"), RECOGNISED)
def test_rows_are_gathered(fn: Callable[..., Tensor], pattern: str, grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == [pattern], str(report)


def one_row_left_out(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    for t, row in enumerate(gated(q, k, v)[:-1]):
        out[:, t] = row
    return out


def one_row_twice(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    found = gated(q, k, v)
    for t in (*range(len(found)), 1):
        out[:, t] = found[t] if t != 1 else -found[t]
    return out


def read_meanwhile(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """A sum of what is there so far: the buffer starts at one."""
    out, total = torch.ones_like(v), torch.zeros_like(v)
    for t, row in enumerate(gated(q, k, v)):
        out[:, t] = row
        total = total + out
    return total


def seen_through_a_view(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    flat = out.view(-1)
    found = gated(q, k, v)
    for t, row in enumerate(found):
        out[:, t] = row * (1 + flat[0])
    return out


def rows_change_afterwards(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    for t, row in enumerate(gated(q, k, v)):
        out[:, t] = row
        row.add_(1.0)
    return out


def broadcast(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    out = torch.zeros_like(v)
    for t, row in enumerate(gated(q, k, v)):
        out[:, t] = row[:, :, :1]
    return out


def not_a_recurrence(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Nothing is recognised, and the assignments are put back."""
    out = torch.zeros_like(v)
    s = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    for t in range(q.shape[1]):
        s = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]) - s * s
        out[:, t] = F.silu(read(s, q[:, t])) + v[:, t]
    return out


@pytest.mark.parametrize(
    "fn",
    [
        into_slices, one_row_left_out, one_row_twice, read_meanwhile, seen_through_a_view, rows_change_afterwards,
        broadcast, not_a_recurrence,
    ],
)  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_what_differs_is_left_alone(fn: Callable[..., Tensor], grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "inner_groups", lambda graph, group: iter(()))  # type: ignore[reportUnknownLambdaType]
    ours, expected, _ = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
