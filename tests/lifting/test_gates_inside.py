"""Functions whose loop makes gates of a number a token are one graph for every length; look-alikes are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compare import relative_error, worst_error
from tests.lifting.test_lift import arguments, compiled, graphs, lifted_functions

Program = Callable[..., tuple[Tensor, Tensor]]
Gates = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""What is kept of the state and the share that is written, given numbers ``[B, T, H]`` and a token."""


def loop(gates: Gates) -> Program:
    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(v)
        for t in range(q.shape[1]):
            keep, write = (x[..., None, None] for x in gates(b, t))
            state = keep * state + write * torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
        return out, state

    return run


def tied_keys(q: Tensor, k: Tensor, v: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """HGRN2: what a channel forgets is what it writes."""
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        forget = torch.sigmoid(k[:, t])
        state = forget[..., None] * state + (1 - forget)[..., None] * v[:, t, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1), state


def by_delta(q: Tensor, k: Tensor, v: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        keep = b[:, t].sigmoid()
        state = state * keep[..., None, None]
        write = 2 * (1 - keep)[..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, 1), state


LIFTED: dict[str, Program] = {
    "shares": loop(lambda b, t: (b[:, t], 1 - b[:, t])),
    "shares of an activation": loop(lambda b, t: (b[:, t].sigmoid(), 1 - b[:, t].sigmoid())),
    "another activation": loop(lambda b, t: (b[:, t].sigmoid(), (2 * b[:, t]).tanh())),
    "tied keys": tied_keys,
    "by delta": by_delta,
}


def given(length: int, batch: int = 2) -> list[Tensor]:
    q, k, v, g = arguments(length, batch)
    rng = torch.Generator().manual_seed(length)
    state = torch.randn(batch, *q.shape[2:], v.shape[3], generator=rng)
    return [q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(*g.shape[:3], generator=rng), state]


@pytest.mark.parametrize("name", LIFTED)
def test_one_graph_for_every_length(name: str) -> None:
    fn = LIFTED[name]
    run = compiled(fn)
    with torch.no_grad():
        for length in (40, 2, 23, 70):
            args = given(length)
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
    assert graphs() == 1
    assert lifted_functions() == {fn.__qualname__}


@pytest.mark.parametrize("name", LIFTED)
def test_gradients(name: str) -> None:
    fn = LIFTED[name]
    equal(compiled(fn), fn)
    assert lifted_functions() == {fn.__qualname__}


def equal(run: Program, fn: Program, length: int = 40) -> None:
    """Results and gradients, and which of these are nothing."""
    args = [x.requires_grad_() for x in given(length)]
    found: list[tuple[Tensor, ...]] = []
    for call in (run, fn):
        out, state = call(*args)
        total = out.sin().sum() + state.square().sum()
        found.append(torch.autograd.grad(total, args, allow_unused=True, materialize_grads=True))
    for have, want in zip(*found, strict=True):
        assert torch.equal(have == 0, want == 0)
        assert relative_error(have, want) < 1e-4


NEAR: dict[str, Gates] = {
    "of the token before": lambda b, t: (b[:, t], 1 - b[:, max(t - 1, 0)].sigmoid()),
    "of another token from some on": lambda b, t: (b[:, t], 1 - b[:, t if t < 12 else t - 2].sigmoid()),
    "another activation from some on": lambda b, t: (b[:, t], b[:, t].sigmoid() if t < 12 else b[:, t].tanh()),
    "of all tokens so far": lambda b, t: (b[:, t], 1 - b[:, : t + 1].mean(1).sigmoid()),
    "of how far it is": lambda b, t: (b[:, t], (b[:, t] / (t + 1)).sigmoid()),
    "cut": lambda b, t: (b[:, t].sigmoid(), 1 - b[:, t].sigmoid().detach()),
    "cut in place": lambda b, t: (b[:, t].sigmoid().detach_(), 1 - b[:, t].sigmoid()),
    "cut from some on": lambda b, t: (b[:, t], 1 - (b[:, t] if t < 12 else b[:, t].detach())),
    "of other requests": lambda b, t: (b[:, t], 1 - b[:, t].flip(0).sigmoid()),
    "of other heads": lambda b, t: (b[:, t], 1 - b[:, t].roll(1, -1).sigmoid()),
    "over all heads": lambda b, t: (b[:, t], b[:, t].softmax(-1)),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name: str) -> None:
    fn = loop(NEAR[name])
    run = compiled(fn)
    with torch.no_grad():
        for length in (12, 20):
            args = given(length)
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
    equal(run, fn, 20)
