"""Calls on a CPU like one before: nothing is looked for any more, and the numbers are those of the operands given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.cpu import runs_recurrence
from kdacompile.ops import on_cpu
from tests.ops.cases import GATE_FNS, Case, assert_close, make_case, oracle

WIDTH = 8  # of the keys: the kernel takes multiples of four
pytestmark = pytest.mark.skipif(not runs_recurrence(torch.zeros(1, 1, 1, WIDTH)), reason="no C compiler")


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls for which a kernel was looked for."""
    calls: list[Any] = []
    choose = on_cpu.choose
    monkeypatch.setattr(on_cpu.KERNELS, "_choose", lambda call: (calls.append(call), choose(call))[1])
    return calls


def step(case: Case, state: Tensor) -> Tensor:
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    q, k, v, g, beta, _, A_log, dt_bias = case.positional
    return torch.ops.kdacompile.linear_attention_step_(q, k, v, g, beta, state, A_log, dt_bias, None, **options)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("gate_fn", GATE_FNS)
def test_every_gate_function_again(looked_at: list[Any], gate_fn: str, delta: bool) -> None:
    for seed in range(4):
        case = make_case(gate_fn=gate_fn, delta=delta, length=11, key_dim=WIDTH, seed=seed)
        assert_close(case.run(), oracle(case), 1e-5)
    assert len(looked_at) <= 1  # another test may have made such calls before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gate", ["none", "head", "token"])
def test_other_dtypes_and_layouts_again(looked_at: list[Any], gate: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        case = make_case(gate=gate, length=6, key_dim=WIDTH, seed=seed).to(dtype)
        turned = case.with_tensors(q=case.tensors["q"].transpose(1, 2).contiguous().transpose(1, 2), beta=None)
        assert_close(turned.run(), oracle(turned), 1e-5 if dtype is torch.float64 else 2.0**-7)
    assert len(looked_at) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_write_the_state_they_are_given(looked_at: list[Any], dtype: torch.dtype) -> None:
    """Also one in another dtype than the kernel's; what a step returned stays what it was."""
    returned: list[tuple[Tensor, Tensor]] = []
    for seed in range(4):
        case = make_case(length=1, key_dim=WIDTH, batch=3, seed=seed)
        state = case.tensors["initial_state"].to(dtype)
        expected = oracle(case.with_tensors(initial_state=state.clone()))
        o = step(case, state)
        assert_close((state,), expected[1:], max(1e-5, torch.finfo(dtype).eps))
        returned.append((o, expected[0]))
    for o, want in returned:
        assert_close((o,), (want,), 1e-5)
    assert len(looked_at) <= 1


def test_a_state_that_shares_memory_with_an_operand_is_told_apart() -> None:
    for shared in (False, True, False, True):
        case = make_case(length=1, groups=1, heads=1, key_dim=WIDTH, value_dim=WIDTH, batch=1, gate_fn="factor")
        memory = torch.rand_like(case.tensors["initial_state"])
        k = memory[:, :, 0].unsqueeze(1)
        case = case.with_tensors(k=k if shared else k.clone())
        expected = oracle(case.with_tensors(k=k.clone(), initial_state=memory.clone()))
        assert_close((step(case, memory), memory), expected, 1e-5)


def test_bounds_are_read_every_time(looked_at: list[Any]) -> None:
    for bounds in ([0, 3, 7], [0, 6, 7], [0, 1, 7]):
        case = make_case(length=7, key_dim=WIDTH, batch=1, sequences=2)
        packed = Case(case.tensors, case.options, torch.tensor(bounds))
        assert_close(packed.run(), oracle(packed), 1e-5)
    assert len(looked_at) == 3


def test_gradients_are_recorded_between_calls_that_are_remembered() -> None:
    for _ in range(2):
        case = make_case(length=5, key_dim=WIDTH)
        assert_close(case.run(), oracle(case), 1e-5)
        leaf = case.tensors["v"].clone().requires_grad_()
        o, _ = case.with_tensors(v=leaf).run()
        o.sum().backward()
        assert leaf.grad is not None and bool(leaf.grad.isfinite().all()) and bool(leaf.grad.any())
