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
from kdacompile.lowering.verify import Case, make_inputs, oracle, relative_error

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


@pytest.mark.parametrize("length", [63, 64, 65, 300])
def test_states_are_computed_again_from_checkpoints(length: int) -> None:
    """64 tokens of 64 keys are kept at a time."""
    check(Case("channel", True, length, batch=1, key_width=64, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("lengths", [(5, 0, 64, 33), (0, 0, 7), (1, 1, 1)])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_packed_sequences(gate: str, lengths: tuple[int, ...]) -> None:
    check(Case(gate, True, lengths=lengths), TOLERANCE[torch.float32])


@pytest.mark.parametrize("used", [{"o": False}, {"state": False}])
def test_one_result_unused(used: dict[str, bool]) -> None:
    check(Case("channel", True, 20), TOLERANCE[torch.float32], **used)


@pytest.mark.parametrize("threads", [3, 8])
def test_more_threads_than_heads_share_the_values(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(Case("channel", True, 50, batch=1, heads=1, value_heads=2, value_width=100), TOLERANCE[torch.float32])
    finally:
        torch.set_num_threads(before)


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
    monkeypatch.setattr("kdacompile.lowering.cpu.backward.failed", lambda problem: True)
    with pytest.raises(MemoryError, match="checkpoints"):
        run_recurrence_backward(weights(case, inputs), inputs)


def test_without_a_compiler_the_executor_is_differentiated(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    caches = (compiler.library, recurrence._kernel)
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
