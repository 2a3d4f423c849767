"""Functions that empty their state, or weigh it by a further number, are one graph for every length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.capture.calls import Call, describe
from kdacompile.capture.probes import make
from tests.compare import relative_error, worst_error
from tests.lifting.conftest import fresh
from tests.lifting.test_lift import arguments, compiled, graphs, lifted_functions

__all__ = ["fresh"]

LENGTHS = (40, 23, 70)


def emptied(q: Tensor, k: Tensor, v: Tensor, g: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        if starts is not None:
            state = state * (~starts[:, t]).to(state.dtype).view(-1, 1, 1, 1)
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out[:, t] = (state * q[:, t].unsqueeze(-1)).sum(-2)
    return out, state


def selected(q: Tensor, k: Tensor, v: Tensor, g: Tensor, starts: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = torch.where(starts[:, t, None, None, None], 0, state * g[:, t].exp().unsqueeze(-1))
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def weighed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, kept: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) * kept[:, t, None, None, None]
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def further(fn: Callable[..., Any], length: int, batch: int) -> Tensor:
    return torch.rand(batch, length) if fn is weighed else torch.rand(batch, length) < 0.2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fn", [emptied, selected, weighed])
def test_one_graph_for_every_length(fn: Callable[..., Any], batch: int, autocast: bool) -> None:
    run = compiled(fn)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        for length in LENGTHS:
            args = [*arguments(length, batch), further(fn, length, batch)]
            assert worst_error(run(*args), fn(*args)) < 1e-5
    assert graphs() == 1
    assert lifted_functions() == {fn.__qualname__}


@pytest.mark.parametrize("fn", [emptied, selected, weighed])
def test_gradients(fn: Callable[..., Any]) -> None:
    run = compiled(fn)
    args = [x.requires_grad_() for x in arguments(40, 2)]
    given = [*args, further(fn, 40, 2)]
    found: list[tuple[Tensor, ...]] = []
    for out in (run(*given), fn(*given)):
        o = out[0] if isinstance(out, tuple) else out
        found.append(torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum(), args))
    assert max(map(relative_error, *found)) < 1e-4
    assert lifted_functions() == {fn.__qualname__}


def test_masks_are_drawn_that_leave_long_stretches() -> None:
    """A window shows only where nothing is emptied for longer than it."""
    tensors = [*arguments(300, 2)[:3], further(emptied, 300, 2)]
    call = Call(tuple((str(place), describe(tensor)) for place, tensor in enumerate(tensors)))
    for role, rare in (("set nowhere", True), ("set everywhere", False)):
        mask = make(call, {3: role}, {"T": 300}, seed=1)[3] == rare
        assert mask[0].nonzero().tolist() == [[0]]
        assert 0 < mask.sum() < 10
