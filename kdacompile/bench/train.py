"""The training suite: forward and backward of the family's rows, ours beside FLA and eager torch, and whole models.

A contender of a row is a process of its own; they get ready side by side and are timed one after the other
(``relay``). The table and the JSON file have the device time of both passes and of the backward alone (a call that the
device comes to late, so that the host does not show), the host's time, the bytes saved between the passes, the most
memory the backward holds, and every gradient's error against the fp64 recurrence.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import device_clock
from kdacompile.bench.relay import Job, Outcome, Relay, wait_for_turn
from kdacompile.doctor import version_of
from kdacompile.errors import BenchError
from kdacompile.patterns.recurrence.definition import token_recurrence
from kdacompile.store.disk import write_whole

ROWS = ("kda", "gdn", "gla", "simple", "delta", "mamba")
LENGTHS = (1024, 2048, 4096, 8192, 16384)  # of kda; other rows are measured at MEASURED
MODELS = ("kimi_linear", "qwen3_next")
MEASURED, CHECKED = 8192, 256  # tokens; the fp64 recurrence goes token by token
READY_SECONDS, SAMPLES, EPS, BOUND = 240.0, 7, 1e-6, -5.0
_EAGER_TO = 4096  # tokens up to which torch's operators are asked
_MODULE = "kdacompile.bench.train"
Figures = dict[str, Any]
Inputs = dict[str, Tensor]


def main(only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Run, print a line a measurement, write the JSON. Exit status 1 where one of ours failed."""
    if not torch.cuda.is_available():
        raise BenchError(detail="the train suite needs a CUDA device")
    names = [*ROWS, *MODELS]
    chosen = [name for name in names if not only or any(part in name for part in only)]
    if not chosen:
        raise BenchError(detail=f"no case matches {', '.join(only or ())}; there are {', '.join(names)}")
    cases: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder:
        jobs = [
            Job(f"{name}, {who}", _MODULE, (name, who, str(Path(folder, f"{name}-{who}.json"))))
            for name in chosen
            for who in contenders(name)
        ]

        def done(job: Job, outcome: Outcome) -> None:
            name, who, out = job.arguments
            found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
            for length, figures in found.items() or [(str(MEASURED), {"failure": outcome.reason})]:
                label = f"{name}-t{length}"
                described: Figures = {"name": label, "length": int(length), "train": True, "results": {}}
                case = cases.setdefault(label, described)
                case["results"][who] = figures
                print(f"{label:20s} {who:6s} {line(figures)}", flush=True)
            versions = {
                name: version_of(name) for name in ("torch", "triton", "kdacompile", "transformers", "fla-core")
            }
            record = {"suite": "train", "device": torch.cuda.get_device_name(0), "versions": versions}
            write_whole(json_path, json.dumps({**record, "cases": list(cases.values())}, indent=2) + "\n")

        Relay(min(READY_SECONDS, timeout), timeout).run([jobs], done)
    print(f"\nwritten to {json_path}; `python -m kdacompile.bench.charts {json_path}` draws it")
    return 1 if any("failure" in case["results"].get("ours", {}) for case in cases.values()) else 0


def contenders(name: str) -> tuple[str, ...]:
    """FLA refuses the gradients of gdn with the Triton that comes with torch 2.11."""
    if name in MODELS:
        return ("ours", "fla")
    return {"kda": ("ours", "eager", "fla"), "gdn": ("ours",)}.get(name, ("ours", "fla"))


def line(figures: Figures) -> str:
    if "failure" in figures:
        return f"- {figures['failure'][:90]}"
    if "tokens_a_second" in figures:
        return f"{figures['tokens_a_second']:,.0f} tokens/s, {figures['peak_bytes'] / 2**30:.1f} GiB"
    worst = max(figures["errors"].items(), key=lambda item: item[1])
    return (
        f"{figures['device_us']:7.0f} us, backward {figures['backward_us']:7.0f}, floor {figures['floor_us']:4.0f}, "
        f"host {figures['host_us']:5.0f}, saved {figures['saved_bytes'] >> 20} MiB, "
        f"workspace {figures['workspace_bytes'] >> 20} MiB, worst error {worst[1]:.1e} (d{worst[0]})"
    )


# ---- a worker: ``-m kdacompile.bench.train NAME CONTENDER OUT``


def work(name: str, who: str, out: str) -> None:
    if who != "fla":
        sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    lengths = LENGTHS if name == "kda" else (MEASURED,)
    lengths = tuple(length for length in lengths if who != "eager" or length <= _EAGER_TO)
    if name in MODELS:
        step = _model_step(name, who)
        step()
        wait_for_turn()
        write_whole(Path(out), json.dumps({str(MEASURED): _model_figures(step)}))
        return
    _both(name, who, operands(name, CHECKED))
    _both(name, who, operands(name, lengths[-1]))
    torch.cuda.synchronize()
    wait_for_turn()
    errors = _errors(name, who)
    measured: Figures = {}
    for length in lengths:
        measured[str(length)] = _figures(name, who, operands(name, length)) | {"errors": errors}
        write_whole(Path(out), json.dumps(measured))


