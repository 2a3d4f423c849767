"""Gradients of the executor: fp64 gradcheck, ``torch.func.vjp``, and the oracle's own gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import run_linear_attention, run_linear_attention_step
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.patterns.recurrence.definition import token_recurrence
from tests.lowering.verify import Case, make_inputs

Results = Callable[..., tuple[Tensor, Tensor]]
ROWS = [(gate, delta) for gate in ("none", "head", "token", "channel") for delta in (True, False)]


def small(gate: str, delta: bool, **changes: Any) -> Case:
    case = Case(gate, delta, 19, batch=1, heads=1, value_heads=2, key_width=3, value_width=2, dtype=torch.float64)
    return replace(case, **changes)


def gradients(function: Results, tensors: tuple[Tensor | None, ...], seed: int = 0) -> tuple[Tensor, ...]:
    """Gradients of a fixed random functional of both results with respect to every given tensor."""
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for result in function(*leaves):
        weight = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
        loss = loss + (result * weight).sum()
    given = [x for x in leaves if x is not None]
    return torch.autograd.grad(loss, given)


def reference(case: Case) -> Results:
    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        decay = g
        if decay is not None:
            decay = decay.double() if case.gate_form == "factor" else decay.double().exp()
            decay = decay if case.gate == "channel" else decay.unsqueeze(-1)
        return token_recurrence(q, k, v, decay, beta, state, delta=case.delta, scale=case.scale)

    return run


def ours(case: Case) -> Results:
    def run(*tensors: Any) -> tuple[Tensor, Tensor]:
        return run_linear_attention(with_tensors(call, tensors))

    call = make_inputs(case)
    return run


def with_tensors(call: Call, tensors: tuple[Any, ...]) -> Call:
    return replace(call, **dict(zip(RECURRENT, tensors, strict=True)))


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_gradcheck(gate: str, delta: bool) -> None:
    case = small(gate, delta)
    tensors: Any = [x if x is None else x.requires_grad_() for x in make_inputs(case).recurrent]
    assert torch.autograd.gradcheck(ours(replace(case, chunk_size=16)), tensors, fast_mode=True)


@pytest.mark.parametrize("strength", ["mild", "strong", "reset"])
@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_gradients_are_the_recurrences(gate: str, delta: bool, gate_form: str, strength: str) -> None:
    case = small(gate, delta, length=75, gate_form=gate_form, strength=strength)
    tensors = make_inputs(case).recurrent
    for x, expected in zip(gradients(ours(case), tensors), gradients(reference(case), tensors), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strength", ["mild", "strong", "reset"])
@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_fp32_gradients_are_accurate(gate: str, gate_form: str, strength: str) -> None:
    case = small(gate, True, length=130, gate_form=gate_form, strength=strength, dtype=torch.float32, key_width=16)
    tensors = make_inputs(case).recurrent
    for x, expected in zip(gradients(ours(case), tensors), gradients(reference(case), tensors), strict=True):
        assert ((x - expected).norm() / expected.norm()).item() < 2e-5


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_vjp_agrees_with_autograd(gate: str, delta: bool) -> None:
    case = small(gate, delta, length=40)
    tensors = make_inputs(case).recurrent
    given = [i for i, x in enumerate(tensors) if x is not None]

    def run(*some: Tensor) -> tuple[Tensor, Tensor]:
        full = list(tensors)
        for i, x in zip(given, some, strict=True):
            full[i] = x
        return ours(case)(*full)

    results, pull, *_ = torch.func.vjp(run, *[tensors[i] for i in given])
    generator = torch.Generator().manual_seed(0)
    weights = tuple(torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results)
    for x, expected in zip(pull(weights), gradients(ours(case), tensors), strict=True):
        torch.testing.assert_close(x, expected)


def test_vjp_through_zero_factors() -> None:
    case = small("channel", True, gate_form="factor", strength="reset")
    inputs = make_inputs(case)
    assert inputs.g is not None

    def run(g: Tensor) -> Tensor:
        return ours(case)(inputs.q, inputs.k, inputs.v, g, inputs.beta, inputs.initial_state)[0].sum()

    def oracle(g: Tensor) -> Tensor:
        return reference(case)(inputs.q, inputs.k, inputs.v, g, inputs.beta, inputs.initial_state)[0].sum()

    torch.testing.assert_close(torch.func.grad(run)(inputs.g), torch.func.grad(oracle)(inputs.g))


def test_packed_gradients() -> None:
    case = small("channel", True, lengths=(20, 0, 33), chunk_size=16)
    inputs = make_inputs(case)

    leaves: Any = [x.requires_grad_() for x in inputs.recurrent if x is not None]
    assert torch.autograd.gradcheck(ours(case), leaves, fast_mode=True)


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_step_gradients(gate: str, delta: bool) -> None:
    case = small(gate, delta, length=1)
    tensors = make_inputs(case).recurrent

    def step(*some: Any) -> tuple[Tensor, Tensor]:
        return run_linear_attention_step(with_tensors(make_inputs(case), some))

    for x, expected in zip(gradients(step, tensors), gradients(reference(case), tensors), strict=True):
        torch.testing.assert_close(x, expected)
