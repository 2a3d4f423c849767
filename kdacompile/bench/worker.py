"""One contender on one case of a suite, in a process of its own (see ``relay``)."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kdacompile.bench import measure, rows
from kdacompile.bench.relay import Steps
from kdacompile.bench.suites import ROUNDS, SUITES, Case
from kdacompile.report.collect import collecting

ROUND_SECONDS = 0.5
Call = Callable[[], rows.Output]


def arguments(case: Case, device: str) -> rows.Given:
    """Of the op, in fp32."""
    given = rows.random_arguments(
        case.gate, "log", case.length, batch=case.batch, heads=case.heads, value_heads=case.heads, width=case.key_dim,
        value_width=case.value_dim, device=device, dtype=torch.float32,
    )  # fmt: skip
    return given | {"output_final_state": True}


def with_gradients(call: Call, given: rows.Given) -> Call:
    """The call and the backward of it: o, and the gradients of all inputs in one vector."""
    tensors = [x.requires_grad_() for x in rows.tensors_of(given).values()]

    def run() -> rows.Output:
        o, state = call()
        assert state is not None  # asked for
        grads = torch.autograd.grad(o.sum() + state.sum(), tensors)
        return o.detach(), torch.cat([grad.flatten() for grad in grads])

    return run


def contender_call(contender: str, case: Case, given: rows.Given) -> Call:
    """The contender as a call without arguments. Imports and what Inductor does but once happen here: they are not the
    compile time of the case.
    """
    if contender == "op":
        return rows.ours(given)
    function = getattr(importlib.import_module(case.module), case.function)
    if contender != "eager":
        _start_inductor(given["q"].device)
        if contender == "kda":
            importlib.import_module("kdacompile.backend")
        function = torch.compile(function, backend=contender)
    q, k, v, g, beta = (given[name] for name in rows.TOKENS)
    return lambda: function(q, k, v, g=g, beta=beta, initial_state=None, **rows.TRANSFORMERS)


def _start_inductor(device: torch.device) -> None:
    """The first compilation on a machine checks the C++ compiler and precompiles headers, which takes up to a minute;
    the first one of a process sets up Inductor's own patterns.
    """
    torch.compile(torch.square, backend="inductor")(torch.zeros(8, device=device))
    torch.compiler.reset()


def first_call(call: Call, oracle: Call) -> dict[str, Any]:
    """Call once: what that takes, what the backend reports, and how far the result is from the recurrence in fp64."""
    outputs: list[rows.Output] = []
    measure.reset_peak_resident()
    resident = measure.resident_bytes("VmRSS")
    with collecting() as report:
        seconds = measure.seconds_of(lambda: outputs.append(call()))
    highest = measure.resident_bytes("VmHWM")
    pairs = zip(outputs.pop(), oracle(), strict=True)
    errors = [measure.relative_error(x, y) for x, y in pairs if x is not None and y is not None]
    return {
        "first_call_seconds": seconds,
        "first_call_resident_bytes": None if resident is None or highest is None else highest - resident,
        "error_output": errors[0],
        "error_state": errors[1],
        "matches": [str(match) for match in report.matches],
        "rejections": [str(rejection) for rejection in report.rejections],
        "threads": torch.get_num_threads(),
    }


def measured(group: str, contender: str) -> Steps:
    """One round for every line that it is sent, so that contenders take turns; ``group``: "SUITE CASE"."""
    suite_name, case_name = group.split()
    suite = SUITES[suite_name]
    case = next(case for case in suite.cases if case.name == case_name)
    torch.set_num_threads(suite.threads)
    given = arguments(case, suite.device)
    call, oracle = contender_call(contender, case, given), partial(rows.oracle, given)
    if case.train:
        call, oracle = with_gradients(call, given), with_gradients(oracle, given)
    clock = time.process_time if suite.threads == 1 else measure.wall
    figures = first_call(call, oracle)
    samples: list[float] = []
    for _ in range(ROUNDS):
        yield None
        samples += measure.samples_of(call, ROUND_SECONDS, clock)
    yield None
    run = measure.Timing.of(samples)
    figures |= {"run_seconds": run.median, "run_low_seconds": run.low, "run_high_seconds": run.high}
    yield from {**figures, "peak_tensor_bytes": measure.peak_tensor_bytes(call)}.items()
