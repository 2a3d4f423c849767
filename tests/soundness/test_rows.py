"""Batch rows and heads that are not alike, and sums over them, are seen whatever a check cuts down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.patterns.recurrence import first_tokens
from kdacompile.patterns.recurrence.spec import RECURRENCE
from tests.soundness.programs import matched, refused, tokens

B, H, T = 4, 6, 20
ROW = torch.arange(B)[:, None, None, None]
HEAD = torch.arange(H)[:, None]


def attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, bend: Callable[[Tensor], Tensor] = lambda weights: weights
) -> Tensor:
    """``bend`` gets the weights as ``[B, T, T, H]``."""
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    gap = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    weights = bend((q @ k.mT * gap).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return (weights @ v).transpose(1, 2)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
ODD: dict[str, Callable[..., Tensor]] = {
    "one head reads twice": lambda q, k, v, g: attention(q * torch.where(HEAD == 5, 2.0, 1.0), k, v, g),
    "one batch row reads twice": lambda q, k, v, g: attention(q * torch.where(ROW == 3, 2.0, 1.0), k, v, g),
    "one head has no gate": lambda q, k, v, g: attention(q, k, v, g * (torch.arange(H) != 4)),
    "one head has another's keys": lambda q, k, v, g: attention(q, torch.cat([k[:, :, :5], k[:, :, :1]], 2), v, g),
    "one row has another's values": lambda q, k, v, g: attention(q, k, torch.cat([v[:3], v[:1]]), g),
    "the mean of heads is taken off": lambda q, k, v, g: attention(q, k, v - v.mean(2, keepdim=True), g),
    "heads are summed in the scores": lambda q, k, v, g: attention(q, k.sum(2, keepdim=True).expand_as(k), v, g),
    "batch rows are summed": lambda q, k, v, g: attention(q, k, v + 1e-9 * v.sum(0, keepdim=True), g),
    "heads are rolled": lambda q, k, v, g: attention(q, k.roll(1, 2), v, g).roll(1, 2),
    "heads are turned round": lambda q, k, v, g: attention(q.flip(2), k, v, g),
}


def given() -> Inputs:
    found = tokens(T, B, H)
    return found["q"], found["k"], found["v"], found["g"]


@pytest.mark.parametrize("name", ODD)
def test_rows_that_are_not_alike(name: str) -> None:
    refused(ODD[name], given(), whole=False)


MORE: dict[str, Callable[..., Tensor]] = {
    "the largest head's values": lambda q, k, v, g: attention(q, k, v * (1 + 1e-9 * v.prod(2, keepdim=True)), g),
    "the sum of rows, as a product": lambda q, k, v, g: attention(
        q, k, (torch.ones(B, B) @ v.flatten(1)).view(v.shape) * 1e-6 + v, g
    ),
    "heads summed as they go": lambda q, k, v, g: attention(q, k, v.cumsum(2), g),
    "rows summed as they go": lambda q, k, v, g: attention(q, k, v, g.cumsum(0)),
    "heads and channels in one": lambda q, k, v, g: attention(q, k, v.flatten(2).roll(1, -1).view(v.shape), g),
    "rows and tokens in one": lambda q, k, v, g: attention(q, k.flatten(0, 1).roll(1, 0).view(k.shape), v, g),
    "heads and tokens changed round": lambda q, k, v, g: attention(
        q, k, v.transpose(1, 2).reshape(B, T, H, -1), g
    ),
    "a triangle of keys and heads": lambda q, k, v, g: attention(q, k, v, g, bend=lambda w: w.tril(3)),
    "a triangle of heads and rows": lambda q, k, v, g: attention(
        q, k, v, g, bend=lambda w: w.permute(1, 2, 0, 3).triu(-2).permute(2, 0, 1, 3)
    ),
    "one entry of one head": lambda q, k, v, g: attention(
        q, k, v, g * (1 + 1e-6 * (torch.arange(T * H) == 77).view(T, H))
    ),
}  # fmt: skip


@pytest.fixture
def cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a region is too large to be run with all its rows and heads."""
    monkeypatch.setattr(first_tokens, "AFFORDABLE", 0)
    monkeypatch.setattr(RECURRENCE.verdicts, "known", {})


@pytest.mark.usefixtures("cut_down")
@pytest.mark.parametrize("name", [*ODD, *MORE])
def test_rows_that_are_not_alike_where_few_are_run(name: str) -> None:
    refused({**ODD, **MORE}[name], given(), whole=False)


@pytest.mark.usefixtures("cut_down")
def test_rows_that_are_alike_where_few_are_run() -> None:
    matched(attention, given(), "simple_gla")


def test_rows_that_are() -> None:
    matched(attention, given(), "simple_gla")


STATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "erases with unit keys": lambda s, k: s - k @ (k.mT @ s) / (k.mT @ k),
    "erases twice": lambda s, k: s - 2.0 * k @ (k.mT @ s),
    "erases with the square": lambda s, k: s - (k * k) @ (k.mT @ s),
    "erases the square's share": lambda s, k: s - k @ (k.mT @ s) * (k.mT @ k),
    "erases by the norm": lambda s, k: s - k @ (k.mT @ s) * (2.0 - k.mT @ k),
    "erases a little more": lambda s, k: s - (1 + 1e-11) * k @ (k.mT @ s),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_on_keys_of_any_length(name: str) -> None:
    """With unit keys these are, or nearly are, the delta rule; with others they are not."""

    def program(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for t in range(q.shape[1]):
            key = k[:, t, :, :, None]
            s = STATES[name](s, key) + key @ v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ s)[:, :, 0])
        return torch.stack(outputs, 1), s

    found = tokens(8)
    refused(program, (found["q"], found["k"] * 1.3, found["v"], found["state"]), whole=False)
