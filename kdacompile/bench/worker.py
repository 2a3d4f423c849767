"""One contender on one case, in this process alone: ``python -m kdacompile.bench.worker SUITE CASE CONTENDER OUT``.

It makes its first call, says that it is ready, and times one round for every line it is sent: contenders take turns.
What it measured is written when nothing more is sent.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import measure
from kdacompile.bench.relay import READY
from kdacompile.bench.suites import SUITES, Case
from kdacompile.patterns.recurrence.definition import token_recurrence
from kdacompile.report.collect import collecting

ROUND_SECONDS = 0.5
_L2NORM_EPS = 1e-6  # the transformers functions' own
Output = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k ``[B, T, H, K]``, v ``[B, T, H, V]``, the log gate with K or without, beta ``[B, T, H]``; all fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def random(cls, case: Case, device: str) -> Inputs:
        """Ordinary magnitudes: log gates around -0.7, beta in (0, 1)."""
        generator = torch.Generator().manual_seed(0)
        shape = (case.batch, case.length, case.heads)
        gate_shape = (*shape, case.key_dim) if case.gate == "channel" else shape
        sizes = ((*shape, case.key_dim), (*shape, case.key_dim), (*shape, case.value_dim), gate_shape, shape)
        q, k, v, g, beta = (torch.randn(size, generator=generator) for size in sizes)
        tensors = (q, k, v, torch.nn.functional.logsigmoid(g), torch.sigmoid(beta))
        return cls(*(tensor.to(device) for tensor in tensors))

    def oracle(self) -> Output:
        """The recurrence in fp64."""
        q, k = (_l2norm(x.double()) for x in (self.q, self.k))
        decay = self.g.double().exp()
        decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
        scale = q.shape[-1] ** -0.5
        return token_recurrence(q, k, self.v.double(), decay, self.beta.double(), delta=True, scale=scale)

    def with_gradients(self, call: Callable[[], Output]) -> Callable[[], Output]:
        """The call and the backward of it: o, and the gradients of all inputs in one vector."""
        tensors = [x.requires_grad_() for x in (self.q, self.k, self.v, self.g, self.beta)]

        def run() -> Output:
            o, state = call()
            grads = torch.autograd.grad(o.sum() + state.sum(), tensors)
            return o.detach(), torch.cat([grad.flatten() for grad in grads])

        return run


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2NORM_EPS)


def contender_call(contender: str, case: Case, inputs: Inputs) -> Callable[[], Output]:
    """The contender as a call without arguments. Imports and what Inductor does but once happen here: they are not the
    compile time of the case.
    """
    if contender == "op":
        from kdacompile import ops

        def run_op() -> Output:
            o, state = ops.linear_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.g,
                inputs.beta,
                scale=case.key_dim**-0.5,
                delta=True,
                qk_l2norm=_L2NORM_EPS,
                output_final_state=True,
            )
            assert state is not None  # asked for
            return o, state

        return run_op
    function: Callable[..., Output] = getattr(importlib.import_module(case.module), case.function)
    if contender != "eager":
        _start_inductor(inputs.q.device)
        if contender == "kda":
            importlib.import_module("kdacompile.backend")
        function = torch.compile(function, backend=contender)

    def run() -> Output:
        return function(
            inputs.q,
            inputs.k,
            inputs.v,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    return run


def _start_inductor(device: torch.device) -> None:
    """The first compilation on a machine checks the C++ compiler and precompiles headers, which takes up to a minute;
    the first one of a process sets up Inductor's own patterns.
    """
    torch.compile(torch.square, backend="inductor")(torch.zeros(8, device=device))
    torch.compiler.reset()


def first_call(call: Callable[[], Output], oracle: Callable[[], Output]) -> dict[str, Any]:
    """Call once: what that takes, what the backend reports, and how far the result is from the recurrence in fp64."""
    outputs: list[Output] = []
    measure.reset_peak_resident()
    resident = measure.resident_bytes("VmRSS")
    with collecting() as report:
        seconds = measure.seconds_of(lambda: outputs.append(call()))
    highest = measure.resident_bytes("VmHWM")
    errors = [measure.relative_error(*pair) for pair in zip(outputs.pop(), oracle(), strict=True)]
    return {
        "first_call_seconds": seconds,
        "first_call_resident_bytes": None if resident is None or highest is None else highest - resident,
        "error_output": errors[0],
        "error_state": errors[1],
        "matches": [str(match) for match in report.matches],
        "rejections": [str(rejection) for rejection in report.rejections],
        "threads": torch.get_num_threads(),
    }


def main(suite_name: str, case_name: str, contender: str, out: str) -> None:
    suite = SUITES[suite_name]
    case = next(case for case in suite.cases if case.name == case_name)
    torch.set_num_threads(suite.threads)
    inputs = Inputs.random(case, suite.device)
    call, oracle = contender_call(contender, case, inputs), inputs.oracle
    if case.train:
        call, oracle = inputs.with_gradients(call), inputs.with_gradients(oracle)
    clock = time.process_time if suite.threads == 1 else measure.wall
    figures = first_call(call, oracle)
    samples: list[float] = []
    print(READY, flush=True)
    for _ in sys.stdin:
        samples += measure.samples_of(call, ROUND_SECONDS, clock)
        print(READY, flush=True)
    run = measure.Timing.of(samples)
    figures |= {"run_seconds": run.median, "run_low_seconds": run.low, "run_high_seconds": run.high}
    Path(out).write_text(json.dumps({**figures, "peak_tensor_bytes": measure.peak_tensor_bytes(call)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
