"""Gates that are powers of some number are gates like any other; what only looks so is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.compare import relative_error, worst_error
from tests.spellings.test_write_gates import LOOPS, arguments, explained, patterns

Gate = Callable[[Tensor], Tensor]
"""What is kept of a state, given a negative number a token and head, or channel."""

POWERS: dict[str, Gate] = {
    "half": lambda g: 0.5**-g,
    "two": lambda g: 2**g,
    "of another base": lambda g: 0.9 ** (-10 * g),
    "more than one": lambda g: torch.pow(10.0, g),
    "a half-life": lambda g: 0.5 ** (1 / (1 - g)),
    "of a tensor": lambda g: torch.pow(torch.tensor(0.7), -g),
    "of one": lambda g: torch.pow(1.0, -g),
    "and a factor": lambda g: 0.95 * 0.5**-g,
}


def loop(kind: str, delta: bool, gate: Gate) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            decay = gate(g[:, t])
            state = state * (decay[..., None] if kind == "channel" else decay[..., None, None])
            write = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state) if delta else v[:, t]
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], b[:, t, :, None] * write)
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, 1), state

    return run


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("name", POWERS)
def test_powers_and_gradients(pattern: str, kind: str, delta: bool, name: str) -> None:
    fn, args = loop(kind, delta, POWERS[name]), [each.requires_grad_() for each in arguments(kind)]
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= 1e-5
    grads = [torch.autograd.grad(o.sin().sum() + state.square().sum(), args) for o, state in (report.result, fn(*args))]
    assert max(map(relative_error, *grads)) <= 1e-4


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("name", ["half", "of another base", "more than one"])
def test_in_bfloat16(pattern: str, kind: str, delta: bool, name: str) -> None:
    """The exponent is not rounded where the model does not."""
    fn, args = loop(kind, delta, POWERS[name]), arguments(kind, dtype=torch.bfloat16)
    report = explained(fn, args)
    want = fn(*[each.double() for each in args])
    assert worst_error(report.result, want) <= worst_error(fn(*args), want) + 1e-3, str(report)


LEFT: dict[str, Gate] = {
    "of a number a token": lambda g: (1 + g) ** 2,
    "of two": lambda g: 0.5**-g + 0.1 * 0.6**-g,
    "of nothing": lambda g: 0.0**-g,
    "of less than nothing": lambda g: (-0.5) ** (-4 * g).round(),
    "a whole number": lambda g: 0.5 ** (-3 * g).long(),
    "in another direction": lambda g: 0.5 ** -g.flip(-1),
    "its gradient is cut": lambda g: (0.5**-g).detach(),
    "that of its exponent is": lambda g: 0.5 ** (-g).detach_(),
    "that of a part is": lambda g: 0.5 ** (-g / 2) * (0.5 ** (-g / 2)).detach(),
}


@pytest.mark.parametrize(("kind", "delta"), [(kind, delta) for _, kind, delta in LOOPS])
@pytest.mark.parametrize("name", LEFT)
def test_left_or_the_same(kind: str, delta: bool, name: str) -> None:
    fn, args = loop(kind, delta, LEFT[name]), [each.requires_grad_() for each in arguments(kind)]
    report = explained(fn, args)
    assert worst_error(report.result, fn(*args)) <= 1e-5, str(report)
    found = [
        torch.autograd.grad(o.sin().sum() + state.square().sum(), args, allow_unused=True, materialize_grads=True)
        for o, state in (report.result, fn(*args))
    ]
    for have, want in zip(*found, strict=True):
        assert torch.equal(have == 0, want == 0)
        assert relative_error(have, want) <= 1e-4
