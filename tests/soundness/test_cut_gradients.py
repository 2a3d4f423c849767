"""Gradients that are cut where a rule writes a graph in another way, and by ``detach_`` beside a region: eager's.

``detach_`` leaves no operator, and cuts for those who read the tensor later.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compare import worst_error
from tests.soundness.programs import BOUND, explained

B, H, T, K, V = 2, 3, 6, 4, 5
Cut = Callable[[Tensor], Tensor]
Place = Callable[[int, Tensor], Tensor]
"""``at(i, x)``: ``x``, cut where ``i`` is the place that is asked for."""
CUTS: dict[str, Cut] = {
    "detach": torch.detach,
    "of a copy, in place": lambda x: (x * 1).detach_(),
    "in place": lambda x: x.detach_(),
    "data": lambda x: x.data,
    "half": lambda x: 0.5 * x + 0.5 * x.detach(),
}


def below() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).tril()


def decays(at: Place, total: Tensor) -> Tensor:
    return torch.where(below(), at(0, total[..., :, None]) - at(1, total[..., None, :]), -torch.inf)


def stabilised(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    logs = at(2, decays(at, at(3, at(4, F.logsigmoid(f)).cumsum(-1))) + at(5, i[..., None, :]))
    m = at(6, logs.amax(-1, keepdim=True))
    weights = (q @ k.mT) * at(7, (logs - m).exp())
    return (weights / torch.maximum(at(8, weights.sum(-1, keepdim=True)).abs(), (-m).exp())) @ v


def gates_in_log_space(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    wrote = at(2, F.logsigmoid(at(3, i)))
    return (q @ k.mT * at(4, (at(5, decays(at, F.logsigmoid(f).cumsum(-1))) + at(6, wrote[..., None, :])).exp())) @ v


def running_maxima(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    outs: list[Tensor] = []
    state, m = q.new_zeros(B, H, K, V), i.new_zeros(B, H)
    for t in range(T):
        kept = at(0, F.logsigmoid(f)[..., t] + at(1, m))
        after = at(2, torch.maximum(kept, i[..., t]))
        write = at(3, (i[..., t] - after).exp())[..., None, None] * k[:, :, t, :, None]
        state = state * at(4, (kept - after).exp())[..., None, None] + write * v[:, :, t, None]
        outs.append((q[:, :, t, :, None] * state).sum(-2))
        m = after
    return torch.stack(outs, 2)


def outer_products(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    gates, (q, k, v) = F.logsigmoid(f)[0, 0], (x[0, 0] for x in (q, k, v))
    outs: list[Tensor] = []
    state = q.new_zeros(K, V)
    for t in range(T):
        state = at(0, torch.addr(at(1, state) * gates[t].exp(), at(2, k[t]), at(3, v[t])))
        outs.append(at(4, q[t]) @ state)
    return torch.stack(outs)


def packed(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    outs: list[Tensor] = []
    for start in (0, T // 2):
        state = q.new_zeros(B, H, K, V)
        for t in range(start, start + T // 2):
            state = at(0, state) * at(1, F.logsigmoid(f)[..., t]).exp()[..., None, None]
            state = state + at(2, k[:, :, t])[..., None] * at(3, v[:, :, t])[..., None, :]
            outs.append(at(4, (at(5, q[:, :, t])[..., None] * state).sum(-2)))
    return torch.stack(outs, 2)


def quotients(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    keys = at(0, at(1, k) / at(2, (k * k).sum(-1, keepdim=True) + 1.0))
    return (at(3, q @ keys.mT) * decays(at, F.logsigmoid(f).cumsum(-1)).exp()) @ v


def row_sums(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    scores = at(2, q @ k.mT * decays(at, F.logsigmoid(f).cumsum(-1)).exp())
    return at(3, at(4, scores) / at(5, scores.sum(-1, keepdim=True)).abs().clamp(1.0)) @ v


def computed_twice(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    inside, behind = at(0, F.logsigmoid(f)), at(1, F.logsigmoid(f))
    outs: list[Tensor] = []
    state = q.new_zeros(B, H, K, V)
    erased, written = at(2, F.normalize(k, dim=-1)), at(3, F.normalize(k, dim=-1))
    for t in range(T):
        state = state * inside[..., t].exp()[..., None, None]
        old = (erased[:, :, t, :, None] * state).sum(-2)
        new = (v[:, :, t] - old) * at(4, i[..., t].sigmoid())[..., None]
        state = state + written[:, :, t, :, None] * new[..., None, :]
        outs.append((q[:, :, t, :, None] * state).sum(-2) * behind[..., t].exp()[..., None])
    return torch.stack(outs, 2)


def columns(at: Place, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    pool, tokens = torch.cat([k, v], -1).flatten(0, 2), torch.arange(B * T).view(B, T)
    keys, values = at(0, at(1, pool)[tokens]), at(2, at(3, pool[..., : K + 1])[tokens])
    scores = torch.cat([q, v], -1) @ at(4, keys)[:, None].mT
    return scores.masked_fill(~below(), -torch.inf).softmax(-1) @ at(5, values)[:, None]


PROGRAMS = {
    stabilised: 9,
    gates_in_log_space: 7,
    running_maxima: 5,
    outer_products: 5,
    packed: 6,
    quotients: 4,
    row_sums: 6,
    computed_twice: 5,
    columns: 6,
}
"""With how many places they have to cut at."""


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, T, *width).requires_grad_() for width in ([K], [K], [V], [], [])]


def gradients(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not result.requires_grad:
        return list(map(torch.zeros_like, leaves))
    seed = torch.linspace(-1.0, 1.0, result.numel()).view(result.shape)
    return list(torch.autograd.grad(result, leaves, seed, allow_unused=True, materialize_grads=True))


def check(program: Callable[..., Tensor]) -> list[str]:
    """The patterns matched; values and gradients must be eager's. Nothing where torch refuses."""
    own, theirs = tensors(), tensors()
    try:
        expected = program(*theirs)
        wanted = gradients(expected, theirs)
        gradients(torch.compile(program, backend="aot_eager")(*own), own)
    except RuntimeError:
        return []
    report = explained(program, tuple(own), **{"kda.inner": "aot_eager", "kda.cost_model": False})
    assert worst_error(report.result, expected) <= BOUND, str(report)
    for have, want in zip(gradients(report.result, own), wanted, strict=True):
        assert bool((have == 0).all()) == bool((want == 0).all()), str(report)
        assert worst_error(have, want) <= 10 * BOUND, str(report)
    return [match.pattern for match in report.matches]


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_that_are_not_cut(program: Callable[..., Tensor]) -> None:
    assert check(lambda *x: program(lambda _, value: value, *x))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_that_are_cut_where_a_rule_applies(program: Callable[..., Tensor], cut: str) -> None:
    for place in range(PROGRAMS[program]):
        check(lambda *x, place=place: program(lambda at, value: CUTS[cut](value) if at == place else value, *x))


