"""Loops that empty their state, or weigh it by a further number, are one recurrence; what only looks so is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.report.report import Report
from tests.compare import relative_error, worst_error

B, T, H, K, V = 2, 9, 3, 4, 5
BOUND = 1e-5

Program = Callable[..., tuple[Tensor, Tensor]]
Change = Callable[[Tensor, Tensor, int], Tensor]
"""What becomes of a state, given something a token ``[B, T]`` and which token it is."""

LOOPS = [
    ("kda", "channel", True),
    ("gated_delta_rule", "head", True),
    ("gated_delta_rule", "", True),
    ("gla", "channel", False),
    ("simple_gla", "head", False),
    ("simple_gla", "", False),
]


def row(x: Tensor, t: int) -> Tensor:
    return x[:, t, None, None, None]


def loop(gate: str, delta: bool, before: Change, after: Change, read: Change | None = None) -> Program:
    """A recurrence whose state is changed ``before`` it decays and ``after``; ``read``: once a token has read it."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = before(state, x, t)
            if gate:
                decay = g[:, t].exp()
                state = state * (decay[..., None] if gate == "channel" else decay[..., None, None])
            state = after(state, x, t)
            key = k[:, t, :, :, None]
            write = v[:, t] - (key * state).sum(-2) if delta else v[:, t]
            state = state + key * (beta[:, t, :, None] * write)[..., None, :]
            out.append((q[:, t, :, :, None] * state).sum(-2))
            state = state if read is None else read(state, x, t)
        return torch.stack(out, 1), state

    return run


def as_it_is(state: Tensor, x: Tensor, t: int) -> Tensor:
    return state


def arguments(gate: str, x: Tensor, tokens: int = T) -> list[Tensor]:
    q, k, v = torch.randn(B, tokens, H, K), torch.randn(B, tokens, H, K), torch.randn(B, tokens, H, V)
    g = -torch.rand(B, tokens, H, K) if gate == "channel" else -torch.rand(B, tokens, H)
    return [q, torch.nn.functional.normalize(k, dim=-1), v, g, torch.rand(B, tokens, H), torch.randn(B, H, K, V), x]


def starts() -> Tensor:
    found = torch.zeros(B, T, dtype=torch.bool)
    found[:, 0] = found[1, 5] = found[0, 3] = True
    return found


def explained(fn: Program, args: list[Tensor]) -> Report:
    torch._dynamo.reset()
    return explain(fn, options={"kda.lift": False})(*args)


def patterns(report: Report) -> list[str]:
    return [match.pattern for match in report.matches]


def by_index(state: Tensor, x: Tensor, t: int) -> Tensor:
    state = state.clone()
    state[x[:, t]] = 0
    return state


EMPTIED: dict[str, Change] = {
    "where": lambda s, x, t: torch.where(row(x, t), 0, s),
    "where zeros": lambda s, x, t: torch.where(x[:, t].view(-1, 1, 1, 1), torch.zeros_like(s), s),
    "where kept": lambda s, x, t: torch.where(~row(x, t), s, 0.0),
    "filled": lambda s, x, t: s.masked_fill(row(x, t), 0.0),
    "times a boolean": lambda s, x, t: s * ~row(x, t),
    "times a number": lambda s, x, t: s * (~x[:, t]).to(s.dtype).view(-1, 1, 1, 1),
    "times what is left of one": lambda s, x, t: s * (1 - x[:, t].float())[:, None, None, None],
    "times a whole number": lambda s, x, t: s * (1 - row(x, t).long()),
    "times one like it": lambda s, x, t: s * (~row(x, t)).type_as(s),
    "times zero or one": lambda s, x, t: s * torch.where(x[:, t], 0.0, 1.0)[:, None, None, None],
    "less itself": lambda s, x, t: s - s * row(x, t).float(),
    "twice": lambda s, x, t: torch.where(row(x, t), 0, s) * ~row(x, t),
    "and halved": lambda s, x, t: torch.where(row(x, t), 0, s) * 0.5,
    "in one head": lambda s, x, t: s.masked_fill(row(x, t) & (torch.arange(H) == 1)[:, None, None], 0.0),
}


@pytest.mark.parametrize(("pattern", "gate", "delta"), LOOPS)
@pytest.mark.parametrize("name", EMPTIED)
def test_emptied_before_it_decays_or_after(pattern: str, gate: str, delta: bool, name: str) -> None:
    for changes in ((EMPTIED[name], as_it_is), (as_it_is, EMPTIED[name])):
        fn, args = loop(gate, delta, *changes), arguments(gate, starts())
        report = explained(fn, args)
        assert patterns(report) == [pattern], str(report)
        assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("pattern", "gate", "delta"), [each for each in LOOPS if each[1]])
@pytest.mark.parametrize("change", [EMPTIED["filled"], by_index])
def test_emptied_in_place(pattern: str, gate: str, delta: bool, change: Change) -> None:
    fn, args = loop(gate, delta, change, as_it_is), arguments(gate, starts())
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


WEIGHED: dict[str, Change] = {
    "a number": lambda s, x, t: s * row(x, t),
    "a sigmoid": lambda s, x, t: s * row(x, t).sigmoid(),
    "another exponential": lambda s, x, t: s * (-row(x, t)).exp(),
    "a threshold": lambda s, x, t: torch.where(row(x, t) > 0.5, s, 0),
    "a number and a constant": lambda s, x, t: s * row(x, t) * torch.linspace(0.5, 1, H)[:, None, None],
}


