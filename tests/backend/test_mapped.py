"""Models written with ``torch.vmap``, and with ``associative_scan``, which uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

from tests.backend.layers import codes, compiled, delta_arguments, gated_delta_loop, patterns, run_both, train_both
from tests.compare import worst_error

DELTA = ["gated_delta_rule"]


def one_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule of one head of one sequence: q, k [T, K], v [T, V], g, beta [T]."""
    state = q.new_zeros(q.shape[-1], v.shape[-1])
    rows: list[Tensor] = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        rows.append(q[t] @ state)
    return torch.stack(rows)


def every_head(fn: Any) -> Any:
    return torch.vmap(torch.vmap(fn, in_dims=1, out_dims=1))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_function_of_one_head(inner: str) -> None:
    error, gradient_error, report = train_both(every_head(one_head), delta_arguments(), inner)
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def test_a_batch_of_batches() -> None:
    """The op has one batch dimension."""

    def fn(*arguments: Tensor) -> Tensor:
        return torch.func.vmap(gated_delta_loop)(*arguments)

    error, gradient_error, report = train_both(fn, [torch.stack([x, x + 0.1]) for x in delta_arguments()])
    assert codes(report) == {"roles"}
    assert max(error, gradient_error) < 1e-5


def test_a_buffer_filled_in_place() -> None:
    def head(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        state, out = k[0, :, None] * v[0] * 0, torch.zeros_like(v)
        for t in range(q.shape[0]):
            state = state * g[t].exp()
            state += torch.outer(k[t], v[t])
            out[t] = q[t] @ state
        return out

    error, gradient_error, report = train_both(every_head(head), delta_arguments()[:4])
    assert patterns(report) == ["simple_gla"]
    assert max(error, gradient_error) < 1e-5


def decayed(q: Tensor, k: Tensor, v: Tensor, total: Tensor, *, later: bool = False) -> Tensor:
    """Attention of one head with the decay between two tokens: ``total`` [T] is a sum of log decays up to each."""
    difference = total[:, None] - total
    decay = difference.triu().exp().triu() if later else difference.tril().exp().tril()
    return ((q @ k.T) * decay) @ v


OPEN_VMAP = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="torch 2.11 and 2.12 capture no product of matrices of open sizes under vmap, whatever the backend",
)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=OPEN_VMAP)])
def test_a_parallel_form(dynamic: bool) -> None:
    q, k, v, g, _ = delta_arguments(length=9)
    ours = compiled(every_head(decayed), dynamic=dynamic)
    for length in (9, 7):
        given = [x[:, :length] for x in (q, k, v, g.cumsum(1))]
        assert worst_error(ours(*given), every_head(decayed)(*given)) < 1e-5


def test_attention_to_later_tokens() -> None:
    q, k, v, g, _ = delta_arguments()
    fn = every_head(lambda *x: decayed(*x, later=True))
    error, gradient_error, report = train_both(fn, [q, k, v, g.cumsum(1)])
    assert not report.matches
    assert max(error, gradient_error) < 1e-5


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_cut_gradient(cut: int) -> None:
    def head(*given: Tensor) -> Tensor:
        return decayed(*(x.detach() if at == cut else x for at, x in enumerate(given)))

    q, k, v, g, _ = delta_arguments()
    error, gradient_error, _ = train_both(every_head(head), [q, k, v, g.cumsum(1)])
    assert max(error, gradient_error) < 1e-5


def test_under_autocast() -> None:
    q, k, v, g, _ = delta_arguments()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, plain, report = run_both(every_head(decayed), [q, k, v, g.cumsum(1)])
    assert codes(report) == {"transform"}
    assert worst_error(ours, plain) < 1e-5


def scanned_gates(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Decay and write, scanned."""

    def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return first[0] + second[0], first[1] * second[0].exp() + second[1]

    writes = k[..., :, None] * v[..., None, :]
    states = associative_scan(combine, (g[..., None, None], writes), dim=1, combine_mode="generic")[1]
    return torch.einsum("bthk,bthkv->bthv", q, states)


def scanned_transitions(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule as matrices that a token multiplies the state by, scanned with its writes."""

    def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return second[0] @ first[0], second[0] @ first[1] + second[1]

    scaled = beta[..., None, None] * k[..., :, None]
    transitions = g[..., None, None].exp() * (torch.eye(k.shape[-1]) - scaled * k[..., None, :])
    states = associative_scan(combine, (transitions, scaled * v[..., None, :]), dim=1, combine_mode="generic")[1]
    return (q[..., None, :] @ states)[..., 0, :]


@pytest.mark.parametrize(("fn", "found"), [(scanned_gates, ["simple_gla"]), (scanned_transitions, DELTA)])
@pytest.mark.parametrize("length", [5, 8, 13])
def test_associative_scan(fn: Any, found: list[str], length: int) -> None:
    error, gradient_error, report = train_both(fn, delta_arguments(length=length))
    assert patterns(report) == found
    assert max(error, gradient_error) < 1e-5


def test_a_scan_that_adds_the_wrong_way_round() -> None:
    """The newer token's write decays, and not the older's."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        def combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return first[0] + second[0], first[1] + second[1] * first[0].exp()

        writes = k[..., :, None] * v[..., None, :]
        states = associative_scan(combine, (g[..., None, None], writes), dim=1, combine_mode="generic")[1]
        return torch.einsum("bthk,bthkv->bthv", q, states)

    error, gradient_error, _ = train_both(fn, delta_arguments(length=8))
    assert max(error, gradient_error) < 1e-5
