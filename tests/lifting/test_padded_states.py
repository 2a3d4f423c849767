"""Functions that keep their state where a token is padding are one graph for every length; look-alikes are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.capture import probes
from tests.compare import relative_error, worst_error
from tests.lifting.test_lift import arguments, compiled, graphs, lifted_functions

Program = Callable[..., tuple[Tensor, Tensor]]
Keep = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""The state that a token reads and the one it leaves: of the next, the one before, the first, a mask and a place."""


def by_delta(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = state * g.exp().unsqueeze(-1)
    write = v - torch.einsum("bhk,bhkv->bhv", k, state)
    return state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * write).unsqueeze(-2)


def by_sum(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return state * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)


def loop(keep: Keep, step: Callable[..., Tensor] = by_delta, *, silent: bool = False) -> Program:
    """``silent``: padded tokens have no output either."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, real: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        first, out = state, torch.zeros_like(v)
        for t in range(q.shape[1]):
            after = step(state, k[:, t], v[:, t], g[:, t], beta[:, t])
            read, state = keep(after, state, first, real, t)
            o = (read * q[:, t].unsqueeze(-1)).sum(-2)
            out[:, t] = o * real[:, t, None, None] if silent else o
        return out, state

    return run


def row(real: Tensor, t: int) -> Tensor:
    return real[:, t, None, None, None]


def chosen(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    state = torch.where(row(real, t), new, old)
    return state, state


def weighed(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    state = row(real, t).to(new.dtype) * new + (1 - row(real, t).to(new.dtype)) * old
    return state, state


def read_before(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """A padded token reads what it would have written."""
    return new, torch.where(row(real, t), new, old)


def forgets(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """A padded token leaves half of the state."""
    state = torch.where(row(real, t), new, old * 0.5)
    return state, state


def emptied_first(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """The state is kept but by the first token, which empties it: no near miss where it begins with nothing."""
    state = torch.where(row(real, t), new, 0 * old if t == 0 else old)
    return state, state


def to_the_first(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """What was there in the beginning comes back, and not the state before."""
    state = torch.where(row(real, t), new, first)
    return state, state


def of_another(new: Tensor, old: Tensor, first: Tensor, real: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Beyond twelve tokens the mask is that of another token."""
    state = torch.where(row(real, t if t < 12 else t - 2), new, old)
    return state, state


LIFTED: dict[str, Program] = {
    "KDA": loop(chosen),
    "GLA": loop(chosen, by_sum),
    "KDA, weighed": loop(weighed),
    "GLA, weighed": loop(weighed, by_sum),
    "KDA, silent": loop(chosen, silent=True),
    "GLA, silent": loop(chosen, by_sum, silent=True),
}
NEAR: list[Keep] = [read_before, forgets, emptied_first, to_the_first, of_another]


def given(length: int, batch: int, *, state: bool) -> list[Any]:
    q, k, v, g = arguments(length, batch)
    rng = torch.Generator().manual_seed(length)
    real = torch.rand(batch, length, generator=rng) < 0.7
    beta = torch.rand(*g.shape[:3], generator=rng)
    begins = torch.randn(batch, *q.shape[2:], v.shape[3], generator=rng)
    return [q, torch.nn.functional.normalize(k, dim=-1), v, g, beta, real, *([begins] if state else [])]


@pytest.mark.parametrize(("batch", "state"), [(1, True), (2, False)], ids=["from a state", "from nothing"])
@pytest.mark.parametrize("name", LIFTED)
def test_one_graph_for_every_length(name: str, batch: int, state: bool) -> None:
    fn = LIFTED[name]
    run = compiled(fn)
    with torch.no_grad():
        for length in (40, 2, 23, 70):
            args = given(length, batch, state=state)
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
            args[5] = torch.zeros_like(args[5])  # nothing but padding
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
            args[5][:, : length // 2] = True  # behind the tokens
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
    assert graphs() == 1
    assert lifted_functions() == {fn.__qualname__}


@pytest.mark.parametrize("name", LIFTED)
def test_gradients_and_what_padding_holds(name: str) -> None:
    """NaN in padding reaches no state, as in the function itself."""
    fn = LIFTED[name]
    run = compiled(fn)
    args = given(40, 2, state=True)
    leaves = [x.requires_grad_() for x in args if x.is_floating_point()]
    found: list[tuple[Tensor, ...]] = []
    for call in (run, fn):
        out, state = call(*args)
        seeds = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in (out, state)]
        found.append(torch.autograd.grad((out, state), leaves, seeds, allow_unused=True, materialize_grads=True))
    assert max(map(relative_error, *found)) < 1e-4
    assert lifted_functions() == {fn.__qualname__}
    if "weighed" not in name:
        k, v = args[1].detach().clone(), args[2].detach().clone()
        k[~args[5]] = v[~args[5]] = torch.nan
        with torch.no_grad():
            assert worst_error(run(args[0], k, v, *args[3:]), fn(args[0], k, v, *args[3:])) < 1e-5


@pytest.mark.parametrize(("step", "state"), [(by_delta, True), (by_sum, False)], ids=["delta, from a state", "sum"])
@pytest.mark.parametrize("keep", NEAR)
def test_near_misses(keep: Keep, step: Callable[..., Tensor], state: bool) -> None:
    fn = loop(keep, step)
    run = compiled(fn)
    with torch.no_grad():
        for length in (12, 20):
            args = given(length, 2, state=state)
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
            args[5] = ~args[5]
            assert worst_error(run(*args), fn(*args)) < 1e-5, length


def test_masks_are_drawn_that_leave_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All gates of a sequence of padding are open, and nothing would be compared."""
    drawn: list[str] = []
    usual = probes.weakened

    def weakened(*args: Any) -> dict[int, str]:
        found = usual(*args)
        drawn.append(found.get(5, ""))
        return found

    monkeypatch.setattr("kdacompile.capture.lifting.weakened", weakened)
    with torch.no_grad():
        compiled(loop(chosen))(*given(40, 2, state=False))
    assert drawn == ["set everywhere"]
