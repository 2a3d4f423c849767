"""One contender on one case of the CUDA suite: ``python -m kdacompile.bench.cuda_worker CASE CONTENDER OUT``."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import measure
from kdacompile.bench.cuda import Case
from kdacompile.patterns.recurrence import token_recurrence

_EPS = 1e-6
_BOUND = -5.0  # of the log gate of kda
_CHECKED = 2048  # tokens of the numerical check: the fp64 recurrence goes token by token
_FUNCTIONS = {
    "kda": ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    "gdn": ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "step": ("transformers.models.kimi_linear.modeling_kimi_linear", "recurrent_kimi_delta_attention"),
}
Output = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k, v, the gate and beta in bf16 (kda: before their activations), A_log and dt_bias in fp32, the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor | None

    @classmethod
    def random(cls, case: Case) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(0)
        keys = (case.batch, case.length, case.heads, case.width)
        values = (case.batch, case.length, case.value_heads, case.width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        q, k, v = (normal(*shape).bfloat16() for shape in (keys, keys, values))
        beta = normal(*values[:3]).bfloat16()
        state = normal(case.batch, case.value_heads, case.width, case.width) if case.kind == "step" else None
        A_log, dt_bias = 0.5 * normal(case.value_heads), normal(case.value_heads, case.width) - 2.0
        if case.kind == "gdn":
            gate = -A_log.exp() * torch.nn.functional.softplus(normal(*values[:3]) - 2.0)
            return cls(q, k, v, gate, beta.float().sigmoid().bfloat16(), A_log, dt_bias, state)
        return cls(q, k, v, normal(*values).bfloat16(), beta, A_log, dt_bias, state)

    def head(self, tokens: int) -> Inputs:
        """The first tokens."""
        return replace(self, **{name: getattr(self, name)[:, :tokens] for name in ("q", "k", "v", "g", "beta")})

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.state)
        return sum(x.nbytes for x in tensors if x is not None)


def log_gate(inputs: Inputs, kind: str) -> Tensor:
    if kind == "gdn":
        return inputs.g
    return _BOUND * torch.sigmoid(inputs.A_log.exp()[:, None] * (inputs.g + inputs.dt_bias))


def oracle(inputs: Inputs, kind: str) -> Output:
    """The recurrence in fp64."""
    double = replace(inputs, **{name: x.double() for name, x in vars(inputs).items() if x is not None})
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (double.q, double.k))
    decay = log_gate(double, kind).exp()
    beta = double.beta if kind == "gdn" else double.beta.sigmoid()
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    return token_recurrence(q, k, double.v, decay, beta, double.state, delta=True, scale=q.shape[-1] ** -0.5)


def contender_call(contender: str, kind: str, inputs: Inputs) -> Callable[[], Output]:
    """The contender as a call without arguments."""
    if contender == "ours":
        return _ours(kind, inputs)
    if contender == "portable":
        return _portable(kind, inputs)
    if contender == "fla":
        return _fla(kind, inputs)
    module, name = _FUNCTIONS[kind]
    plain: Callable[..., Output] = getattr(importlib.import_module(module), name)

    def function(x: Inputs) -> Output:
        beta = x.beta if kind == "gdn" else x.beta.sigmoid()
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return plain(x.q, x.k, x.v, g=log_gate(x, kind), beta=beta, initial_state=x.state, **options)

    compiled = torch.compile(function, backend=contender)
    return lambda: compiled(inputs)


def _ours(kind: str, x: Inputs) -> Callable[[], Output]:
    from kdacompile import ops

    options: dict[str, Any] = {"qk_l2norm": _EPS}
    if kind != "gdn":
        options |= {"gate_fn": "sigmoid", "gate_scale": _BOUND, "sigmoid_beta": True}
        options |= {"A_log": x.A_log, "dt_bias": x.dt_bias}
    if kind == "step":
        return lambda: ops.linear_attention_step(x.q, x.k, x.v, x.g, x.beta, state=x.state, inplace=True, **options)

    def run() -> Output:
        o, state = ops.linear_attention(x.q, x.k, x.v, x.g, x.beta, output_final_state=True, **options)
        assert state is not None  # asked for
        return o, state

    return run


def _portable(kind: str, x: Inputs) -> Callable[[], Output]:
    from kdacompile.lowering.calls import Call
    from kdacompile.lowering.triton import TritonKernels

    gdn = kind == "gdn"
    call = Call(
        x.q, x.k, x.v, x.g, x.beta, x.state, None if gdn else x.A_log, None if gdn else x.dt_bias, None,
        scale=x.q.shape[-1] ** -0.5, delta=True, gate="token" if gdn else "channel",
        gate_fn="log" if gdn else "sigmoid", gate_scale=_BOUND, sigmoid_beta=not gdn, qk_l2norm_eps=_EPS, chunk_size=0,
        out_dtype=x.v.dtype,
    )  # fmt: skip
    kernels = TritonKernels()
    return (lambda: kernels.step(call, x.state)) if kind == "step" else (lambda: kernels.run(call))


def _fla(kind: str, x: Inputs) -> Callable[[], Output]:
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": x.state}
    if kind == "gdn":
        function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return lambda: function(x.q, x.k, x.v, x.g, x.beta, **options)
    module = importlib.import_module("fla.ops.kda")
    function = module.fused_recurrent_kda if kind == "step" else module.chunk_kda
    options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "lower_bound": _BOUND}
    options |= {"A_log": x.A_log, "dt_bias": x.dt_bias.flatten()}
    options |= {} if kind == "step" else {"safe_gate": True}
    return lambda: function(x.q, x.k, x.v, x.g, x.beta, **options)


# ---- clocks


def device_microseconds(call: Callable[[], object], launches: int = 10, repeats: int = 9) -> float:
    """The median over replays of a CUDA graph of several calls, divided by their number."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return statistics.median(_elapsed(graph.replay) / launches for _ in range(repeats))