def operands(name: str, length: int) -> Inputs:
    """Random, bf16 but log gates of a token and parameters; keys are normalised in the op where there is beta."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, value_heads, width = {"gdn": (16, 32, 128), "mamba": (1, 80, 64)}.get(name, (32, 32, 128))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v = normal(1, length, heads, 128), normal(1, length, heads, 128), normal(1, length, value_heads, width)
    gate, beta = normal(1, length, value_heads), normal(1, length, value_heads).sigmoid()
    given = {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}
    wide = normal(1, length, 32, 128) if name in ("kda", "gla") else gate
    if name in ("gdn", "simple", "mamba"):
        given["g"] = torch.nn.functional.logsigmoid(gate)
    elif name in ("kda", "gla"):
        given["g"] = (wide if name == "kda" else torch.nn.functional.logsigmoid(wide)).bfloat16()
    if name in ("kda", "gdn", "delta"):
        given["beta"] = beta.bfloat16()
    if name == "kda":
        given |= {"A_log": 0.5 * normal(32), "dt_bias": normal(32, 128)}
    return {n: x.requires_grad_() for n, x in given.items()}


def _forward(name: str, who: str, x: Inputs) -> Tensor:
    if who == "ours":
        from kdacompile import ops

        options: dict[str, Any] = {"delta": "beta" in x, "qk_l2norm": EPS if "beta" in x else False}
        if name == "kda":
            options |= {"gate_fn": "sigmoid", "gate_scale": BOUND, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
        return ops.linear_attention(x["q"], x["k"], x["v"], x.get("g"), x.get("beta"), **options)[0]
    if who == "eager":
        module = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
        g = BOUND * torch.sigmoid(x["A_log"].exp()[:, None] * (x["g"] + x["dt_bias"]))
        call = module.chunk_kimi_delta_attention
        return call(x["q"], x["k"], x["v"], g=g, beta=x["beta"], use_qk_l2norm_in_kernel=True)[0]
    return _fla(name, x)


def _fla(name: str, x: Inputs) -> Tensor:
    module, function = {
        "kda": ("kda", "chunk_kda"), "gla": ("gla", "chunk_gla"), "delta": ("delta_rule", "chunk_delta_rule"),
    }.get(name, ("simple_gla", "chunk_simple_gla"))  # fmt: skip
    call = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    q, k, v = x["q"], x["k"], x["v"]
    if name == "kda":
        options = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": BOUND, "use_qk_l2norm_in_kernel": True}
        return call(q, k, v, x["g"], x["beta"], A_log=x["A_log"], dt_bias=x["dt_bias"].flatten(), **options)[0]
    if name == "delta":
        return call(q, k, v, x["beta"], use_qk_l2norm_in_kernel=True)[0]
    if q.shape[2] != v.shape[2]:
        q, k = (y.expand(-1, -1, v.shape[2], -1).contiguous() for y in (q, k))
    return call(q, k, v, x["g"])[0]


def _both(name: str, who: str, x: Inputs) -> tuple[Tensor, ...]:
    o = _forward(name, who, x)
    return torch.autograd.grad(o, list(x.values()), _cotangent(x["v"]).to(o.dtype))


def _cotangent(v: Tensor) -> Tensor:
    return torch.randn(v.shape, device=v.device, generator=torch.Generator(v.device).manual_seed(1)).to(v.dtype)


def _errors(name: str, who: str) -> dict[str, float]:
    """RMS of each gradient's difference over its RMS, at CHECKED tokens."""
    x = operands(name, CHECKED)
    found = _both(name, who, x)
    d = {n: y.detach().double().requires_grad_() for n, y in x.items()}
    q, k = d["q"], d["k"]
    if "beta" in d:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPS) for y in (q, k))
    g, beta = d.get("g"), d.get("beta")
    if name == "kda":
        g = BOUND * torch.sigmoid(d["A_log"].exp()[:, None] * (d["g"] + d["dt_bias"]))
    decay = None if g is None else (g if g.dim() == 4 else g.unsqueeze(-1)).exp()
    o, _ = token_recurrence(q, k, d["v"], decay, beta, None, delta="beta" in d, scale=128**-0.5)
    exact = torch.autograd.grad(o, list(d.values()), _cotangent(x["v"]).double())
    return {n: float((a.double() - b).norm() / b.norm()) for n, a, b in zip(x, found, exact, strict=True)}


def _figures(name: str, who: str, x: Inputs) -> Figures:
    leaves, of_o = list(x.values()), _cotangent(x["v"])
    kept: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        _forward(name, who, x)
    o = _forward(name, who, x)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, leaves, of_o.to(o.dtype), retain_graph=True)

    given = sum(y.nbytes for y in leaves)
    moved = 3 * given + 2 * x["v"].nbytes  # inputs twice, their gradients, the output and its gradient

    def both() -> object:
        return _both(name, who, x)

    figures = {
        "device_us": _median(both), "backward_us": _median(backward), "host_us": _host(both),
        "saved_bytes": sum(kept.values()), "floor_us": moved / device_clock.rates()[0],
    }  # fmt: skip
    return figures | {"workspace_bytes": max(device_clock.peak_bytes(backward) - given, 0)}


def _median(call: Callable[[], object]) -> float:
    call()
    return statistics.median(device_clock.enqueued_microseconds(call) for _ in range(SAMPLES))


def _host(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


# ---- whole models


def _model_step(name: str, who: str) -> Callable[[], None]:
    """A step of training with fused AdamW: the model compiled with our backend, or eager with FLA's functions."""
    from kdacompile.bench import cuda_models

    model = cuda_models.build(name).train()
    called = torch.compile(model, backend="kda") if who == "ours" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(3, model.config.vocab_size, (1, MEASURED), device="cuda")

    def step() -> None:
        called(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _model_figures(step: Callable[[], None]) -> Figures:
    def done() -> None:
        step()
        torch.cuda.synchronize()

    done()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        done()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    return {"tokens_a_second": MEASURED / seconds, "peak_bytes": torch.cuda.max_memory_allocated()}


if __name__ == "__main__":
    work(*sys.argv[1:])