# -- in place, beside a region ----------------------------------------------------------------------------------------


def delta_loop(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor, *, before: Callable[[int], object]) -> Tensor:
    outs: list[Tensor] = []
    state = q.new_zeros(B, H, K, V)
    gates = F.logsigmoid(f)
    for t in range(T):
        before(t)
        state = state * gates[..., t].exp()[..., None, None]
        new = (v[:, :, t] - (k[:, :, t, :, None] * state).sum(-2)) * i[..., t].sigmoid()[..., None]
        state = state + k[:, :, t, :, None] * new[..., None, :]
        outs.append((q[:, :, t, :, None] * state).sum(-2))
    before(T)
    return torch.stack(outs, 2)


@pytest.mark.parametrize("when", [0, T // 2, T])
@pytest.mark.parametrize("which", range(5))
def test_an_input_that_is_detached_beside_the_region(which: int, when: int) -> None:
    """Before it is read, in between, or once it was read: an op that stands behind the cut would see it as cut."""

    def program(*given: Tensor) -> Tensor:
        own = [x * 1 for x in given]
        return delta_loop(*own, before=lambda t: own[which].detach_() if t == when else None)

    check(program)


def test_what_was_read_and_is_detached_then_is_still_matched() -> None:
    """The op is put in front of the cut."""

    def program(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
        keys = k * 1
        result = (q @ keys.mT).tril() @ v
        keys.detach_()
        return result * keys.sum()

    assert check(program) == ["linear_attention"]


@pytest.mark.parametrize("read_first", [False, True])
def test_a_result_that_is_detached_after_it_is_read(read_first: bool) -> None:
    def program(*given: Tensor) -> Tensor:
        result = delta_loop(*given, before=lambda _: None)
        early = result.tanh() if read_first else 0.0
        result.detach_()
        return result + early + given[2]

    check(program)
