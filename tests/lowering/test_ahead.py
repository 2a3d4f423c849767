"""Compiling the kernels of a first call side by side: nothing runs, and whatever fails is left to the call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdacompile import containment
from kdacompile.lowering import ahead
from kdacompile.lowering.ahead import compile_ahead
from kdacompile.lowering.calls import Call
from kdacompile.lowering.recorded import Recorder
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.signature import LINEAR_ATTENTION

pytest.importorskip("triton")


class Kernel:
    """Notes what it is compiled for; launching it is an error."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        raise AssertionError("launched")

    def warmup(self, *args: Any, grid: tuple[int, ...], **named: Any) -> None:
        from triton.runtime._async_compile import active_mode

        assert active_mode.get() is not None
        if self.problem is not None:
            raise self.problem
        self.compiled.append((grid, *args, *named.items()))


def two_kernels(scratch: Scratch, first: Kernel, second: Kernel) -> None:
    x = scratch.empty((4,), torch.float32, torch.device("cpu"))
    scratch.apply(torch.Tensor.zero_, x.expand(2, 4))  # which would fail
    scratch.launch(first, (2,))(4, BLOCK=16)
    scratch.launch(second, (3, 1))(5, num_warps=4)


def test_the_first_call_of_a_kind_compiles_everything_first() -> None:
    first, second = Kernel(), Kernel()
    compile_ahead(lambda scratch: two_kernels(scratch, first, second), Scratch())
    assert not first.compiled
    compile_ahead(lambda scratch: two_kernels(scratch, first, second), Recorder(()))
    assert first.compiled == [((2,), 4, ("BLOCK", 16))]
    assert second.compiled == [((3, 1), 5, ("num_warps", 4))]


def test_what_fails_is_left_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(containment.RAISE, raising=False)
    broken, other = Kernel(ValueError("no such instruction")), Kernel()
    compile_ahead(lambda scratch: two_kernels(scratch, broken, other), Recorder(()))
    compile_ahead(lambda scratch: two_kernels(scratch, other, other), Recorder(()))
    assert len(other.compiled) == 2  # the mode that compiles side by side has ended


def test_a_triton_that_compiles_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    kernel = Kernel()
    compile_ahead(lambda scratch: two_kernels(scratch, kernel, kernel), Recorder(()))
    assert not kernel.compiled


def test_a_backward_op_knows_its_first_call_of_a_kind() -> None:
    firsts: list[bool] = []

    class Kernels:
        name = "noted"

        def declines(self, call: Call) -> str | None:
            return None

        def gradients(
            self,
            call: Call,
            grad_o: torch.Tensor | None,
            grad_state: torch.Tensor | None,
            scratch: Scratch | None = None,
        ) -> tuple[torch.Tensor | None, ...]:
            assert scratch is not None
            firsts.append(scratch.first)
            return *(torch.zeros_like(x) for x in (call.q, call.k, call.v)), None, None, None, None, None

    backward = FusedKernels(lambda call: None)._backward_of(LINEAR_ATTENTION, lambda call: Kernels())
    options: dict[str, Any] = {"scale": 1.0, "delta": False, "gate": "none", "gate_fn": "log", "gate_scale": 0.0}
    options |= {"chunk_size": 0, "sigmoid_beta": False, "qk_l2norm_eps": 0.0, "wanted": [True] * 3 + [False] * 5}
    for length in (3, 3, 4):
        x = torch.zeros(1, length, 1, 2)
        assert len(backward(x, None, x, x, x, *[None] * 6, **options)) == 3
    assert firsts == [True, False, True]


@pytest.mark.parametrize("looked_at", [True, False])
def test_what_takes_long_is_told_in_the_log_and_at_a_terminal(
    looked_at: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timers: list[threading.Timer] = []

    def timer(seconds: float, tell: Callable[[], None]) -> threading.Timer:
        timers.append(kind(0.0, tell))
        return timers[-1]

    kind = threading.Timer
    monkeypatch.setattr("threading.Timer", timer)
    monkeypatch.setattr("sys.stderr.isatty", lambda: looked_at)
    with pytest.raises(KeyboardInterrupt), ahead.telling("compiling"):
        timers[0].join(60)
        raise KeyboardInterrupt
    assert ("kdacompile: compiling" in capsys.readouterr().err) is looked_at
