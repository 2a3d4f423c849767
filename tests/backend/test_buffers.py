"""Buffers that are views when they are made are filled like any other; what has two names keeps what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from tests.compare import relative_error, worst_error

B, T, H, K, V = 2, 9, 3, 4, 5

Make = Callable[[Tensor], Tensor]
Program = Callable[..., Any]


def flat(v: Tensor) -> Tensor:
    return torch.zeros(*v.shape[:2], v.shape[2] * v.shape[3], dtype=v.dtype)


def heads_first(v: Tensor) -> Tensor:
    return torch.empty(v.shape[0], v.shape[2], v.shape[1], v.shape[3], dtype=v.dtype)


MADE: dict[str, Make] = {
    "viewed": lambda v: flat(v).view(v.shape),
    "reshaped": lambda v: flat(v).reshape(v.shape),
    "taken apart": lambda v: flat(v).unflatten(-1, v.shape[2:]),
    "detached": lambda v: torch.zeros_like(v).detach(),
    "like itself": lambda v: torch.zeros_like(v).view_as(v),
    "turned": lambda v: heads_first(v).transpose(1, 2),
    "permuted": lambda v: heads_first(v).permute(0, 2, 1, 3),
    "viewed twice": lambda v: flat(v).view(*v.shape[:2], -1, 1).view(v.shape),
    "viewed and detached": lambda v: flat(v).view(v.shape).detach(),
}
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda o: o,
    "flat": lambda o: o.flatten(2),
    "and a number": lambda o: o + 1,
}


def filled(make: Make, read: Callable[[Tensor], Tensor] = lambda o: o, row: Make = lambda o: o) -> Program:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = make(v)
        for t in range(v.shape[1]):
            state = step(k, v, g, state, t)
            out[:, t] = row(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return read(out), state

    return run


def step(k: Tensor, v: Tensor, g: Tensor, state: Tensor, t: int) -> Tensor:
    return g[:, t].exp()[..., None, None] * state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])


def given() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    sizes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, H, K, V)]
    q, k, v, g, state = (torch.randn(size, generator=rng) for size in sizes)
    return [x.requires_grad_() for x in (q, k, v, -g.abs(), state)]


def compared(fn: Program, *, grad: bool = True) -> list[str]:
    """Results, strides and gradients are eager's; the patterns that were matched."""
    args = given() if grad else [x.detach() for x in given()]
    torch._dynamo.reset()
    report = explain(fn, options={"kda.lift": False})(*args)
    results = report.result, fn(*args)
    assert worst_error(*results) <= 1e-5, str(report)
    assert [x.stride() for x in results[0]] == [x.stride() for x in results[1]], str(report)
    if grad:
        losses = [sum((x.sin().sum() for x in each if x.requires_grad), torch.zeros(())) for each in results]
        have, want = (torch.autograd.grad(loss, args, allow_unused=True, materialize_grads=True) for loss in losses)
        for one, other in zip(have, want, strict=True):
            assert torch.equal(one == 0, other == 0), str(report)
            assert relative_error(one, other) <= 1e-4, str(report)
    return [match.pattern for match in report.matches if match.mode == "sequence"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_buffers(name: str, grad: bool) -> None:
    assert compared(filled(MADE[name]), grad=grad) == ["simple_gla"]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("name", ["viewed", "turned"])
def test_what_is_read_of_them(name: str, read: str) -> None:
    assert compared(filled(MADE[name], READ[read])) == ["simple_gla"]


@pytest.mark.parametrize("name", MADE)
def test_rows_that_are_worked_on(name: str) -> None:
    compared(filled(MADE[name], row=torch.tanh))
    compared(filled(MADE[name], row=lambda o: (o * o.sigmoid()).detach()))


def both_names(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    base = flat(v)
    out = base.view(v.shape)
    for t in range(v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out + 1, base * 2, state


def written_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    base = flat(v)
    base[:, 3] = 5.0
    out = base.view(v.shape)
    for t in range(0, v.shape[1], 2):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out + 0, state


def written_between(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    base = flat(v)
    out = base.view(v.shape)
    for t in range(v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
        base[:, t] *= 2
    return out + 0, state


def two_views(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    base = flat(v)
    out, other = base.view(v.shape), base.view(v.shape).detach()
    for t in range(v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out + 1, other * 2, state


def a_part(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    out = torch.ones(v.shape[0], v.shape[1] + 2, *v.shape[2:])[:, 1:-1]
    for t in range(v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out + 0, state


def some_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    out = torch.ones(v.shape[0], v.shape[1], v.shape[2] * v.shape[3]).view(v.shape)
    for t in range(1, v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return out + 0, state


def its_own_view(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    out = flat(v).view(v.shape)
    turned = out.transpose(1, 2)
    for t in range(v.shape[1]):
        state = step(k, v, g, state, t)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
    return turned + 0, state


def a_state_of_views(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, ...]:
    kept = torch.zeros(v.shape[0], v.shape[2] * K * V).view(v.shape[0], v.shape[2], K, V)
    out: list[Tensor] = []
    for t in range(v.shape[1]):
        kept.mul_(g[:, t].exp()[..., None, None]).add_(torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]))
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], kept))
    return torch.stack(out, 1), kept + 0


NEAR: list[Program] = [both_names, written_before, two_views, a_part, some_rows, its_own_view]


@pytest.mark.parametrize("fn", NEAR)
@pytest.mark.parametrize("grad", [False, True])
def test_near_misses_equal_eager(fn: Program, grad: bool) -> None:
    compared(fn, grad=grad)


@pytest.mark.parametrize("fn", [written_between, a_state_of_views])
def test_what_is_written_again_equals_eager(fn: Program) -> None:
    """There is no gradient of it in eager mode."""
    compared(fn, grad=False)
