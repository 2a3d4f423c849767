"""Backpropagation that a model cuts part-way: gradients are eager's, whether the region is matched or left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import worst_error
from tests.soundness.programs import BOUND, explained, tokens

T = 12
RESET = (torch.arange(T).view(1, T, 1, 1, 1) % 5) == 2
REAL = ~RESET
"""Inputs of the graph, as tensors of a module are."""
Cut = Callable[[int, Tensor], Tensor]


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, before: Cut, key: Cut, out: Cut) -> Tensor:
    """Gated linear attention; each of the three may cut the gradient of the state, a key or an output at token t."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = before(t, state) * g[:, t, :, None, None].exp()
        state = state + key(t, k[:, t])[..., None] * v[:, t, :, None]
        outputs.append(out(t, (q[:, t, :, None] @ state)[:, :, 0]))
    return torch.stack(outputs, 1)


def keep(_: int, x: Tensor) -> Tensor:
    return x


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


def switched(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    try:
        return x.clone()
    finally:
        torch.set_grad_enabled(True)


class Halved(torch.autograd.Function):
    """The number itself, and half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


def halved(x: Tensor) -> Tensor:
    result: Tensor = Halved.apply(x)  # type: ignore[no-untyped-call]
    return result


CUTS: dict[str, dict[str, Cut]] = {
    "state detached once": {"before": lambda t, s: s.detach() if t == 6 else s},
    "state detached every fourth token": {"before": lambda t, s: s.detach() if t % 4 == 0 else s},
    "state detached at the last token": {"before": lambda t, s: s.detach() if t == T - 1 else s},
    "state detached always": {"before": lambda t, s: s.detach()},
    "state without grad once": {"before": lambda t, s: no_grad(s) if t == 5 else s},
    "state with grad mode off": {"before": lambda t, s: switched(s) if t == 5 else s},
    "half of the state": {"before": lambda t, s: torch.cat([s[..., :6].detach(), s[..., 6:]], -1) if t == 7 else s},
    "a part of the state": {"before": lambda t, s: 0.5 * s.detach() + 0.5 * s if t == 7 else s},
    "one head": {"before": lambda t, s: torch.cat([s[:, :1].detach(), s[:, 1:]], 1) if t == 3 else s},
    "keys detached": {"key": lambda t, k: k.detach()},
    "one key detached": {"key": lambda t, k: k.detach() if t == 2 else k},
    "outputs detached": {"out": lambda t, o: o.detach() if t < 6 else o},
    "one output without grad": {"out": lambda t, o: no_grad(o) if t == 4 else o},
    "all outputs detached": {"out": lambda t, o: o.detach()},
    "every second output detached": {"out": lambda t, o: o.detach() if t % 2 else o},
    "the state that came in detached": {"before": lambda t, s: s.detach() if t == 0 else s},
    "the state's data": {"before": lambda t, s: s.data if t == 9 else s},
    "a copy detached in place": {"before": lambda t, s: (s * 1).detach_() if t == 6 else s},
    "a function with a gradient of its own, once": {"before": lambda t, s: halved(s) if t == 8 else s},
    "such a function, of one key": {"key": lambda t, k: halved(k) if t == 8 else k},
}


def gradients(result: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    if not result.requires_grad:
        return [None] * len(leaves)
    seed = torch.linspace(-1.0, 1.0, result.numel()).view(result.shape)
    return list(torch.autograd.grad(result, leaves, seed, allow_unused=True))


def check(program: Callable[..., Tensor]) -> list[str]:
    found = tokens(T)
    own, theirs = ([found[x].clone().requires_grad_() for x in ("q", "k", "v", "g", "state")] for _ in range(2))
    report = explained(program, tuple(own), **{"kda.inner": "aot_eager"})
    expected = program(*theirs)
    assert report.result.requires_grad == expected.requires_grad, str(report)
    assert worst_error(report.result, expected) <= BOUND, str(report)
    for have, want in zip(gradients(report.result, own), gradients(expected, theirs), strict=True):
        here, there = (torch.zeros(1) if x is None else x for x in (have, want))
        assert bool((here == 0).all()) == bool((there == 0).all()), str(report)
        if want is not None and have is not None:
            assert worst_error(have, want) <= BOUND, str(report)
    return [match.pattern for match in report.matches]


@pytest.mark.parametrize("name", CUTS)
def test_gradients_that_are_cut(name: str) -> None:
    parts: dict[str, Cut] = {"before": keep, "key": keep, "out": keep, **CUTS[name]}
    check(lambda *x: loop(*x, **parts))


def test_gradients_that_are_not() -> None:
    assert check(lambda *x: loop(*x, before=keep, key=keep, out=keep)) == ["simple_gla"]


def emptied(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, cut: Cut) -> Tensor:
    """The state is emptied at some tokens; a gradient of it may be cut before that."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = torch.where(RESET[:, t], 0.0, cut(t, state)) * g[:, t, :, None, None].exp()
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


def padded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, cut: Cut) -> Tensor:
    """The state is kept at some tokens; the gradient of the next one may be cut."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        after = cut(t, state) * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        state = torch.where(REAL[:, t], after, state)
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


def padded_as_cut(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, cut: Cut) -> Tensor:
    """The gradient of the one that is kept may be."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        after = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        state = torch.where(REAL[:, t], after, cut(t, state))
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


