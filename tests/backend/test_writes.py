"""Caches, buffers and inputs that a model overwrites around the region: same numbers as eager in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kdacompile.report.collect import collecting
from tests.backend.layers import compiled, gla_step, gradients, patterns, step_arguments
from tests.compare import relative_error, worst_error


class Cached(nn.Module):
    """A layer with its state in a buffer, as static caches have it."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.state: Tensor
        self.register_buffer("state", step_arguments(seed=1)[4])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        if not self.in_place:
            out, state = gla_step(q, k, v, g, self.state)
            self.state.copy_(state)
            return out
        self.state.mul_(g.exp().unsqueeze(-1))
        self.state.add_(k.unsqueeze(-1) * v.unsqueeze(-2))
        return (q.unsqueeze(-2) @ self.state).squeeze(-2)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_buffer_is_overwritten(in_place: bool, inner: str) -> None:
    ours, plain = Cached(in_place=in_place), Cached(in_place=in_place)
    arguments = step_arguments()[:4]
    with torch.no_grad(), collecting() as report:
        run = compiled(ours, inner)
        for _ in range(3):
            assert relative_error(run(*arguments), plain(*arguments)) < 1e-5
            assert relative_error(ours.state, plain.state) < 1e-5
    assert patterns(report) == ["gla"]


