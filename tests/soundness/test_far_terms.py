"""What is far away is as visible as what is near: windows, forgotten carries, final states without their beginning.

Ordinary gates hide anything 80 tokens back below every tolerance; gates near zero, which models have, do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.soundness.programs import matched, refused, tokens

Args = tuple[Tensor, Tensor, Tensor, Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gated attention in closed form over the pairs of (query, key) positions that are ``seen``."""
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    i = torch.arange(q.shape[2])
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~seen(i[:, None], i), -math.inf)
    return ((q @ k.mT * q.shape[-1] ** -0.5 * gap.exp()) @ v).transpose(1, 2)


SEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "window": lambda i, j: (i >= j) & (i - j < 96),
    "distance left out": lambda i, j: (i >= j) & (i - j != 150),
    "first token left out late": lambda i, j: (i >= j) & ~((j == 0) & (i > 128)),
    "every other far token": lambda i, j: (i >= j) & ((i - j < 100) | (j % 2 == 0)),
    "one pair left out": lambda i, j: (i >= j) & ~((i == 190) & (j == 7)),
    "blocks two back": lambda i, j: (i >= j) & (i // 64 - j // 64 < 3),
}


@pytest.mark.parametrize("name", SEEN)
def test_closed_form_that_does_not_see_all(name: str) -> None:
    given = tokens(200, gate=-0.002)
    report = refused(
        lambda q, k, v, g: attention(q, k, v, g, SEEN[name]), tuple(given[x] for x in ("q", "k", "v", "g"))
    )
    assert "field" in {rejection.code for rejection in report.rejections}


def test_closed_form_that_sees_all() -> None:
    given = tokens(200, gate=-0.002)
    inputs = tuple(given[x] for x in ("q", "k", "v", "g"))
    matched(lambda q, k, v, g: attention(q, k, v, g, lambda i, j: i >= j), inputs, "simple_gla")


def chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, size: int, carry: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gated linear attention chunk by chunk; ``carry`` is what becomes of the state before chunk n."""
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    out: list[Tensor] = []
    for n, start in enumerate(range(0, q.shape[2], size)):
        here = slice(start, start + size)
        a, b, c, total = q[:, :, here], k[:, :, here], v[:, :, here], g[:, :, here].cumsum(-1)
        state = carry(n, state)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        out.append((a * total.exp()[..., None]) @ state + (a @ b.mT * decay) @ c)
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1, None, None].exp() + (b * left).mT @ c
    return torch.cat(out, 2).transpose(1, 2), state


CARRIES: dict[str, Callable[[int, Tensor], Tensor]] = {
    "forgotten once": lambda n, s: torch.zeros_like(s) if n == 1 else s,
    "forgotten later": lambda n, s: s * 0.0 if n == 2 else s,
    "halved": lambda n, s: s * 0.5 if n == 2 else s,
    "head 0 forgotten": lambda n, s: torch.cat([s[:, :1] * 0, s[:, 1:]], 1) if n == 2 else s,
    "one column forgotten": lambda n, s: torch.cat([s[..., :1] * 0, s[..., 1:]], -1) if n == 2 else s,
    "one part in a million": lambda n, s: s * (1 + 1e-6) if n == 2 else s,
}


@pytest.mark.parametrize("name", CARRIES)
def test_carries_that_are_not_carried(name: str) -> None:
    given = tokens(192, gate=-0.4)
    inputs = tuple(given[x] for x in ("q", "k", "v", "g", "state"))
    refused(lambda q, k, v, g, s: chunks(q, k, v, g, s, 64, CARRIES[name]), inputs, whole=False)


def test_a_carry_that_is() -> None:
    given = tokens(192, gate=-0.4)
    inputs = tuple(given[x] for x in ("q", "k", "v", "g", "state"))
    matched(lambda q, k, v, g, s: chunks(q, k, v, g, s, 64, lambda n, carried: carried), inputs, "simple_gla")


def final(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, keep: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    o, _ = chunks(q, k, v, g, state, q.shape[1], lambda n, carried: carried)
    return o, keep(k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1), state)


FINALS: dict[str, Callable[..., Tensor]] = {
    "without the given state": lambda k, v, total, s: (k * (total[..., -1:] - total).exp()[..., None]).mT @ v,
    "without the first token": lambda k, v, total, s: (
        s * total[..., -1, None, None].exp()
        + (k * (total[..., -1:] - total).exp()[..., None])[:, :, 1:].mT @ v[:, :, 1:]
    ),
    "given state not decayed": lambda k, v, total, s: s * 0 + (k * (total[..., -1:] - total).exp()[..., None]).mT @ v,
    "the last 100 tokens": lambda k, v, total, s: (
        s * total[..., -1, None, None].exp()
        + (k * (total[..., -1:] - total).exp()[..., None])[:, :, -100:].mT @ v[:, :, -100:]
    ),
    "decayed once too often": lambda k, v, total, s: (
        s * (2 * total[..., -1, None, None]).exp() + (k * (total[..., -1:] - total).exp()[..., None]).mT @ v
    ),
    "without token 20": lambda k, v, total, s: (
        s * total[..., -1, None, None].exp()
        + (k * (total[..., -1:] - total).exp()[..., None]).mT @ (v * (torch.arange(v.shape[2]) != 20)[:, None])
    ),
}


@pytest.mark.parametrize("name", FINALS)
def test_final_states_without_their_beginning(name: str) -> None:
    given = tokens(192, gate=-0.4)
    inputs = tuple(given[x] for x in ("q", "k", "v", "g", "state"))

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return final(q, k, v, g, s, FINALS[name])

    refused(program, inputs, whole=False)  # the output is the recurrence's
