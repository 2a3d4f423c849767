"""What a lifted function may not depend on: it is left to Dynamo then, and right at every length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.compare import relative_error
from tests.lifting.conftest import fresh
from tests.lifting.test_soundness import compiled, lifted, operands
from tests.soundness import lifted_functions as attacks

__all__ = ["fresh"]

Function = Callable[..., Any]

LENGTHS = (24, 400)


def check(fn: Function, *calls: list[Tensor]) -> None:
    """Right at every call, on one compiled function; those after the first only if it was lifted, which makes them one
    graph: elsewhere they are other graphs, and long ones.
    """
    run = compiled(fn)
    with torch.no_grad():
        for arguments in calls:
            assert relative_error(run(*arguments), fn(*arguments)) < 1e-5
            if not lifted() - {"retention"}:
                break


def lengths(fn: Function) -> None:
    check(fn, *(operands(length) for length in LENGTHS))


@pytest.mark.parametrize("name", attacks.SIZES)
def test_numbers_made_of_a_length(name: str) -> None:
    fn = attacks.scaled(attacks.SIZES[name])
    lengths(fn)
    assert "scaled.<locals>.fn" not in lifted()


@pytest.mark.parametrize("name", attacks.INDICES)
def test_loop_indices(name: str) -> None:
    lengths(attacks.INDICES[name])


@pytest.mark.parametrize("name", attacks.MASKS)
def test_masks_made_of_positions(name: str) -> None:
    lengths(attacks.MASKS[name])


@pytest.mark.parametrize("name", attacks.FAINT)
def test_small_terms_behind_a_size(name: str) -> None:
    """What is added at some sizes alone, too small for results of ordinary numbers to show."""
    fn = attacks.FAINT[name]
    run, calls = compiled(fn), [(3, 9), (3, 40), (6, 9)]
    with torch.no_grad():
        for batch, length in calls:
            q, k, v = (torch.cat([x] * batch) for x in operands(length))
            scale = (1e-5, 1e-5, 1.0) if "scores" in name else (1.0, 1.0, 1e-9)
            given = [x * size for x, size in zip((q, k, v), scale, strict=True)]
            assert relative_error(run(*given), fn(*given)) < 1e-5
    assert not lifted() - {"retention"}


@pytest.mark.parametrize("name", attacks.OBJECTS)
def test_objects(name: str) -> None:
    q, k, v = operands(24)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    part = [torch.cat([x, x], 1)[:, 24:] for x in (q, k, v)]
    long = operands(400)
    fn = attacks.OBJECTS[name]
    check(fn, [q, k, v], turned, part, [q, q, v], long)


def test_an_attribute_of_a_function() -> None:
    fn: Any = attacks.reads_an_attribute
    run, arguments = compiled(fn), operands(24)
    with torch.no_grad():
        assert relative_error(run(*arguments), fn(*arguments)) < 1e-5
        fn.rate = 0.25
        try:
            assert relative_error(run(*arguments), fn(*arguments)) < 1e-5
        finally:
            fn.rate = 0.5
    assert fn.__name__ not in lifted()


@pytest.mark.parametrize("name", attacks.GRADIENTS)
def test_gradients_that_are_cut(name: str) -> None:
    fn = attacks.GRADIENTS[name]
    run = torch.compile(lambda *args: fn(*args), backend="kda", options={"kda.inner": "aot_eager"})
    ours, plain = operands(24), operands(24)
    results: list[tuple[Tensor, ...]] = []
    for call, arguments in ((run, ours), (fn, plain)):
        leaves = [x.requires_grad_() for x in arguments]
        results.append(torch.autograd.grad(call(*leaves)[:, -2:].square().sum(), leaves))
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(*results, strict=True))
    assert not lifted()


def six_levels(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention by a scan that doubles its reach at every level: a window of 64 tokens."""
    decay, state, reach = g.exp()[..., None, None], k[..., None] * v[..., None, :], 1
    for _ in range(6):
        before = F.pad(state, (0, 0, 0, 0, 0, 0, reach, 0))[:, :-reach]
        state = state + decay * before
        decay = decay * F.pad(decay, (0, 0, 0, 0, 0, 0, reach, 0), value=1.0)[:, :-reach]
        reach *= 2
    return (q[..., None, :] @ state)[..., 0, :]


def of_elu(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The same with gates that the op does not make."""
    decay, state, reach = (-F.elu(x) - 1).exp()[..., None, None], k[..., None] * v[..., None, :], 1
    for _ in range(6):
        before = F.pad(state, (0, 0, 0, 0, 0, 0, reach, 0))[:, :-reach]
        state = state + decay * before
        decay = decay * F.pad(decay, (0, 0, 0, 0, 0, 0, reach, 0), value=1.0)[:, :-reach]
        reach *= 2
    return (q[..., None, :] @ state)[..., 0, :]


def of_a_square(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """And with others."""
    decay, state, reach = (-(x * x)).exp()[..., None, None], k[..., None] * v[..., None, :], 1
    for _ in range(6):
        before = F.pad(state, (0, 0, 0, 0, 0, 0, reach, 0))[:, :-reach]
        state = state + decay * before
        decay = decay * F.pad(decay, (0, 0, 0, 0, 0, 0, reach, 0), value=1.0)[:, :-reach]
        reach *= 2
    return (q[..., None, :] @ state)[..., 0, :]


NEAR = {six_levels: -0.001, of_elu: -7.0, of_a_square: 0.03}
"""Where the argument has to be for log gates of about -0.001."""


@pytest.mark.parametrize("fn", NEAR, ids=lambda fn: fn.__name__)
def test_a_window_that_gates_hide(fn: Function) -> None:
    """With gates of -0.25 a token, what is 64 tokens back is below every tolerance; with those of -0.001 it is not.
    Activations that the op does not take over once hid their gates.
    """
    check(fn, *([*operands(length), NEAR[fn] * torch.ones(1, length, 2)] for length in (24, 100)))


PRODUCTS = (Tensor.mul, Tensor.__mul__, torch.mul)


class Added(TorchFunctionMode):
    """Sums where products are written."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.add(*args) if func in PRODUCTS else func(*args, **(kwargs or {}))


class Halves(Tensor):
    """Every product is half of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: Any = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(Tensor) * 0.5 if func in PRODUCTS else found


def test_modes_and_classes_that_change_operators() -> None:
    """Dynamo follows them into the function's body; a default device is such a mode, and changes nothing."""
    fn: Function = attacks.retention
    run, plain = compiled(fn), operands(24)
    with torch.no_grad():
        for mode in (nullcontext(), Added(), torch.device("cpu"), Added(), nullcontext()):
            with mode:
                found = run(*plain)
            with mode:
                assert relative_error(found, fn(*plain)) < 1e-5, mode
        halves = [plain[0], plain[1], plain[2].as_subclass(Halves)]
        assert relative_error(run(*halves).as_subclass(Tensor), fn(*halves).as_subclass(Tensor)) < 1e-5
    assert "retention" in lifted()
