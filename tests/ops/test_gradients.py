"""Gradients of both functional ops and of the in-place step, against autograd through the float64 recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kdacompile.ops import errors
from tests.ops.cases import GATE_FNS, GATES, TENSORS, Case, assert_close, make_case, oracle, relative_error

FAMILY = [("none", "log"), *((gate, fn) for gate in GATES[1:] for fn in GATE_FNS)]


def _leaves(case: Case) -> Case:
    return case.with_tensors(
        **{n: None if x is None else x.detach().clone().requires_grad_() for n, x in case.tensors.items()}
    )


def _gradients(outputs: tuple[Tensor, ...], case: Case, weights: tuple[Tensor | None, ...]) -> dict[str, Any]:
    leaves = {name: x for name, x in case.tensors.items() if x is not None and x.requires_grad}
    used = [(out, weight.to(out.dtype)) for out, weight in zip(outputs, weights, strict=True) if weight is not None]
    found = torch.autograd.grad([u[0] for u in used], list(leaves.values()), [u[1] for u in used], allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _weights(case: Case) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(99)
    o, state = (x.shape for x in oracle(case))
    return torch.randn(o, generator=random), torch.randn(state, generator=random)


def _compare(case: Case, actual: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    for name in expected:
        got, want = actual[name], expected[name]
        assert got is not None and want is not None, name
        assert got.dtype == case.tensors[name].dtype and got.is_contiguous()
        assert relative_error(got, want.double()) <= bound, (name, relative_error(got, want.double()))


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "plain"])
@pytest.mark.parametrize(("gate", "gate_fn"), FAMILY)
def test_every_gate(gate: str, gate_fn: str, delta: bool) -> None:
    for length in (1, 19):
        case = _leaves(make_case(gate=gate, gate_fn=gate_fn, delta=delta, length=length))
        weights = _weights(case)
        expected = _gradients(oracle(case), case, weights)
        _compare(case, _gradients(case.run(), case, weights), expected, 3e-5)
        if length == 1:
            _compare(case, _gradients(case.run_step(), case, weights), expected, 3e-5)


def test_packed_sequences() -> None:
    case = _leaves(make_case(batch=1, length=20, sequences=3))
    packed = Case(case.tensors, case.options, torch.tensor([0, 7, 7, 20]))
    weights = _weights(packed)
    _compare(packed, _gradients(packed.run(), packed, weights), _gradients(oracle(packed), packed, weights), 3e-5)


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_one_output_unused(used: str) -> None:
    case = _leaves(make_case(length=19))
    weights = tuple(w if name == used else None for name, w in zip(("o", "final_state"), _weights(case), strict=True))
    expected = _gradients(oracle(case), case, weights)
    actual = _gradients(case.run(), case, weights)
    if used == "final_state":  # q does not reach the state
        assert expected.pop("q") is None and actual.pop("q") is None
    _compare(case, actual, expected, 3e-5)


@pytest.mark.parametrize("name", TENSORS)
def test_one_tensor_wanted(name: str) -> None:
    case = make_case(gate_fn="softplus", length=9)
    case = case.with_tensors(**{name: case.tensors[name].clone().requires_grad_()})
    o_weight, state_weight = _weights(case)
    weights = (o_weight, None if name == "q" else state_weight)  # the state does not depend on q
    _compare(case, _gradients(case.run(), case, weights), _gradients(oracle(case), case, weights), 3e-5)


def test_sixteen_bit_gradients_are_rounded_once() -> None:
    case = _leaves(make_case(length=19).to(torch.bfloat16).with_options(out_dtype=torch.float32))
    weights = _weights(case)
    _compare(case, _gradients(case.run(), case, weights), _gradients(oracle(case), case, weights), 2.0**-8)


def test_no_tokens() -> None:
    case = _leaves(make_case(length=0))
    _, state = case.run()
    weight = torch.randn_like(state)
    (gradient,) = torch.autograd.grad(state, case.tensors["initial_state"], weight)
    assert torch.equal(gradient, weight)
    assert gradient.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("length", [1, 2, 19])
@pytest.mark.parametrize("name", ["o", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_may_be_overwritten(length: int, name: str, dtype: torch.dtype) -> None:
    """Results are tensors of their own, whose history an in-place write joins, whatever views the kernels make."""
    case = make_case(length=length)
    case = _leaves(case.with_tensors(**{n: None if x is None else x.to(dtype) for n, x in case.tensors.items()}))
    weights = _weights(case)
    expected = _gradients(oracle(case), case, weights)
    o, state = case.run()
    (o if name == "o" else state).mul_(2).add_(1)
    assert not o._is_view() and not state._is_view()
    halves = [w / 2 if n == name else w for n, w in zip(("o", "state"), weights, strict=True)]
    _compare(case, _gradients((o, state), case, (halves[0], halves[1])), expected, 3e-5)


def test_in_place_step() -> None:
    """The state's old value is differentiated through, though it has been overwritten."""
    case = _leaves(make_case(length=1))
    weights = _weights(case)
    expected = _gradients(oracle(case), case, weights)
    state = case.tensors["initial_state"] * 1.0
    options = {n: x for n, x in case.options.items() if n != "chunk_size"}
    q, k, v, g, beta, _, A_log, dt_bias = case.positional
    o = torch.ops.kdacompile.linear_attention_step_(q, k, v, g, beta, state, A_log, dt_bias, None, **options)
    assert_close((o, state), oracle(case), 1e-5)
    _compare(case, _gradients((o, state), case, weights), expected, 3e-5)


