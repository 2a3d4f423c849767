"""The backend under the modes and wrappers people train and serve with: same numbers as eager, still matched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kdacompile.report.collect import collecting
from tests.backend.layers import (
    Layer,
    compiled,
    delta_arguments,
    gated_delta_loop,
    gla_step,
    patterns,
    run_both,
    step_arguments,
    train_both,
)
from tests.compare import relative_error, worst_error

DELTA = ["gated_delta_rule"]


@pytest.mark.parametrize(
    ("mode", "inner"),
    [(torch.no_grad, "eager"), (torch.inference_mode, "eager"), (torch.inference_mode, "inductor")],
)
def test_without_autograd(mode: Callable[[], Any], inner: str) -> None:
    with mode():
        ours, plain, report = run_both(Layer(), [torch.randn(2, 5, 12)], inner)
    assert patterns(report) == DELTA
    assert worst_error(ours, plain) < 1e-5


@pytest.mark.parametrize("where", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_mode_switched_inside_the_graph(where: Callable[[], Any]) -> None:
    def fn(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        with where():
            mixed = gated_delta_loop(*arguments)
        return mixed * 2, arguments[2] * 3

    error, gradient_error, report = train_both(fn, delta_arguments())
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def test_first_used_where_gradients_are_off() -> None:
    """The op must not slip into the block that only looks at its result."""

    def fn(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        mixed = gated_delta_loop(*arguments)
        with torch.no_grad():
            size = mixed.abs().mean()
        return mixed / size, size

    error, gradient_error, report = train_both(fn, delta_arguments())
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def test_first_used_in_inference_mode() -> None:
    def fn(*arguments: Tensor) -> Tensor:
        mixed = gated_delta_loop(*arguments)
        with torch.inference_mode():
            size = mixed.abs().mean()
        return mixed * mixed.sum() + size.item() * 0

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        error, gradient_error, report = train_both(fn, delta_arguments())
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


# -- autocast ----------------------------------------------------------------------------------------------------


def matmul_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Products that autocast runs in bf16; gates stay fp32."""
    state = g.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, t].unsqueeze(-1) @ ((v[:, t] - old) * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, dim=1)


def product_state_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same from a state that has the dtype of a product, autocast's: products of two dtypes follow."""
    dtype = (q[:, 0] @ k[:, 0].mT).dtype
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()[..., None, None]
        old = ((k[:, t].unsqueeze(-2) * decay) @ state).squeeze(-2)
        new = (v[:, t] - old) * beta[:, t].unsqueeze(-1)
        state = state * decay + k[:, t].unsqueeze(-1) @ new.unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("mixer", [gated_delta_loop, matmul_loop, product_state_loop])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(mixer: Callable[..., Any], inside: bool) -> None:
    layer, x = Layer(mixer), torch.randn(2, 5, 12)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer.mixed(x)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        ours, plain, report = run_both(fn if inside else layer.mixed, [x])
    with torch.no_grad():
        exact = layer.double().mixed(x.double())
    assert patterns(report) == DELTA
    assert ours.dtype == plain.dtype
    # The op keeps fp32 where autocast rounds each product to bf16: no further from the truth than eager is.
    assert relative_error(ours, exact) <= 1.5 * relative_error(plain, exact)
    assert relative_error(ours, plain) < 3e-2


