"""One contender on one kind of case of the CUDA suite: ``-m kdacompile.bench.cuda_worker CASES CONTENDER OUT``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import measure
from kdacompile.bench.cuda_cases import MODELS, Case
from kdacompile.bench.relay import wait_for_turn
from kdacompile.store.disk import write_whole

_CHECKED = 2048  # tokens of the numerical check: the fp64 recurrence goes token by token
_CHECKED_TRAINING = 256  # and keeps everything for its backward pass
Figures = dict[str, Any]


def main(described: str, contender: str, out: str) -> None:
    """Get ready with the first case, wait, measure them all; figures are written as they come."""
    cases = [Case(**case) for case in json.loads(described)]
    if contender != "fla" and not contender.endswith("+fla"):
        # Whether it is importable decides what transformers' models call.
        sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    measured: dict[str, Figures] = {}
    if cases[0].kind in MODELS:
        from kdacompile.bench import cuda_models

        runs = [cuda_models.Contender(case, contender) for case in cases]
        for run in runs:
            run.get_ready()
        wait_for_turn()
        for case, run in zip(cases, runs, strict=True):
            measured[case.name] = run.measure()
            write_whole(Path(out), json.dumps(measured))
        return
    calls = _Calls(contender)
    first_call = calls.first(cases[0])
    wait_for_turn()
    for case in cases:
        measured[case.name] = calls.measured(case)
        if case is cases[0]:
            measured[case.name]["first_call_seconds"] = first_call
        write_whole(Path(out), json.dumps(measured))


class _Calls:
    """An op's contender."""

    def __init__(self, contender: str) -> None:
        self._contender = contender

    def first(self, case: Case) -> float:
        """Seconds of the first call of the process."""
        from kdacompile.bench.cuda_ops import Inputs

        call = self._call(case, Inputs.random(case))
        torch.cuda.synchronize()

        def once() -> None:
            call()
            torch.cuda.synchronize()

        return measure.seconds_of(once)

    def measured(self, case: Case) -> Figures:
        from kdacompile.bench import cuda_ops, device_clock

        inputs = cuda_ops.Inputs.random(case)
        figures = self._errors(case, inputs)
        call = self._call(case, inputs)
        call()
        training = case.kind == "train"  # autograd's backward thread is not captured
        figures["eager_us"] = device_clock.eager_microseconds(call, launches=3 if training else 20)
        figures["device_us"] = figures["eager_us"] if training else device_clock.device_microseconds(call)
        figures["peak_bytes"] = device_clock.peak_bytes(call)
        figures["floor_us"] = _floor_microseconds(inputs, training)
        if training:
            figures["saved_bytes_a_token"] = cuda_ops.saved_bytes(self._contender, inputs) / (case.batch * case.length)
        return figures

    def _call(self, case: Case, inputs: Any) -> Callable[[], tuple[Tensor, ...]]:
        from kdacompile.bench import cuda_ops

        if case.kind == "train":
            return cuda_ops.training_call(self._contender, inputs)
        return cuda_ops.contender_call(self._contender, case.kind, inputs)

    def _errors(self, case: Case, inputs: Any) -> Figures:
        """Of o and of the state; of training, of o and of the worst gradient."""
        from kdacompile.bench import cuda_ops

        training = case.kind == "train"
        checked = inputs.head(_CHECKED_TRAINING if training else _CHECKED)
        expected = cuda_ops.training_oracle(checked) if training else cuda_ops.oracle(checked, case.kind)
        state = None if inputs.state is None else inputs.state.clone()
        found = self._call(case, checked)()
        errors = [_relative_error(x, y) for x, y in zip(found, expected, strict=True)]
        if inputs.state is not None and state is not None:
            inputs.state.copy_(state)
        return {"error_output": errors[0], "error_state": max(errors[1:])}


def _floor_microseconds(inputs: Any, training: bool) -> float:
    """Unavoidable bytes at this device's copy rate, or the recurrence's products at its bf16 rate if that is longer."""
    from kdacompile.bench import device_clock

    length, heads, value_width = inputs.v.shape[1:]
    width = inputs.q.shape[3]
    lanes = inputs.v.shape[0] * heads
    states = 0 if inputs.state is None else inputs.state.nbytes
    moved = inputs.bytes + inputs.v.nbytes + (states or 4 * inputs.sequences * heads * width * value_width)
    products = 6 * lanes * length * width * value_width  # read the old value, write the new one, read out
    if training:  # the inputs are read again, the gradients of all of them written, twice the products
        moved, products = 3 * moved, 3 * products
    bytes_rate, product_rate = device_clock.rates()
    return max(moved / bytes_rate, products / product_rate)


def _relative_error(x: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    return float((x.double() - reference).norm() / reference.norm())


if __name__ == "__main__":
    main(*sys.argv[1:])
