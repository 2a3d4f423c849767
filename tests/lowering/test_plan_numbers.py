"""A plan's numbers: the program that the target computes is the same function, and its buffers cost no accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.plan import Options, naive_program, plan
from kdacompile.lowering.scratch import Scratch
from tests.lowering.simulate import simulate
from tests.lowering.verify import Case, make_inputs, oracle, relative_error, verify


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("lengths", [None, (70, 0, 33)])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_the_targets_program_is_the_same_function(gate: str, delta: bool, lengths: tuple[int, ...] | None) -> None:
    """Signs moved, sums split and operands narrowed (to fp32 here) change nothing, at any gate."""
    for strength in ("mild", "strong"):
        found = plan(linear_attention_program(gate, delta), "ascend910b", io="fp32", K=32, V=32)
        case = Case(gate, delta, 130, strength=strength, lengths=lengths, chunk_size=64)
        verify(simulate(found), case, tolerance=2e-6)


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_the_naive_pipeline_is_the_same_function(gate: str, delta: bool) -> None:
    """As it stands and optimised, where gates are mild enough for its factored exponentials."""
    for optimise in (False, True):
        found = plan(naive_program(gate, delta), "ascend910b", optimise, io="fp32", K=32, V=32)
        verify(simulate(found), Case(gate, delta, 130, chunk_size=64), tolerance=1e-4)


@pytest.mark.parametrize("strength", ["mild", "strong"])
@pytest.mark.parametrize("row", [("channel", True), ("token", True), ("channel", False)])
def test_buffers_cost_no_accuracy(row: tuple[str, bool], strength: str) -> None:
    """T = 4096, bf16: within 1.2x of rounding the operands of products alone, and at most 6e-3.

    The carry's change in bf16 is an option with a price: it shows in the state.
    """
    case = Case(*row, 4096, batch=1, heads=1, value_heads=1, scale=0.125, strength=strength)
    inputs = rounded(make_inputs(case))
    expected = oracle(case, inputs)
    operands = errors(case, inputs, expected, Options(narrow=False))
    everything = errors(case, inputs, expected, Options())
    for least, found in zip(operands, everything, strict=True):
        assert found <= 1.2 * least
        assert found <= 6e-3
    narrow = errors(case, inputs, expected, Options(narrow_update=True))
    assert 1.1 * everything[1] < narrow[1]


def errors(case: Case, inputs: Call, expected: tuple[Tensor, Tensor], options: Options) -> tuple[float, float]:
    program = linear_attention_program(case.gate, case.delta)
    found = plan(program, "ascend910b", options, K=32, V=32, C=64, T=case.length, H=1)
    o, state = simulate(found)(inputs, Scratch())
    return relative_error(o, expected[0]), relative_error(state, expected[1])


def rounded(inputs: Call) -> Call:
    """Inputs that bf16 holds exactly; the state is fp32."""
    names = ("q", "k", "v", "g", "beta")
    given = {name: x.bfloat16().float() for name in names if (x := getattr(inputs, name)) is not None}
    return replace(inputs, **given)
