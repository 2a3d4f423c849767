"""The training suite: forward and backward of the family's rows, ours beside FLA and torch, and whole models.

A contender of a row is a process of its own; they get ready side by side and are timed one after the other
(``relay``). The table and the JSON file have the device time of both passes, of the backward alone and of a forward
without gradients (a call that the device comes to late, so that the host does not show), the host's time, the bytes
saved between the passes, the most memory the backward holds, and every gradient's error against the fp64 recurrence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kdacompile.bench import device_clock, record, rows
from kdacompile.bench.record import Figures
from kdacompile.bench.relay import LONGEST, Job, Outcome, Relay, Steps

ROWS = ("kda", "gdn", "gla", "simple", "delta", "mamba")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # of kda; other rows are measured at MEASURED
TITLES = {"kda": "KDA, 32 heads of 128, bf16, bounded gates"}
"""What a chart of one row is called."""
MODELS = ("kimi_linear", "qwen3_next")
MEASURED, CHECKED = 8192, 256  # tokens; the fp64 recurrence goes token by token
READY_SECONDS, SAMPLES = 240.0, 7
_LONGEST = {"eager": 4096}  # tokens up to which torch's operators are asked
_UNROLLED = (256, 512)  # those of Inductor, which unrolls loops: a process for each, since they take minutes to compile


def main(only: Sequence[str] | None, json_path: Path, timeout: float | None) -> int:
    """Run, print a line a measurement, write the JSON. Exit status 1 where one of ours failed."""
    device = record.cuda_device("train")
    chosen = record.chosen([*ROWS, *MODELS], only)
    cases: dict[str, Figures] = {}

    def done(job: Job, outcome: Outcome) -> None:
        who, asked = _asked(job.group, job.contender)
        missing = {str(length): {"failure": outcome.reason} for length in asked if str(length) not in outcome.found}
        for length, figures in (outcome.found | missing).items():
            put(cases, job.group, int(length), who, figures)
            print(f"{job.group}-t{length:<14s} {who:8s} {line(figures)}", flush=True)
        title = TITLES.get(chosen[0]) if len(chosen) == 1 else None
        record.write(json_path, "train", list(cases.values()), device=device, title=title)

    jobs = [Job(f"{name}, {who}", __name__, name, who) for name in chosen for who in contenders(name)]
    Relay(timeout or READY_SECONDS, timeout or LONGEST).run([jobs], done)
    print(f"\nwritten to {json_path}")
    return 1 if any("failure" in case["results"].get("ours", {}) for case in cases.values()) else 0


def put(cases: dict[str, Figures], name: str, length: int, who: str, figures: Figures) -> None:
    """A contender's figures at a length: of training, and of the forward pass where that was measured alone."""
    parts = {f"{name}-t{length}": figures}
    if "forward_us" in figures:
        parts[f"{name}-forward-t{length}"] = {"device_us": figures["forward_us"]}
    for label, part in parts.items():
        described: Figures = {"name": label, "length": length, "train": part is figures, "results": {}}
        cases.setdefault(label, described)["results"][who] = part


def contenders(name: str) -> tuple[str, ...]:
    """FLA refuses the gradients of gdn with the Triton that comes with torch 2.11."""
    if name in MODELS:
        return ("ours", "fla")
    unrolled = [f"inductor-{length}" for length in _UNROLLED]
    return {"kda": ("ours", "eager", "fla", *unrolled), "gdn": ("ours",)}.get(name, ("ours", "fla"))


def _asked(name: str, contender: str) -> tuple[str, tuple[int, ...]]:
    """A worker's contender, and the tokens it is asked for: one length if that is in its name."""
    who, _, length = contender.partition("-")
    if length:
        return who, (int(length),)
    return who, tuple(n for n in (LENGTHS if name == "kda" else (MEASURED,)) if n <= _LONGEST.get(who, n))


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


# ---- a worker


