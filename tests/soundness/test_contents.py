"""What integers hold is read when the graph runs: bounds of packed sequences, segments, positions, choices of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compare import worst_error
from tests.soundness.programs import BOUND, tokens
from tests.soundness.test_rows import attention

T = 24
BOUNDS = ([0, 24], [0, 7, 24], [0, 1, 23, 24], [0, 8, 16, 24], [0, 0, 12, 24], [3, 9, 20])
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
Program = Callable[..., Tensor]


def segments(bounds: Tensor) -> Tensor:
    """The sequence that each token belongs to."""
    return (torch.arange(T)[:, None] >= bounds).sum(-1)


def among(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seen: Tensor) -> Tensor:
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf)
    return ((q @ k.mT * gap.exp()) @ v).transpose(1, 2)


def same(bounds: Tensor) -> Tensor:
    of = segments(bounds)
    return (of[:, None] == of) & CAUSAL


def emptied(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bounds: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs: list[Tensor] = []
    begins = (torch.arange(T)[:, None] == bounds).any(-1)
    for t in range(T):
        state = (
            torch.where(begins[t], 0.0, state) * g[:, t, :, None, None].exp() + k[:, t, ..., None] * v[:, t, :, None]
        )
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


PROGRAMS: dict[str, Program] = {
    "a mask of segments": lambda q, k, v, g, n: among(q, k, v, g, same(n)),
    "a product with that mask": lambda q, k, v, g, n: among(q, k, v, g, CAUSAL) * same(n).sum(-1)[:, None, None],
    "gates of -inf where one begins": lambda q, k, v, g, n: attention(
        q, k, v, torch.where((torch.arange(T)[:, None] == n).any(-1)[:, None], -60.0, g)
    ),
    "a state that is emptied": emptied,
    "values past the end are zero": lambda q, k, v, g, n: attention(
        q, k, v * (torch.arange(T) < n[-1])[:, None, None], g
    ),
    "keys by position": lambda q, k, v, g, n: attention(q, k * (1.0 + segments(n))[:, None, None], v, g),
    "rows in another order": lambda q, k, v, g, n: attention(
        *(x[:, (torch.arange(T) + n[1]) % T] for x in (q, k, v, g))
    ),
    "an output that is chosen": lambda q, k, v, g, n: attention(q, k, v, g)[:, n.clamp(max=T - 1)],
    "a scale": lambda q, k, v, g, n: attention(q, k, v, g) * n[1],
    "a state that keeps 1e-12": lambda q, k, v, g, n: emptied(q, k, v, g, n) + 1e-12 * attention(q, k, v, g),
    "keys by sequence, repeated": lambda q, k, v, g, n: attention(
        q, k * (1.0 + (n[1] > 5) + (torch.arange(T) >= n[-1]))[:, None, None], v, g
    ),
    "a length that chooses": lambda q, k, v, g, n: attention(q, torch.where(n.diff().max() > 16, k, k.flip(2)), v, g),
    "a carry for some": lambda q, k, v, g, n: among(q, k, v, g, CAUSAL | (segments(n) == 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_content_is_eagers(name: str) -> None:
    """One compiled function, and numbers that it has not been captured with."""
    torch._dynamo.reset()
    program = PROGRAMS[name]
    run = torch.compile(program, backend="kda", options={"kda.inner": "eager", "kda.lift": False})
    found = tokens(T, gate=-0.05)
    inputs = [found[x] for x in ("q", "k", "v", "g")]
    for bounds in BOUNDS:
        given = torch.tensor(bounds)
        assert worst_error(run(*inputs, given), program(*inputs, given)) <= BOUND, bounds