class CachedGate(Cached):
    """The gate's rate is trained, and becomes part of the op."""

    def __init__(self) -> None:
        super().__init__(in_place=False)
        self.A_log = nn.Parameter(torch.zeros(self.state.shape[1]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return super().forward(q, k, v, -self.A_log.exp()[:, None] * nn.functional.softplus(g))


class CachedTransposed(Cached):
    """The state as Mamba-2 keeps it, [B, H, V, K]."""

    def __init__(self) -> None:
        super().__init__(in_place=False)
        self.state = self.state.transpose(-1, -2).contiguous()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        state = self.state * g.exp().unsqueeze(-2) + k.unsqueeze(-2) * v.unsqueeze(-1)
        self.state.copy_(state)
        return (state @ q.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", [CachedGate, CachedTransposed])
def test_a_step_in_inference_overwrites_its_buffer(
    layer: Callable[[], Cached], mode: Callable[[], Any], inner: str
) -> None:
    """Parameters want a gradient, but in inference nothing is recorded."""
    ours, plain = layer(), layer()
    arguments = step_arguments()[:4]
    with mode(), collecting() as report:
        run = compiled(ours, inner)
        for _ in range(3):
            assert relative_error(run(*arguments), plain(*arguments)) < 1e-5
            assert relative_error(ours.state, plain.state) < 1e-5
    (match,) = report.matches
    assert match.op == "kdacompile::linear_attention_step_"
    assert "gate_softplus" in match.absorbed or layer is CachedTransposed


def _step_of_slots(q: Tensor, k: Tensor, v: Tensor, g: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    state = pool[slots] * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
    pool[slots] = state
    return (q.unsqueeze(-2) @ state).squeeze(-2)


@pytest.mark.parametrize("slots", [(3, 0), (2, 2), (1, -1)])
def test_slots_that_a_model_gathers_stay_copies(slots: tuple[int, int]) -> None:
    """They may be the same one twice, or count from the end; the op on the pool itself takes neither."""
    q, k, v, g, states = step_arguments()
    ours = states.repeat(3, 1, 1, 1)
    plain = ours.clone()
    with collecting() as report:
        found = compiled(_step_of_slots)(q, k, v, g, ours, torch.tensor(slots))
    assert relative_error(found, _step_of_slots(q, k, v, g, plain, torch.tensor(slots))) < 1e-5
    assert relative_error(ours, plain) < 1e-5
    assert [match.op for match in report.matches] == ["kdacompile::linear_attention_step"]


def _reads_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    before = state.sum()
    state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2), before


def _reads_between(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state.mul_(g.exp().unsqueeze(-1))
    between = state.sum()
    state.add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2), between


def _reads_after(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state is read after its last write and before anything reads the output."""
    state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    after = state.sum()
    return out * after, after


def _reads_a_view_after(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    row = state[:, 0]
    state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    after = row.sum()
    return out * after, row.clone()


def _writes_after(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    state.mul_(2)
    return out, state.sum()


def _copies_then_reads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out, new = gla_step(q, k, v, g, state)
    state.copy_(new)
    return out * state.sum(), state.clone()


def _reads_then_copies(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The old state, through a view, after the output and before the new one."""
    turned = state.transpose(-1, -2)
    out, new = gla_step(q, k, v, g, state)
    out = out.tanh()
    before = (turned * out.unsqueeze(-1)).sum()
    state.copy_(new)
    return out, before


def _copies_a_slice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The cache is larger than the state."""
    cache = torch.zeros(4, *state.shape)
    cache[1].copy_(state)
    out, new = gla_step(q, k, v, g, cache[1])
    cache[1].copy_(new)
    return out, cache


def _inputs_overwritten_after(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out, new = gla_step(q, k, v, g, state)
    q.zero_()
    v.mul_(3)
    return out + v, new


def _output_overwritten_after(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out, new = gla_step(q, k, v, g, state)
    out.mul_(2)
    new.add_(1)
    return out, new


def _written_again(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state.mul_(g.exp().unsqueeze(-1))
    state += k.unsqueeze(-1) * v.unsqueeze(-2)
    out = (q.unsqueeze(-2) @ state).squeeze(-2)
    state *= 2
    return out, state


def _normalised_and_read(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A rule moves the division, and the state is divided too."""
    total = 1 / (q.exp().sum(-1) + 1e-6)
    state.mul_(g.exp().unsqueeze(-1))
    state += k.unsqueeze(-1) * v.unsqueeze(-2)
    return torch.einsum("bhk,bhkv,bh->bhv", q, state, total), state / total[..., None, None]


WRITES = (
    _reads_before,
    _reads_between,
    _reads_after,
    _reads_a_view_after,
    _writes_after,
    _copies_then_reads,
    _reads_then_copies,
    _copies_a_slice,
    _inputs_overwritten_after,
    _output_overwritten_after,
    _written_again,
    _normalised_and_read,
)


@pytest.mark.parametrize("fn", WRITES, ids=lambda fn: fn.__name__.strip("_"))
def test_writes_around_the_region(fn: Callable[..., Any]) -> None:
    arguments = step_arguments()
    ours, plain = ([x.clone() for x in arguments] for _ in range(2))
    with torch.no_grad(), collecting() as report:
        have = compiled(fn)(*ours)
        want = fn(*plain)
    assert worst_error((have, ours), (want, plain)) < 1e-5
    assert report.matches or report.rejections


def _added(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    state *= g.exp().unsqueeze(-1)
    state += k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _named(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    new = state.mul_(g.exp().unsqueeze(-1)).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
    return (q.unsqueeze(-2) @ new).squeeze(-2), new.tanh()


def _normalised(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As fast-transformers spells it, with a gate: one einsum reads, and divides by what was read of the keys."""
    total = 1 / ((q.exp() * k.exp()).sum(-1) + 1e-6)
    state *= g.exp().unsqueeze(-1)
    state += torch.einsum("bhk,bhv->bhkv", k, v)
    return torch.einsum("bhk,bhkv,bh->bhv", q, state, total), state


@pytest.mark.parametrize("fn", [_added, _named, _normalised], ids=lambda fn: fn.__name__.strip("_"))
def test_the_state_is_read_through_its_last_write(fn: Callable[..., Any]) -> None:
    """``state += kv; return o, state``: what the write yields is the buffer, which the op has written."""
    arguments = step_arguments()
    ours, plain = ([x.clone() for x in arguments] for _ in range(2))
    with torch.no_grad(), collecting() as report:
        run = compiled(fn)
        for _ in range(2):
            assert worst_error((run(*ours), ours), (fn(*plain), plain)) < 1e-5
    assert [(match.pattern, match.op) for match in report.matches] == [("gla", "kdacompile::linear_attention_step_")]


def test_gradients_after_a_compiled_step_in_place_of_a_copy() -> None:
    """The overwritten state is a computed tensor: autograd goes through the write."""

    q, k, given, g, start = step_arguments()

    def fn(v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        cache = state * 1.0
        out, new = gla_step(q, k, v, g, cache)
        cache.copy_(new)
        return out, cache

    arguments = (given, start)
    leaves = [x.clone().requires_grad_() for x in arguments]
    plain = [x.clone().requires_grad_() for x in arguments]
    have, want = compiled(fn)(*leaves), fn(*plain)
    assert worst_error(have, want) < 1e-5
    assert worst_error(gradients(have, leaves), gradients(want, plain)) < 1e-5
