"""The C kernel of the recurrence's gradients: beside autograd through the recurrence in float64, and its memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import run_linear_attention_backward
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.lowering.cpu import compiler, recurrence, run_recurrence_backward, runs_backward
from kdacompile.lowering.operands import given
from tests.lowering.verify import Case, make_inputs, oracle, relative_error

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang", "g++", "clang++")), reason="no C compiler"
)

ROWS = [(gate, delta) for gate in ("none", "head", "token", "channel") for delta in (True, False)]
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def _nan_where_nothing_is_written() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def weights(case: Case, inputs: Call, o: bool = True, state: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the results, None for those that nobody asked for."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in oracle(case, inputs)]
    return tuple(x.to(case.dtype) if use else None for x, use in zip(drawn, (o, state), strict=True))  # type: ignore[return-value]


def expected(case: Case, inputs: Call, grads: tuple[Tensor | None, Tensor | None]) -> list[Tensor | None]:
    leaves: dict[str, Any] = {name: getattr(inputs, name) for name in RECURRENT}
    leaves = {name: None if x is None else x.double().requires_grad_() for name, x in leaves.items()}
    results = oracle(case, replace(inputs, **leaves))
    loss = sum((r * g.double()).sum() for r, g in zip(results, grads, strict=True) if g is not None)
    given = [x for x in leaves.values() if x is not None]
    found = iter(torch.autograd.grad(loss, given, allow_unused=True))  # type: ignore[arg-type]
    return [None if x is None else next(found) for x in leaves.values()]


def ours(inputs: Call, grads: tuple[Tensor | None, Tensor | None]) -> list[Tensor | None]:
    """Through the entry point, which may not fall back to the executor."""
    assert runs_backward(inputs.q)
    found = run_linear_attention_backward(grads, inputs, RECURRENT)
    return [found.get(name) for name in RECURRENT]


def check(case: Case, tolerance: float, **used: bool) -> None:
    inputs = make_inputs(case)
    grads = weights(case, inputs, **used)
    pairs = zip(RECURRENT, ours(inputs, grads), expected(case, inputs, grads), inputs.recurrent, strict=True)
    for name, x, truth, operand in pairs:
        if operand is None:
            assert x is None
            continue
        assert x is not None and x.shape == operand.shape and x.dtype is operand.dtype
        if truth is None or not truth.any():
            assert not x.any(), name
        else:
            assert relative_error(x, truth) <= tolerance, (name, relative_error(x, truth))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_every_row_and_length(gate: str, delta: bool, length: int, dtype: torch.dtype) -> None:
    case = Case(gate, delta, length, dtype=dtype, value_heads=4, value_width=40)
    check(case, TOLERANCE[dtype])
    without = replace(case, beta=False, initial_state=False, key_width=12, value_width=7)
    check(without, 1e-4 if dtype is torch.float32 else 1e-12)


@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize("strength", ["strong", "reset"])
@pytest.mark.parametrize("gate", ["head", "token", "channel"])
def test_strong_gates(gate: str, strength: str, gate_form: str) -> None:
    check(Case(gate, True, 60, gate_form=gate_form, strength=strength), TOLERANCE[torch.float32])


@pytest.mark.parametrize("length", [15, 16, 17, 32, 64, 300, 1100])
def test_states_are_computed_again_from_checkpoints(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root of the number of chunks is kept at a time; the bits are those of keeping all."""
    case = Case("channel", True, length, batch=1, key_width=24, dtype=torch.float64)
    inputs = make_inputs(case)
    kept = ours(inputs, weights(case, inputs))
    monkeypatch.setattr("kdacompile.lowering.cpu.backward.HISTORY", 0)
    check(case, 1e-12)
    for x, y in zip(kept, ours(inputs, weights(case, inputs)), strict=True):
        assert x is not None and y is not None and torch.equal(x, y)


@pytest.mark.parametrize("lengths", [(5, 0, 64, 33), (0, 0, 7), (1, 1, 1)])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_packed_sequences(gate: str, lengths: tuple[int, ...]) -> None:
    check(Case(gate, True, lengths=lengths), TOLERANCE[torch.float32])


