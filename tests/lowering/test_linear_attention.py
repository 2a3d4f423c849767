"""The executor against the fp64 token recurrence: every row of the family, lengths, chunk sizes, gates and packings.

Tests that call the entry points themselves run once with the executor and once with the CPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import ArgumentError, run, run_linear_attention, run_linear_attention_step
from kdacompile.lowering.calls import Call
from kdacompile.lowering.cpu import runs_recurrence
from kdacompile.lowering.operands import given
from tests.lowering.verify import Case, executor, make_inputs, oracle, relative_error, verify

ROWS = [(gate, delta) for gate in ("none", "head", "token", "channel") for delta in (True, False)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}


def present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["executor", "recurrence"])
def _target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "executor":
        monkeypatch.setattr(run, "prepare_recurrence", lambda *_, **__: None)
    elif not runs_recurrence(torch.zeros(1, 1, 1, 4)):
        pytest.skip("no C compiler")


both_targets = pytest.mark.usefixtures("_target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 17, 64, 100, 256])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_every_row_and_length(gate: str, delta: bool, length: int, dtype: torch.dtype) -> None:
    verify(executor, Case(gate, delta, length, dtype=dtype), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("chunk_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_chunk_sizes(gate: str, delta: bool, chunk_size: int) -> None:
    verify(executor, Case(gate, delta, 100, chunk_size=chunk_size), tolerance=2e-6)


@pytest.mark.parametrize("lengths", [(5, 0, 64, 33), (64, 128), (0, 0, 7), (100,), (1, 1, 1)])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_packed_sequences(gate: str, delta: bool, lengths: tuple[int, ...]) -> None:
    verify(executor, Case(gate, delta, lengths=lengths), tolerance=2e-6)
    verify(executor, Case(gate, delta, lengths=lengths, initial_state=False, beta=False), tolerance=1e-4)


@pytest.mark.parametrize("strength", ["mild", "strong", "reset"])
@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize(("gate", "delta"), [row for row in ROWS if row[0] != "none"])
def test_gates_of_any_strength(gate: str, delta: bool, gate_form: str, strength: str) -> None:
    case = Case(gate, delta, 150, gate_form=gate_form, strength=strength, value_heads=4)
    verify(executor, case, tolerance=2e-6)
    verify(executor, replace(case, lengths=(70, 80)), tolerance=2e-6)


@both_targets
@pytest.mark.parametrize("g", [-1000.0, -5.0, -80.0, -float("inf"), 0.0])
@pytest.mark.parametrize("gate", ["head", "token", "channel"])
def test_constant_gates(gate: str, g: float) -> None:
    case = Case(gate, True, 130)
    inputs = make_inputs(case)
    inputs = replace(inputs, g=torch.full_like(present(inputs.g), g))
    o, state = run_linear_attention(inputs)
    expected_o, expected_state = oracle(case, inputs)
    assert relative_error(o, expected_o) < 2e-6
    assert relative_error(state, expected_state) < 2e-6


@pytest.mark.parametrize("widths", [(16, 16), (17, 5), (64, 256), (256, 32), (1, 1)])
@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (3, 3)])
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_widths_and_grouped_heads(gate: str, heads: tuple[int, int], widths: tuple[int, int]) -> None:
    case = Case(gate, True, 70, heads=heads[0], value_heads=heads[1], key_width=widths[0], value_width=widths[1])
    verify(executor, case, tolerance=2e-6)


@both_targets
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_no_tokens(gate: str, delta: bool) -> None:
    case = Case(gate, delta, 0)
    inputs = make_inputs(case)
    o, state = run_linear_attention(inputs)
    assert o.shape == (2, 0, 2, 32)
    assert torch.equal(state, present(inputs.initial_state))
    assert state.data_ptr() != present(inputs.initial_state).data_ptr()
    verify(lambda call, _: run_linear_attention(call), Case(gate, delta, lengths=(0, 0)), tolerance=0)


@both_targets
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_outputs_do_not_see_the_future(gate: str, delta: bool, functional: bool) -> None:
    case = Case(gate, delta, 150, strength="strong")
    inputs = make_inputs(case)
    later = make_inputs(replace(case, seed=1))

    def output(call: Call) -> Tensor:
        leaves = {name: x.clone().requires_grad_(functional) for name, x in given(call).items()}
        return run_linear_attention(replace(call, **leaves))[0].detach()

    base = output(inputs)
    for t in (1, 15, 63, 64, 77, 149):
        mixed: dict[str, Any] = {}
        for name in ("q", "k", "v", "g", "beta"):
            ours, theirs = getattr(inputs, name), getattr(later, name)
            if ours is not None and ours.dim() > 1:
                mixed[name] = torch.cat((ours[:, :t], theirs[:, t:]), 1)
        assert torch.equal(output(replace(inputs, **mixed))[:, :t], base[:, :t])


@both_targets
@pytest.mark.parametrize("lengths", [None, (40, 0, 110)])
@pytest.mark.parametrize(("gate", "delta"), [("none", True), ("token", False), ("channel", True)])
def test_earlier_tokens_do_not_see_what_is_not_finite(gate: str, delta: bool, lengths: tuple[int, ...] | None) -> None:
    inputs = make_inputs(Case(gate, delta, 150, lengths=lengths, strength="strong"))
    base, _ = run_linear_attention(inputs)
    for name in given(inputs).keys() & {"q", "k", "v", "g", "beta"}:
        for t, number in ((50, torch.nan), (77, torch.inf)):
            changed = given(inputs)[name].clone()
            changed[0, t, 1] = number
            o, state = run_linear_attention(replace(inputs, **{name: changed}))
            seen = torch.zeros_like(o, dtype=torch.bool)
            seen[0, t : t + 1 if name == "q" else None, 1] = True
            assert torch.equal(o[~seen], base[~seen]) and not o[seen].isfinite().any()
            of_head = state[-1 if lengths else 0, 1]
            assert of_head.isfinite().all() if name == "q" else not of_head.isfinite().all()
            assert state.isfinite().sum() >= state.numel() - of_head.numel()


@both_targets
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_one_token_step(gate: str, delta: bool) -> None:
    for gate_form, strength in (("log", "mild"), ("factor", "mild"), ("log", "reset"), ("factor", "reset")):
        case = Case(gate, delta, 1, gate_form=gate_form, strength=strength, value_heads=4)
        inputs = make_inputs(case)
        state = present(inputs.initial_state).clone()
        o, final = run_linear_attention_step(inputs)
        expected_o, expected_state = oracle(case, inputs)
        assert relative_error(o, expected_o) < 1e-6
        assert relative_error(final, expected_state) < 1e-6
        assert torch.equal(state, present(inputs.initial_state))


@both_targets
@pytest.mark.parametrize("functional", [False, True])
def test_inputs_are_left_alone_and_results_are_fresh(functional: bool) -> None:
    case = Case("token", True, 64, batch=1, heads=1, value_heads=1)
    call = make_inputs(case)
    inputs = [present(x).requires_grad_(functional) for x in call.recurrent]
    before = [x.detach().clone() for x in inputs]
    o, state = run_linear_attention(call)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert o.is_contiguous() and state.is_contiguous()
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert o.untyped_storage().data_ptr() not in storages
    assert state.untyped_storage().data_ptr() not in storages


@both_targets
def test_strided_inputs() -> None:
    case = Case("channel", True, 100)
    inputs = make_inputs(case)
    turned: Any = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in given(inputs).items()}
    o, _ = run_linear_attention(replace(inputs, **turned))
    assert relative_error(o, oracle(case, inputs)[0]) < 2e-6


@both_targets
def test_repeated_keys_keep_the_inverse_accurate() -> None:
    """Equal keys with beta 1 make the powers of A_kk explode; a Neumann series would lose every digit."""
    case = Case("none", True, 128)
    inputs = make_inputs(case)
    inputs = replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k), beta=torch.ones_like(present(inputs.beta)))
    o, state = run_linear_attention(inputs)
    expected_o, expected_state = oracle(case, inputs)
    assert relative_error(o, expected_o) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


@both_targets
@pytest.mark.parametrize("change", [{"gate_fn": "softplus"}, {"gate_fn": "squared"}, {"chunk_size": -1}])
def test_calls_that_are_not_prepared(change: dict[str, Any]) -> None:
    """What else can be wrong with a call the op has found out: ``tests/ops/test_errors.py``."""
    with pytest.raises(ArgumentError):
        run_linear_attention(replace(make_inputs(Case("token", True, 20)), **change))


@both_targets
@pytest.mark.parametrize("bounds", [[0, 10], [1, 20], [0, 15, 10, 20]])
def test_bad_cu_seqlens(bounds: list[int]) -> None:
    inputs = make_inputs(Case("token", True, 20, batch=1, initial_state=False))
    with pytest.raises(ArgumentError):
        run_linear_attention(replace(inputs, cu_seqlens=torch.tensor(bounds)))


@pytest.mark.parametrize("run", [run_linear_attention, run_linear_attention_step])
def test_half_precision_is_the_callers_business(run: Callable[[Call], object]) -> None:
    inputs = make_inputs(Case("token", True, 1, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError):
        run(inputs)
