"""One contender on one kind of case of the CUDA suite, in a process of its own (see ``relay``)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from kdacompile.bench import device_clock, rows
from kdacompile.bench.cuda_cases import CASES, MODELS, Case
from kdacompile.bench.relay import Steps

_CHECKED = 2048  # tokens of the numerical check: the fp64 recurrence goes token by token
_GATES = {"gdn": "log", "softplus": "softplus", "packed": "softplus"}  # of other kinds "sigmoid"
Figures = dict[str, Any]


def measured(names: str, contender: str) -> Steps:
    """Cases of one kind: get ready with the first, then measure them all."""
    cases = [case for case in CASES if case.name in names.split(",")]
    if contender == "portable":
        _leave_emitted_kernels_alone()
    if cases[0].kind in MODELS:
        from kdacompile.bench import cuda_models

        runs = [cuda_models.Contender(case, contender) for case in cases]
        for run in runs:
            run.get_ready()
        yield None
        yield from ((case.name, run.measure()) for case, run in zip(cases, runs, strict=True))
        return
    call = call_of(contender, arguments(cases[0]))
    torch.cuda.synchronize()
    first_call = {"first_call_seconds": device_clock.seconds_until_done(call)}
    yield None
    for case in cases:
        yield case.name, _measured(contender, case) | (first_call if case is cases[0] else {})


def _leave_emitted_kernels_alone() -> None:
    from kdacompile.lowering import cuda
    from kdacompile.lowering.triton import TritonKernels

    cuda.IMPLEMENTATIONS[:] = [TritonKernels()]


def arguments(case: Case, device: str = "cuda") -> rows.Given:
    """Of the op; "step" has a state, "packed" sixteen sequences, the longest sixteen times as long as the shortest."""
    log = case.kind == "gdn"
    given = rows.random_arguments(
        "token" if log else "channel", _GATES.get(case.kind, "sigmoid"), case.length, sigmoid_beta=not log,
        batch=case.batch, heads=case.heads, value_heads=case.value_heads, width=case.width, value_width=case.width,
        device=device,
    ) | {"output_final_state": True}  # fmt: skip
    if case.kind == "packed":
        ends = (case.length * end // 136 for end in accumulate(range(1, 17)))
        given["cu_seqlens"] = torch.tensor([0, *ends], device=device)
    if case.kind == "step":
        given["initial_state"] = torch.randn(case.batch, case.value_heads, case.width, case.width, device=device)
    return given


def call_of(contender: str, given: rows.Given) -> Callable[[], rows.Output]:
    if contender in ("ours", "portable"):
        return rows.ours(given)
    if contender == "fla":
        call = rows.fla(given)
        assert call is not None  # every kind of case has an operator of FLA's
        return call
    return rows.plain(given, contender)


def _measured(contender: str, case: Case) -> Figures:
    given = arguments(case)
    figures = _errors(contender, given)
    call = call_of(contender, given)
    call()
    figures["eager_us"] = device_clock.eager_microseconds(call)
    figures["device_us"] = device_clock.device_microseconds(call)
    figures["peak_bytes"] = device_clock.peak_bytes(call)
    return figures | {"floor_us": _floor_microseconds(given)}


def _errors(contender: str, given: rows.Given) -> Figures:
    """Of o and of the state, which a step overwrites."""
    checked = rows.first_tokens(given, _CHECKED)
    checked |= {key: checked[key].clone() for key in ("initial_state",) if key in checked}
    expected = rows.oracle(checked)
    found = call_of(contender, checked)()
    errors = [rows.relative_error(x, y) for x, y in zip(found, expected, strict=True) if x is not None]
    return dict(zip(("error_output", "error_state"), errors, strict=True))


def _floor_microseconds(given: rows.Given) -> float:
    """Unavoidable bytes at this device's copy rate, or the recurrence's products at its bf16 rate if that is longer."""
    batch, length, heads, value_width = given["v"].shape
    products = 6 * batch * heads * length * given["q"].shape[3] * value_width  # what is known, written, read out
    bytes_rate, product_rate = device_clock.rates()
    return max(rows.unavoidable_bytes(given) / bytes_rate, products / product_rate)