def eager_microseconds(call: Callable[[], object], launches: int = 20, repeats: int = 5) -> float:
    """The same from eager launches one after the other: what the host takes shows where it is longer."""

    def several() -> None:
        for _ in range(launches):
            call()

    return statistics.median(_elapsed(several) / launches for _ in range(repeats))


def _elapsed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most device memory the call held at once, inputs excluded, outputs included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def floor_microseconds(inputs: Inputs) -> float:
    """Unavoidable bytes at this device's copy rate, or the recurrence's products at its bf16 rate if that is longer."""
    _, _, heads, width = inputs.v.shape
    lanes = inputs.v.shape[0] * heads
    state = inputs.state if inputs.state is not None else torch.empty(lanes, width, width, device="meta")
    moved = inputs.bytes + inputs.v.nbytes + state.nbytes
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / device_microseconds(lambda: target.copy_(source))
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    flops = 2 * 8192**3 / device_microseconds(lambda: x @ x, launches=3)
    products = 6 * lanes * inputs.v.shape[1] * width * width  # read the old value, write the new one, read out
    return max(moved / rate, products / flops)


def measured(case: Case, contender: str) -> dict[str, Any]:
    inputs = Inputs.random(case)
    checked = inputs.head(_CHECKED)
    expected = oracle(checked, case.kind)
    call = contender_call(contender, case.kind, inputs)
    torch.cuda.synchronize()
    state = None if inputs.state is None else inputs.state.clone()
    outputs: list[Output] = []

    def first() -> None:
        outputs.append(call())
        torch.cuda.synchronize()

    first_call = measure.seconds_of(first)
    o, final = outputs.pop()
    if case.length > _CHECKED:
        o, final = contender_call(contender, case.kind, checked)()
    errors = [_relative_error(x, y) for x, y in zip((o, final), expected, strict=True)]
    if inputs.state is not None and state is not None:
        inputs.state.copy_(state)
    return {
        "first_call_seconds": first_call,
        "device_us": device_microseconds(call),
        "eager_us": eager_microseconds(call),
        "peak_bytes": peak_bytes(call),
        "error_output": errors[0],
        "error_state": errors[1],
        "floor_us": floor_microseconds(inputs),
    }


def _relative_error(x: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    return float((x.double() - reference).norm() / reference.norm())


def main(case: str, contender: str, out: str) -> None:
    Path(out).write_text(json.dumps(measured(Case(**json.loads(case)), contender)))


if __name__ == "__main__":
    main(*sys.argv[1:])