@pytest.mark.parametrize("used", [{"o": False}, {"state": False}])
def test_one_result_unused(used: dict[str, bool]) -> None:
    check(Case("channel", True, 20), TOLERANCE[torch.float32], **used)


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 2), (2, 8)])
def test_any_number_of_threads_gives_the_same_bits(heads: int, value_heads: int) -> None:
    """Two lanes share their values among tasks, eight do not."""
    case = Case("channel", True, 50, batch=1, heads=heads, value_heads=value_heads, value_width=100)
    inputs, before = make_inputs(case), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 1, 3, 8):
            torch.set_num_threads(threads)
            found.append(ours(inputs, weights(case, inputs)))
        check(case, TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(x is not None and y is not None and torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("lengths", [None, (20, 0, 40)])
@pytest.mark.parametrize(("gate", "delta"), [*ROWS[:4], ("channel", True)])
def test_later_gradients_do_not_see_what_is_not_finite(
    gate: str, delta: bool, lengths: tuple[int, ...] | None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output whose gradient is infinite (a row divided by nothing) is its own and earlier tokens' loss."""
    if not kernel:
        monkeypatch.setattr("kdacompile.lowering.run_backward.runs_backward", lambda _: False)
    case = Case(gate, delta, 60, lengths=lengths, dtype=torch.float64)
    inputs, (o, state) = make_inputs(case), weights(case, make_inputs(case))
    assert o is not None
    o[0, 50, 1, 3] = torch.inf
    found = run_linear_attention_backward((o, state), inputs, RECURRENT)
    some = False
    for name, truth in zip(RECURRENT, expected(case, inputs, (o, state)), strict=True):
        if truth is not None:
            some |= not truth.isfinite().all()
            assert torch.equal(found[name].isfinite(), truth.isfinite()), name
            assert relative_error(found[name].nan_to_num(0, 0, 0), truth.nan_to_num(0, 0, 0)) <= 1e-12, name
    assert some


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_earlier_gradients_do_not_depend_on_later_tokens(gate: str, delta: bool) -> None:
    """Where the loss ends at a token, the gradients up to it are those of the tokens up to it, bit for bit."""
    long, end = Case(gate, delta, 60, initial_state=True), 37
    inputs = make_inputs(long)
    per_token = {name: x for name, x in given(inputs).items() if name != "initial_state" and x.dim() > 2}
    short: Any = replace(inputs, **{name: x[:, :end] for name, x in per_token.items()})
    changed: Any = replace(
        inputs, **{name: torch.cat((x[:, :end], 0.5 * x[:, end:]), 1) for name, x in per_token.items()}
    )
    grad_o, _ = weights(long, inputs, state=False)
    assert grad_o is not None
    grad_o[:, end:] = 0
    truth = ours(short, (grad_o[:, :end], None))
    for call in (inputs, changed):
        for name, x, y in zip(RECURRENT, ours(call, (grad_o, None)), truth, strict=True):
            if x is not None and y is not None and (name, gate) != ("g", "head"):  # that is a sum over all tokens
                assert torch.equal(x[:, :end] if name in per_token else x, y), name


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("gate", ["none", "token", "channel"])
def test_beta_of_0_and_1_with_equal_keys(gate: str, beta: float) -> None:
    """With a beta of 1 every token overwrites the same entry of the state; with 0 none does, and dbeta is not 0."""
    case = Case(gate, True, 40)
    inputs = make_inputs(case)
    assert inputs.beta is not None
    inputs = replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k), beta=torch.full_like(inputs.beta, beta))
    grads = weights(case, inputs)
    for name, x, truth in zip(RECURRENT, ours(inputs, grads), expected(case, inputs, grads), strict=True):
        if x is not None and truth is not None:
            assert relative_error(x, truth) <= TOLERANCE[torch.float32], name


def test_an_expanded_gradient() -> None:
    """That of ``o.sum()`` has strides of 0."""
    case = Case("channel", True, 33)
    inputs = make_inputs(case)
    shape = inputs.v.shape
    for x, y in zip(
        ours(inputs, (torch.ones(()).expand(shape), None)), ours(inputs, (torch.ones(shape), None)), strict=True
    ):
        assert x is not None and y is not None and torch.equal(x, y)


def test_operands_of_any_strides() -> None:
    case = Case("channel", True, 20)
    inputs = make_inputs(case)
    grads = weights(case, inputs)
    strided: Any = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in given(inputs).items()}
    turned = replace(inputs, **strided)
    assert grads[0] is not None and grads[1] is not None
    turned_grads = grads[0].transpose(1, 3).contiguous().transpose(1, 3), grads[1].mT.contiguous().mT
    for x, y in zip(ours(inputs, grads), ours(turned, turned_grads), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_normalised_keys() -> None:
    """The gradient through l2norm is that of autograd."""
    case = Case("token", True, 12, key_width=8, dtype=torch.float64)
    inputs = make_inputs(case)
    grads = weights(case, inputs)
    found = run_linear_attention_backward(grads, replace(inputs, qk_l2norm_eps=1e-6), RECURRENT)
    leaves: dict[str, Any] = {name: x.clone().requires_grad_() for name, x in given(inputs).items()}
    normed = {name: leaves[name] * torch.rsqrt(leaves[name].square().sum(-1, keepdim=True) + 1e-6) for name in "qk"}
    results = oracle(case, replace(inputs, **{**leaves, **normed}))
    truth = torch.autograd.grad(results, list(leaves.values()), [x for x in grads if x is not None])
    for name, x in zip(leaves, truth, strict=True):
        torch.testing.assert_close(found[name], x)


def test_what_is_not_wanted_is_left_out() -> None:
    case = Case("channel", True, 9)
    inputs = make_inputs(case)
    assert run_linear_attention_backward(weights(case, inputs), inputs, {"k", "initial_state"}).keys() == {
        "k",
        "initial_state",
    }


def test_a_kernel_that_runs_out_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("channel", True, 9)
    inputs = make_inputs(case)
    monkeypatch.setattr("kdacompile.lowering.cpu.backward.marks", lambda problem: (1, 0))
    with pytest.raises(MemoryError, match="checkpoints"):
        run_recurrence_backward(weights(case, inputs), inputs)


def test_without_a_compiler_the_executor_is_differentiated(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    caches = (compiler.library, recurrence._kernel_of)
    for cached in caches:
        cached.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(compiler.shutil, "which", lambda name: None)
            case = Case("channel", True, 30)
            inputs = make_inputs(case)
            assert not runs_backward(inputs.q)
            grads = weights(case, inputs)
            found = run_linear_attention_backward(grads, inputs, RECURRENT)
            for name, truth in zip(RECURRENT, expected(case, inputs, grads), strict=True):
                assert truth is not None and relative_error(found[name], truth) <= 1e-5
    finally:
        for cached in caches:
            cached.cache_clear()