def test_autocast_training() -> None:
    layer, x = Layer(matmul_loop), torch.randn(2, 5, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error, gradient_error, report = train_both(layer, [x], "aot_eager", tuple(layer.parameters()))
    assert patterns(report) == DELTA
    assert error < 3e-2
    assert gradient_error < 6e-2


def test_a_bf16_model() -> None:
    layer, x = Layer().bfloat16(), torch.randn(2, 5, 12, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, plain, report = run_both(layer, [x])
    assert patterns(report) == DELTA
    assert ours.dtype == plain.dtype
    assert relative_error(ours, plain) < 2e-2


# -- higher-order operators -----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[return-value]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_activation_checkpoint(inner: str) -> None:
    model = Checkpointed()
    error, gradient_error, report = train_both(model, [torch.randn(2, 5, 12)], inner, tuple(model.parameters()))
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def _nested() -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    first, second = Layer(), Layer()
    region: Any = torch.compiler.nested_compile_region(Layer.forward)
    return lambda x: region(second, region(first, x)), (*first.parameters(), *second.parameters())


def test_nested_compile_region() -> None:
    fn, parameters = _nested()
    error, gradient_error, report = train_both(fn, [torch.randn(2, 5, 12)], "inductor", parameters)
    assert set(patterns(report)) == set(DELTA)
    assert max(error, gradient_error) < 1e-5


def test_nested_compile_region_run_eagerly() -> None:
    with torch.no_grad():  # torch itself cannot differentiate a nested region outside AOTAutograd
        ours, plain, report = run_both(_nested()[0], [torch.randn(2, 5, 12)])
    assert set(patterns(report)) == set(DELTA)
    assert worst_error(ours, plain) < 1e-5


class _Scaled(torch.autograd.Function):
    """Forward times two, backward times five: no derivative of each other, on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 5


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_custom_autograd_functions_beside_the_region(inner: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return _Scaled.apply(gated_delta_loop(q, k, _Scaled.apply(v), g, beta))  # type: ignore[no-any-return]

    error, gradient_error, report = train_both(fn, delta_arguments(), inner)
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def test_a_custom_autograd_function_inside_the_region_keeps_its_backward() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        outs: list[Tensor] = []
        for t in range(q.shape[1]):
            state = _Scaled.apply(state) * 0.5 * g[:, t].exp()[..., None, None]
            old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - old) * beta[:, t, :, None])
            outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return torch.stack(outs, dim=1)

    error, gradient_error, report = train_both(fn, delta_arguments())
    assert not report.matches
    assert max(error, gradient_error) < 1e-5


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_function_transforms(transform: Callable[..., Any]) -> None:
    def fn(*arguments: Tensor) -> Tensor:
        q, k, v, g, beta = arguments
        return transform(lambda x: gated_delta_loop(q, k, x, g, beta).sin().sum())(v)

    with torch.no_grad():
        ours, plain, _ = run_both(fn, delta_arguments(batch=1, length=3))
    assert worst_error(ours, plain) < 1e-5


# -- dropout, two regions, buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_dropout_of_nothing(inner: str) -> None:
    class Dropped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.0, self.training))

    layer = Dropped()
    error, gradient_error, report = train_both(layer, [torch.randn(2, 5, 12)], inner, tuple(layer.parameters()))
    assert patterns(report) == DELTA
    assert max(error, gradient_error) < 1e-5


def test_dropout_on_the_way_in_keeps_its_random_numbers() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_loop(q, k, nn.functional.dropout(v, 0.5), g, beta)

    run = compiled(fn)
    torch.manual_seed(0)
    with collecting() as report:
        ours = run(*delta_arguments())
    torch.manual_seed(0)
    assert patterns(report) == DELTA
    assert worst_error(ours, fn(*delta_arguments())) < 1e-5


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_two_regions_one_feeding_the_other(inner: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        first = gated_delta_loop(q, k, v, g, beta)
        return gated_delta_loop(q.sigmoid(), k, first.relu(), g, beta)

    error, gradient_error, report = train_both(fn, delta_arguments(), inner)
    assert patterns(report) == DELTA * 2
    assert max(error, gradient_error) < 1e-5


def test_two_regions_side_by_side_with_one_state() -> None:
    """The second region starts from the first one's final state."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, state = gla_step(q, k, v, g, state)
        second, state = gla_step(q + 1, k, first.tanh(), g, state)
        return first, second, state

    arguments = step_arguments()
    error, gradient_error, _ = train_both(fn, arguments)
    assert max(error, gradient_error) < 1e-5
