"""Caches whose values are picked apart from the keys: ``pool[tokens]`` and ``pool[..., :rank][tokens]``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from tests.compare import copies, worst_error

EAGER: dict[str, Any] = {"kda.inner": "eager"}
HEADS, RANK, ROPE, SLOTS = 3, 16, 8, 40
Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def picked(pool: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return pool[tokens], pool[..., :RANK][tokens]


def cut(pool: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    pages, values = pool.view(-1, 4, RANK + ROPE), pool[..., :RANK].view(-1, 4, RANK)
    return pages[2:6].view(2, 8, RANK + ROPE), values[2:6].reshape(2, 8, RANK)


def of_other_tokens(pool: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return pool[tokens], pool[..., :RANK][tokens + 1]


def one_page_late(pool: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    pages, values = pool.view(-1, 4, RANK + ROPE), pool[..., :RANK].view(-1, 4, RANK)
    return pages[2:6].view(2, 8, RANK + ROPE), values[3:7].reshape(2, 8, RANK)


def attention(read: Read) -> Callable[..., Tensor]:
    def step(q: Tensor, pool: Tensor, tokens: Tensor) -> Tensor:
        keys, values = (x.view(2, 1, 8, -1).expand(-1, HEADS, -1, -1) for x in read(pool, tokens))
        scores = q[:, :, None] @ keys.mT * (RANK + ROPE) ** -0.5
        return scores.softmax(-1) @ values

    return step


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    tokens = torch.randperm(SLOTS - 1)[:16].view(2, 8)
    return [torch.randn(2, HEADS, RANK + ROPE), torch.randn(SLOTS, 1, RANK + ROPE), tokens]


@pytest.mark.parametrize(("read", "found"), [(picked, 1), (cut, 1), (of_other_tokens, 0), (one_page_late, 0)])
def test_numbers_and_gradients(read: Read, found: int) -> None:
    own = [x.requires_grad_(x.is_floating_point()) for x in inputs()]
    theirs = copies(own)
    torch._dynamo.reset()
    report = kdacompile.explain(attention(read), options=EAGER)(*own)
    expected = attention(read)(*theirs)
    assert worst_error(report.result, expected) < 1e-5
    assert [match.pattern for match in report.matches] == ["mla"] * found, str(report)
    cotangent = torch.randn_like(expected)
    pairs = (report.result, own[:2]), (expected, theirs[:2])
    assert worst_error(*(torch.autograd.grad(result, given, cotangent) for result, given in pairs)) < 1e-4
