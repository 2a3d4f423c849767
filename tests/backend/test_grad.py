"""Training: outputs and all gradients equal eager's; where the rewrite would change a gradient it declines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.layers import (
    Layer,
    codes,
    delta_arguments,
    gated_delta_loop,
    gla_step,
    patterns,
    run_both,
    step_arguments,
    train_both,
)
from tests.compare import worst_error
from tests.spellings import REGISTRY

CHUNKED = REGISTRY["kda_solve_triangular"]
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "kda_chunked": (CHUNKED.fn, CHUNKED.make_inputs(T=20), "kda"),
    "gated_delta_loop": (gated_delta_loop, delta_arguments(), "gated_delta_rule"),
    "gla_step": (gla_step, step_arguments(), "gla"),
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_eager(name: str, inner: str) -> None:
    fn, arguments, pattern = CASES[name]
    error, gradient_error, report = train_both(fn, arguments, inner)
    assert patterns(report) == [pattern]
    assert error < 1e-5
    assert gradient_error < 1e-5


def test_parameters_of_the_layer_around_it_get_their_gradients() -> None:
    layer = Layer()
    error, gradient_error, report = train_both(layer, [torch.randn(2, 5, 12)], "aot_eager", tuple(layer.parameters()))
    assert patterns(report) == ["gated_delta_rule"]
    assert max(error, gradient_error) < 1e-5


def test_only_some_inputs_want_gradients() -> None:
    q, k, v, g, beta = delta_arguments()
    error, gradient_error, report = train_both(lambda v: gated_delta_loop(q, k, v, g, beta), [v])
    assert patterns(report) == ["gated_delta_rule"]
    assert max(error, gradient_error) < 1e-5


def normed_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_loop(q, F.rms_norm(k, k.shape[-1:]) * k.shape[-1] ** -0.5, v, g, beta)


def test_a_buffer_that_a_call_made_for_itself() -> None:
    """``rms_norm`` writes in place what it made itself: no node of the graph names it."""
    error, gradient_error, report = train_both(normed_keys, delta_arguments())
    assert patterns(report) == ["gated_delta_rule"]
    assert max(error, gradient_error) < 1e-5


# -- a gradient cut inside the region -----------------------------------------------------------------------------


def token(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = state * g.exp()[..., None, None]
    old = torch.einsum("bhkv,bhk->bhv", state, k)
    return state + torch.einsum("bhk,bhv->bhkv", k, (v - old) * beta[..., None])


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, between: Callable[[int, Tensor], Tensor] = lambda _, s: s
) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = between(t, token(state, k[:, t], v[:, t], g[:, t], beta[:, t]))
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def detached_half_way(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return loop(q, k, v, g, beta, between=lambda t, s: s.detach() if t == 2 else s)


def data_half_way(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return loop(q, k, v, g, beta, between=lambda t, s: s.data if t == 2 else s)


def gate_detached_inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return loop(q, k, v, g.detach(), beta)


def exponential_detached(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().detach()[..., None, None]
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def old_value_without_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        with torch.no_grad():
            old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def keys_used_twice_detached_once(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, t].detach())
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def keys_detached_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    cut = k.detach()
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = torch.einsum("bhkv,bhk->bhv", state, cut[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def first_half_without_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        with torch.set_grad_enabled(t >= 3):
            state = token(state, k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, dim=1)


def all_without_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    with torch.no_grad():
        mixed = loop(q, k, v, g, beta)
    return mixed * v


def all_in_inference_of_a_copy(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Everything that enters is cut: the region's inputs want no gradient."""
    q, k, w, g, beta = (x.detach() for x in (q, k, v, g, beta))
    return loop(q, k, w, g, beta) + v


CUTS = (
    detached_half_way,
    data_half_way,
    gate_detached_inside,
    exponential_detached,
    old_value_without_gradient,
    keys_used_twice_detached_once,
    keys_detached_before,
    first_half_without_gradient,
    all_without_gradient,
    all_in_inference_of_a_copy,
)
REWRITTEN = {all_in_inference_of_a_copy, all_without_gradient, gate_detached_inside}


@pytest.mark.parametrize("fn", CUTS, ids=lambda fn: fn.__name__)
def test_a_cut_gradient_stays_cut(fn: Callable[..., Any]) -> None:
    error, gradient_error, report = train_both(fn, delta_arguments())
    assert max(error, gradient_error) < 1e-5
    if fn not in REWRITTEN:
        assert not report.matches
        assert codes(report) & {"grad", "proof", "escape", "operator"}


@pytest.mark.parametrize("fn", CUTS, ids=lambda fn: fn.__name__)
def test_without_gradients_a_cut_does_not_matter(fn: Callable[..., Any]) -> None:
    with torch.no_grad():
        ours, plain, report = run_both(fn, delta_arguments())
    assert worst_error(ours, plain) < 1e-5
    assert len(report.matches) == 1