def moved(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, cut: Cut) -> Tensor:
    """What the next one is more may be."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        after = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        state = state + REAL[:, t].to(q.dtype) * cut(t, after - state)
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


def moved_from(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, cut: Cut) -> Tensor:
    """Or what it is taken from."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        after = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        state = torch.lerp(cut(t, state), after, REAL[:, t].to(q.dtype))
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1)


OF_STATES: dict[str, Cut] = {
    name: CUTS[name]["before"] for name in CUTS if "before" in CUTS[name] and "that came in" not in name
}


@pytest.mark.parametrize("name", OF_STATES)
@pytest.mark.parametrize("program", [emptied, padded, padded_as_cut, moved, moved_from])
def test_gradients_of_chosen_states_that_are_cut(program: Callable[..., Tensor], name: str) -> None:
    check(lambda *x: program(*x, cut=OF_STATES[name]))


@pytest.mark.parametrize("program", [emptied, padded, moved, moved_from])
def test_gradients_of_chosen_states_that_are_not(program: Callable[..., Tensor]) -> None:
    assert check(lambda *x: program(*x, cut=keep)) == ["simple_gla"]


Part = Callable[[Tensor], Tensor]


def hoisted(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, key: Part, gate: Part, write: Part, out: Part
) -> Tensor:
    """What a loop does to each token alike, in front of it and behind it, is done at once: cut or not."""
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * gate(g[:, t])[..., None, None].exp()
        value = write(g[:, t])[..., None] * v[:, t]
        state = state + key(k[:, t])[..., None] * value[..., None, :]
        outputs.append(out((q[:, t, :, None] @ state)[:, :, 0]))
    return torch.stack(outputs, 1)


def at_its_place(x: Tensor) -> Tensor:
    return (x * 1).detach_()


OF_ROWS: dict[str, dict[str, Part]] = {
    "an activation of keys": {"key": lambda x: at_its_place(x.tanh())},
    "keys before one": {"key": lambda x: at_its_place(x).tanh()},
    "a factor": {"write": lambda x: at_its_place(2 * x)},
    "a square": {"write": lambda x: at_its_place(x * x)},
    "one of two factors": {"write": lambda x: x * at_its_place(x)},
    "a gate": {"gate": lambda x: at_its_place(-x.sigmoid())},
    "a power": {"gate": lambda x: at_its_place(0.5**x)},
    "what is read": {"out": lambda x: at_its_place(x).tanh()},
    "a function of it": {"out": lambda x: at_its_place(x.tanh())},
    "a factor of it": {"out": lambda x: x * at_its_place(x.sigmoid())},
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_rows_that_are_cut(name: str, inside: bool) -> None:
    """``detach_`` leaves no operator behind, ``detach`` a copy."""
    same: dict[str, Part] = {
        "key": torch.tanh,
        "gate": lambda x: -x.sigmoid(),
        "write": torch.sigmoid,
        "out": torch.tanh,
    }
    parts = {**same, **OF_ROWS[name]}
    if inside:
        parts = {
            role: (lambda x, part=part: part(x).detach()) if role in OF_ROWS[name] else part
            for role, part in parts.items()
        }
    check(lambda *x: hoisted(*x, **parts))


def normalised(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, before: Part, after: Part) -> Tensor:
    """Scores over their own row sums, cut on one side of the division."""
    q, k, v = (x.transpose(1, 2) for x in (q.exp(), k.exp(), v))
    scores = (q @ k.mT).tril()
    return (after(before(scores) / scores.sum(-1, keepdim=True)) @ v).transpose(1, 2)


@pytest.mark.parametrize("name", ["before", "after"])
@pytest.mark.parametrize("part", [torch.detach, at_its_place, lambda x: x])
def test_gradients_of_normalised_scores_that_are_cut(name: str, part: Part) -> None:
    same: dict[str, Part] = {"before": lambda x: x, "after": lambda x: x}
    check(lambda *x: normalised(*x, **{**same, name: part}))


def closed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """The same in closed form, with the gradient of the weights cut."""
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    return (cut(q @ k.mT * decay) @ v + (q * total.exp()[..., None]) @ state).transpose(1, 2)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda w: w.detach(),
    "the diagonal": lambda w: torch.where(torch.eye(T, dtype=torch.bool), w.detach(), w),
    "later rows": lambda w: torch.cat([w[..., :4, :], w[..., 4:, :].detach()], -2),
    "without grad": no_grad,
    "straight through": lambda w: w + (w * 0.5 - w * 0.5).detach(),
    "half": lambda w: 0.5 * (w + w.detach()),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_weights_that_are_cut(name: str) -> None:
    check(lambda *x: closed(*x, cut=WEIGHTS[name]))


def segments(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, size: int) -> Tensor:
    """Truncated backpropagation: a loop over some tokens at a time, whose state goes on without its gradient."""
    outputs: list[Tensor] = []
    for begin in range(0, T, size):
        part = slice(begin, begin + size)
        o, state = carried(q[:, part], k[:, part], v[:, part], g[:, part], state)
        outputs.append(o)
        state = state.detach()
    return torch.cat(outputs, 1)


def carried(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("size", [4, 5])
def test_segments_whose_state_goes_on_detached(size: int) -> None:
    check(lambda *x: segments(*x, size=size))