@pytest.mark.parametrize("name", TENSORS[:6])
def test_second_derivative_is_refused(name: str) -> None:
    """With create_graph the first derivative is right; differentiating it raises instead of leaving terms out."""
    case = make_case(length=3)
    x = case.tensors[name].clone().requires_grad_()
    case = case.with_tensors(**{name: x})
    o, state = case.run()
    loss = o.square().sum() + state.sum()
    (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(plain, gradient)
    with pytest.raises(errors.DoubleBackwardError):
        (gradient.square().sum() + x.sum()).backward()


def test_forward_mode_is_refused() -> None:
    case = make_case(length=3)
    q = case.tensors["q"]
    with pytest.raises(errors.ForwardModeError, match="linear_attention has no forward-mode derivative"):
        torch.func.jvp(lambda x: case.with_tensors(q=x).run()[0], (q,), (q,))
    with pytest.raises(errors.ForwardModeError), forward_ad.dual_level():
        case.with_tensors(q=forward_ad.make_dual(q, q)).run()
    with forward_ad.dual_level():  # none of this has a tangent
        assert torch.equal(case.run()[0], make_case(length=3).run()[0])


@pytest.mark.parametrize("name", ["q", "k"])
def test_forward_mode_of_a_gradient_is_refused(name: str) -> None:
    """Tangents of the level further out are seen too: a gradient must not look like a constant to it."""
    case = make_case(length=3)
    q, x = case.tensors["q"], case.tensors[name]

    def slope(x: Tensor) -> Tensor:
        other = case.with_tensors(**{name: x})
        return torch.func.grad(lambda q: other.with_tensors(q=q).run()[0].square().sum())(x if name == "q" else q)

    with pytest.raises(errors.ForwardModeError):
        torch.func.jvp(slope, (x,), (x,))


def test_functorch_reverse_mode() -> None:
    case = _leaves(make_case(length=3))
    expected = torch.autograd.grad(case.run()[0].sum(), case.tensors["q"])[0]
    actual = torch.func.grad(lambda x: case.with_tensors(q=x).run()[0].sum())(case.tensors["q"].detach())
    torch.testing.assert_close(actual, expected)


def test_nested_functorch_is_refused() -> None:
    """The inner derivative must not look like a constant to the outer one."""
    case = make_case(length=3)

    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: case.with_tensors(q=x, k=x).run()[0].sum())(x).sum()

    with pytest.raises(errors.DoubleBackwardError):
        torch.func.grad(slope)(case.tensors["q"])