def measured(name: str, contender: str) -> Steps:
    """A row or a model by one contender, at all its lengths."""
    who, lengths = _asked(name, contender)
    if name in MODELS:
        step = _model_step(name, who)
        step()
        yield None
        yield str(MEASURED), _model_figures(step)
        return
    checked = lengths[0] if who == "inductor" else CHECKED
    for length in dict.fromkeys((checked, lengths[-1])):
        given = arguments(name, length)
        _both(who, given)()
        torch.no_grad()(_forward(who, given))()
    torch.cuda.synchronize()
    yield None
    errors = _errors(name, who, checked)
    for length in lengths:
        yield str(length), _figures(who, arguments(name, length)) | {"errors": errors}


def arguments(name: str, length: int, device: str = "cuda") -> rows.Given:
    """Of the op; everything that floats wants a gradient. Keys are normalised in the op where there is beta."""
    kind = {"kda": "channel", "gla": "channel", "delta": "none"}.get(name, "token")
    delta = name in ("kda", "gdn", "delta")
    heads, value_heads, value_width = {"gdn": (16, 32, 128), "mamba": (1, 80, 64)}.get(name, (32, 32, 128))
    given = rows.random_arguments(
        kind, "sigmoid" if name == "kda" else "log", length, delta=delta, norm="inside" if delta else "none",
        heads=heads, value_heads=value_heads, value_width=value_width, device=device,
    )  # fmt: skip
    if name == "gla":
        given["g"] = given["g"].bfloat16()
    return given | {n: x.requires_grad_() for n, x in rows.tensors_of(given).items()}


def _forward(who: str, given: rows.Given) -> Callable[[], rows.Output]:
    if who in ("eager", "inductor"):
        return rows.plain(given, who)
    call = rows.ours(given) if who == "ours" else rows.fla(given)
    assert call is not None  # every row has an operator of FLA's
    return call


def _gradients(forward: Callable[[], rows.Output], given: rows.Given) -> Callable[[], tuple[Tensor, ...]]:
    leaves, v = list(rows.tensors_of(given).values()), given["v"]
    of_o = torch.randn(v.shape, device=v.device, generator=torch.Generator(v.device).manual_seed(1)).bfloat16()

    def run() -> tuple[Tensor, ...]:
        o = forward()[0]
        return torch.autograd.grad(o, leaves, of_o.to(o.dtype), retain_graph=True)

    return run


def _both(who: str, given: rows.Given) -> Callable[[], tuple[Tensor, ...]]:
    return _gradients(_forward(who, given), given)


def _errors(name: str, who: str, length: int = CHECKED, device: str = "cuda") -> dict[str, float]:
    """RMS of each gradient's difference over its RMS."""
    given = arguments(name, length, device)
    double = given | {n: x.detach().double().requires_grad_() for n, x in rows.tensors_of(given).items()}
    found, exact = _both(who, given)(), _gradients(lambda: rows.oracle(double), double)()
    names = rows.tensors_of(given)
    return {n: rows.relative_error(a, b) for n, a, b in zip(names, found, exact, strict=True)}


def _figures(who: str, given: rows.Given) -> Figures:
    forward, both = _forward(who, given), _both(who, given)
    inputs = sum(x.nbytes for x in rows.tensors_of(given).values())
    kept: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        forward()
    results = forward()
    backward = _gradients(lambda: results, given)
    moved = 3 * inputs + 2 * given["v"].nbytes  # inputs twice, their gradients, the output and its gradient
    figures = {
        "device_us": _median(both), "backward_us": _median(backward), "forward_us": _median(torch.no_grad()(forward)),
        "host_us": _host(both), "saved_bytes": sum(kept.values()), "floor_us": moved / device_clock.rates()[0],
    }  # fmt: skip
    return figures | {"workspace_bytes": max(device_clock.peak_bytes(backward) - inputs, 0)}


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
    device_clock.seconds_until_done(step)
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(device_clock.seconds_until_done(step) for _ in range(SAMPLES))
    return {"tokens_a_second": MEASURED / seconds, "peak_bytes": torch.cuda.max_memory_allocated()}