@pytest.mark.parametrize(("pattern", "gate", "delta"), LOOPS)
@pytest.mark.parametrize("name", WEIGHED)
def test_further_factors(pattern: str, gate: str, delta: bool, name: str) -> None:
    for drawn in (torch.rand(B, T), torch.rand(B, T).round(), torch.randn(B, T)):
        fn, args = loop(gate, delta, as_it_is, WEIGHED[name]), arguments(gate, drawn)
        report = explained(fn, args)
        assert patterns(report) == [pattern], str(report)
        assert worst_error(report.result, fn(*args)) <= BOUND


def test_half_of_the_keys_channels() -> None:
    """That is a gate per channel, be the other one per head."""
    half = torch.arange(K) < K // 2
    fn = loop("head", True, lambda s, x, t: torch.where(row(x, t) & half[:, None], 0, s), as_it_is)
    args = arguments("head", starts())
    report = explained(fn, args)
    assert patterns(report) == ["kda"], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("pattern", "gate", "delta"), LOOPS)
@pytest.mark.parametrize("change", [EMPTIED["where"], EMPTIED["times a number"], WEIGHED["a number"]])
def test_gradients(pattern: str, gate: str, delta: bool, change: Change) -> None:
    """Those of the numbers themselves too, some of which are 0."""
    x = torch.rand(B, T) * (torch.rand(B, T) > 0.3) if change is WEIGHED["a number"] else starts()
    fn = loop(gate, delta, change, as_it_is)
    args = [each.requires_grad_(each.is_floating_point()) for each in arguments(gate, x)]
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    found: list[tuple[Tensor, ...]] = []
    for o, state in (report.result, fn(*args)):
        total = (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() + state.square().sum()
        leaves = [each for each in args if each.requires_grad]
        found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    for have, want in zip(*found, strict=True):
        assert have.isfinite().all()
        assert relative_error(have, want) <= 1e-4


@pytest.mark.parametrize("change", [EMPTIED["where"], EMPTIED["filled"], by_index])
def test_a_cache_with_anything_in_it(change: Change) -> None:
    """Where the first token empties the state, whatever was in it is gone."""
    fn, args = loop("channel", True, change, as_it_is), arguments("channel", starts())
    args[5] = torch.full_like(args[5], torch.nan)
    report = explained(fn, args)
    assert patterns(report) == ["kda"], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


def test_long_documents() -> None:
    """More than a chunk, gates that leave nothing, and several documents in one chunk."""
    fn, args = loop("channel", True, EMPTIED["where"], as_it_is), arguments("channel", torch.rand(B, 80) < 0.1, 80)
    args[3] = args[3] * 20
    report = explained(fn, args)
    assert patterns(report) == ["kda"], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


# -- what only looks so ------------------------------------------------------------------------------------------------

LEFT: dict[str, tuple[Change, Change, Change | None]] = {
    "after the write": (as_it_is, as_it_is, EMPTIED["where"]),
    "the next token's": (lambda s, x, t: torch.where(row(x, (t + 1) % T), 0, s), as_it_is, None),
    "nearly": (lambda s, x, t: torch.where(row(x, t), 1e-6, s), as_it_is, None),
    "half of the values": (lambda s, x, t: s.masked_fill(row(x, t) & (torch.arange(V) < 2), 0.0), as_it_is, None),
    "as the state says": (lambda s, x, t: s.masked_fill(s.mean((1, 2, 3), keepdim=True) > 0, 0.0), as_it_is, None),
    "and a number more": (lambda s, x, t: torch.where(row(x, t), 0, s) + 1e-6, as_it_is, None),
    "two masks": (lambda s, x, t: torch.where(row(x, t), 0, s), lambda s, x, t: torch.where(s > 3, 0, s), None),
}


@pytest.mark.parametrize(("gate", "delta"), [(gate, delta) for _, gate, delta in LOOPS])
@pytest.mark.parametrize("name", LEFT)
def test_left_or_the_same(gate: str, delta: bool, name: str) -> None:
    fn, args = loop(gate, delta, *LEFT[name]), arguments(gate, starts())
    report = explained(fn, args)
    assert worst_error(report.result, fn(*args)) <= 1e-6
    assert not [match for match in report.matches if match.mode == "sequence"], str(report)


@pytest.mark.parametrize(("gate", "delta"), [(gate, delta) for _, gate, delta in LOOPS])
def test_read_before_it_is_emptied(gate: str, delta: bool) -> None:
    """The write of the token that empties the state is lost with it: no gate does that."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        for t in range(T):
            if gate:
                state = state * g[:, t].exp()[(..., *[None] * (4 - g[:, t].dim()))]
            key = k[:, t, :, :, None]
            write = v[:, t] - (key * state).sum(-2) if delta else v[:, t]
            state = torch.where(row(x, t), 0, state + key * (beta[:, t, :, None] * write)[..., None, :])
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1), state

    args = arguments(gate, starts())
    report = explained(run, args)
    assert worst_error(report.result, run(*args)) <= 1e-6
    assert not [match for match in report.matches if match.mode == "sequence"], str(report)
