"""A state that all requests start from, such as a learned one: it has no batch of its own, or is expanded to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from tests.compare import relative_error

EAGER: dict[str, Any] = {"kda.inner": "eager"}
H, K, V = 3, 4, 5
Start = Callable[[Tensor, int], Tensor]

STARTS: dict[str, tuple[tuple[int, ...], Start]] = {
    "expanded": ((1, H, K, V), lambda state, batch: state.expand(batch, -1, -1, -1)),
    "repeated": ((1, H, K, V), lambda state, batch: state.repeat(batch, 1, 1, 1)),
    "broadcast": ((H, K, V), lambda state, batch: state),
}


def gated(start: Start) -> Callable[..., tuple[Tensor, Tensor]]:
    def fn(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        s, rows, gate = start(state, q.shape[0]), [], gate.sigmoid()
        for t in range(q.shape[1]):
            s = s * gate[:, t, :, None, None] + k[:, t, ..., None] * v[:, t, ..., None, :]
            rows.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
        return torch.stack(rows, 1), s

    return fn


def delta(start: Start) -> Callable[..., tuple[Tensor, Tensor]]:
    def fn(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        k, s, rows = F.normalize(k, dim=-1), start(state, q.shape[0]), []
        for t in range(q.shape[1]):
            error = v[:, t] - (s * k[:, t, ..., None]).sum(-2)
            s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None].sigmoid() * error)
            rows.append((s * q[:, t, ..., None]).sum(-2))
        return torch.stack(rows, 1), s

    return fn


def inputs(batch: int, tokens: int, shape: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (batch, tokens, H, K), (batch, tokens, H, K), (batch, tokens, H, V), (batch, tokens, H), shape
    return [torch.randn(size).requires_grad_() for size in sizes]


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("make", [gated, delta])
def test_matched_with_gradients(make: Any, start: str, tokens: int) -> None:
    shape, begin = STARTS[start]
    fn = make(begin)
    torch._dynamo.reset()
    ours, theirs = inputs(2, tokens, shape), inputs(2, tokens, shape)
    report = kdacompile.explain(fn, options=EAGER)(*ours)
    assert len(report.matches) == 1, str(report)
    have, want = report.result, fn(*theirs)
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(have, want, strict=True))
    loss, expected = (torch.stack([y.square().sum() for y in result]).sum() for result in (have, want))
    one, other = torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs)
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("start", STARTS)
def test_one_graph_for_every_batch(start: str) -> None:
    shape, begin = STARTS[start]
    fn = gated(begin)
    torch._dynamo.reset()
    options: Any = EAGER | {"kda.expect": {"simple_gla": 1}}
    compiled = torch.compile(fn, backend="kda", dynamic=True, options=options)
    with torch.no_grad(), kdacompile.collecting() as report:
        for batch in (2, 4):
            arguments = inputs(batch, 6, shape)
            assert all(relative_error(x, y) < 1e-6 for x, y in zip(compiled(*arguments), fn(*arguments), strict=True))
    assert len(report.graphs) == 1, str(report)


def test_it_is_not_overwritten() -> None:
    """A step writes its result where the model does, never into what all requests share."""

    def fn(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor, cache: Tensor) -> Tensor:
        o, s = gated(STARTS["broadcast"][1])(q, k, v, gate, state)
        cache.copy_(s)
        return o

    torch._dynamo.reset()
    with torch.no_grad():
        arguments = inputs(2, 1, (H, K, V))
        before, cache, wanted = arguments[-1].clone(), torch.zeros(2, H, K, V), torch.zeros(2, H, K, V)
        report = kdacompile.explain(fn, options=EAGER)(*arguments, cache)
        assert len(report.matches) == 1, str(report)
        expected = fn(*arguments[:5], cache=wanted)
        assert relative_error(report.result, expected) < 1e-6
        assert relative_error(cache, wanted) < 1e-6
        assert torch.equal(arguments[-1], before)
