"""The training suite: forward and backward of the family's rows, ours beside FLA and torch, and whole models.

A contender is a process of its own for all rows of the same kernels; they get ready side by side and are timed one
after the other (``relay``). The table and the JSON file have the device time of both passes, of the backward alone and
of a forward without gradients (a call that the device comes to late, so that the host does not show), the host's time,
the bytes saved between the passes, the most memory the backward holds, and every gradient's error against the fp64
recurrence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kdacompile.bench import cudnn_kda, device_clock, record, rows
from kdacompile.bench.record import Figures
from kdacompile.bench.relay import LONGEST, Job, Outcome, Relay, Steps
from kdacompile.bench.train_rows import MEASURED, ROWS, arguments, differentiated, gradients, of_output

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # of kda; other rows have one
TITLES = {"kda": "KDA, 32 heads of 128, bf16, bounded gates"}
"""What a chart of one row is called."""
_STEPS = {  # of models: who is asked for a step of training; FLA refuses Qwen3-Next's with this Triton
    "kimi_linear": ("ours", "fla"), "qwen3_next": ("ours", "eager"), "deepseek_v3": ("ours", "eager", "inductor"),
}  # fmt: skip
MODELS = tuple(_STEPS)
CHECKED = 256  # tokens: the fp64 recurrence goes token by token
READY_SECONDS, SAMPLES, AT_ONCE = 240.0, 7, 16
_LONGEST = {"eager": 4096}  # tokens up to which torch's operators are asked for a row
_UNROLLED = (256, 512)  # those of Inductor, which unrolls loops: a process for each, since they take minutes to compile


def main(only: Sequence[str] | None, json_path: Path, timeout: float | None) -> int:
    """Run, print a line a measurement, write the JSON. Exit status 1 where one of ours failed."""
    device = record.cuda_device("train")
    chosen = record.chosen([*ROWS, *MODELS], only)
    cases: dict[str, Figures] = {}

    def done(job: Job, outcome: Outcome) -> None:
        who, asked = _asked(job.group, job.contender)
        for name, length in ((name, length) for name, lengths in asked.items() for length in lengths):
            figures = outcome.found.get(_key(name, length), {"failure": outcome.reason})
            put(cases, name, length, who, figures)
            print(f"{name}-t{length:<14d} {who:8s} {line(figures)}", flush=True)
        title = TITLES.get(chosen[0]) if len(chosen) == 1 else None
        record.write(json_path, "train", list(cases.values()), device=device, title=title)

    Relay(timeout or READY_SECONDS, timeout or LONGEST).run(waves(chosen), done)
    print(f"\nwritten to {json_path}")
    return 1 if any("failure" in case["results"].get("ours", {}) for case in cases.values()) else 0


def waves(chosen: Sequence[str]) -> list[list[Job]]:
    """Rows, some workers at a time, then a model at a time: what they keep on the device does not fit it at once."""
    alike: dict[object, list[str]] = {}
    for name in chosen:
        if name not in MODELS:
            alike.setdefault(ROWS[name].kernels, []).append(name)
    of_rows = [job for names in alike.values() for job in _jobs(names)]
    starts = range(0, len(of_rows), AT_ONCE)
    of_models = [_jobs([name]) for name in chosen if name in MODELS]
    return [of_rows[start : start + AT_ONCE] for start in starts] + of_models


def _jobs(names: Sequence[str]) -> list[Job]:
    """One for each contender of some rows; it measures those that it is asked for."""
    everyone = dict.fromkeys(who for name in names for who in contenders(name))
    return [Job(f"{names[0]}, {who}", __name__, ",".join(names), who) for who in everyone]


def put(cases: dict[str, Figures], name: str, length: int, who: str, figures: Figures) -> None:
    """A contender's figures at a length: of training, and of the forward pass where that was measured alone."""
    parts = {f"{name}-t{length}": figures}
    if "forward_us" in figures:
        parts[f"{name}-forward-t{length}"] = {"device_us": figures["forward_us"]}
    for label, part in parts.items():
        described: Figures = {"name": label, "length": length, "train": part is figures, "results": {}}
        cases.setdefault(label, described)["results"][who] = part


def contenders(name: str) -> tuple[str, ...]:
    if name in MODELS:
        return _STEPS[name]
    unrolled = ("eager", *(f"inductor-{length}" for length in _UNROLLED)) if name == "kda" else ()
    return ("ours", *ROWS[name].peers, *unrolled)


def _asked(group: str, contender: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """A worker's contender, and by row or model the tokens it is asked for: one length if that is in its name."""
    who, _, length = contender.partition("-")
    return who, {name: _lengths(name, who, length) for name in group.split(",") if contender in contenders(name)}


def _lengths(name: str, who: str, length: str) -> tuple[int, ...]:
    if length:
        return (int(length),)
    if name in MODELS:
        return (MEASURED,)
    everyone = LENGTHS if name == "kda" else (ROWS[name].length,)
    return tuple(n for n in everyone if n <= _LONGEST.get(who, n))


def _key(name: str, length: int) -> str:
    """Of a worker's figures."""
    return f"{name} {length}"


def line(figures: Figures) -> str:
    if "failure" in figures:
        return f"- {figures['failure'][:90]}"
    if "tokens_a_second" in figures:
        return f"{figures['tokens_a_second']:,.0f} tokens/s, {figures['peak_bytes'] / 2**30:.1f} GiB"
    worst = max(figures["errors"].items(), key=lambda item: item[1])
    backward = f"backward {figures['backward_us']:7.0f}, "
    last = f"workspace {figures['workspace_bytes'] >> 20} MiB, worst error {worst[1]:.1e} (d{worst[0]})"
    if "device_us" not in figures:
        return backward + last
    return (
        f"{figures['device_us']:7.0f} us, {backward}floor {figures['floor_us']:4.0f}, host {figures['host_us']:5.0f}, "
        f"saved {figures['saved_bytes'] >> 20} MiB, {last}"
    )


# ---- a worker


def measured(group: str, contender: str) -> Steps:
    """Rows of the same kernels, or a model, by one contender, at all its lengths."""
    who, asked = _asked(group, contender)
    if group in MODELS:
        step = _model_step(group, who)
        step()
        torch.cuda.empty_cache()  # others may be on the device
        yield None
        yield _key(group, MEASURED), _model_figures(step)
        return
    if who == "portable":
        _leave_emitted_kernels_alone()
    errors = {name: _prepared(name, who, lengths) for name, lengths in asked.items()}
    torch.cuda.empty_cache()
    yield None
    for name, length in ((name, length) for name, lengths in asked.items() for length in lengths):
        yield _key(name, length), _figures(name, who, arguments(name, length)) | {"errors": errors[name]}


def _prepared(name: str, who: str, lengths: Sequence[int]) -> dict[str, float]:
    """First calls of a row, and its gradients' errors."""
    checked = lengths[0] if who == "inductor" else CHECKED
    for length in dict.fromkeys((checked, lengths[-1])):
        given = arguments(name, length)
        if who != "cudnn":
            _both(name, who, given)()
            torch.no_grad()(_forward(who, given))()
    torch.cuda.synchronize()
    return _errors(name, who, checked)


def _leave_emitted_kernels_alone() -> None:
    from kdacompile.lowering import cuda
    from kdacompile.lowering.triton import TritonGradients, TritonKernels

    cuda.IMPLEMENTATIONS[:], cuda.ADJOINTS[:] = [TritonKernels()], [TritonGradients()]


def _forward(who: str, given: rows.Given) -> Callable[[], rows.Output]:
    if who in ("eager", "inductor"):
        return rows.plain(given, who)
    call = rows.ours(given) if who in ("ours", "portable") else rows.fla(given)
    assert call is not None  # every row has an operator of FLA's
    return call


def _both(name: str, who: str, given: rows.Given) -> Callable[[], tuple[Tensor, ...]]:
    return gradients(name, _forward(who, given), given)


def _errors(name: str, who: str, length: int = CHECKED, device: str = "cuda") -> dict[str, float]:
    """RMS of each gradient's difference over its RMS; where the exact one is 0, what was found."""
    given = arguments(name, length, device)
    double = given | {n: x.detach().double().requires_grad_() for n, x in differentiated(given).items()}
    exact = dict(zip(differentiated(given), gradients(name, lambda: rows.oracle(double), double)(), strict=True))
    if who == "cudnn":
        call, found, _ = cudnn_kda.backward(given, of_output(given))
        call()
    else:
        found = dict(zip(exact, _both(name, who, given)(), strict=True))
    return {n: rows.relative_error(x, exact[n]) if exact[n].any() else float(x.norm()) for n, x in found.items()}


def _figures(name: str, who: str, given: rows.Given) -> Figures:
    if who == "cudnn":
        backward, _, size = cudnn_kda.backward(given, of_output(given))
        return {"backward_us": _median(backward), "workspace_bytes": size}
    forward, both = _forward(who, given), _both(name, who, given)
    inputs = sum(x.nbytes for x in rows.tensors_of(given).values())
    kept: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        forward()
    results = forward()
    backward = gradients(name, lambda: results, given)
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
    backends = {"ours": "kda", "inductor": "inductor"}
    called = torch.compile(model, backend=backends[who]) if who in backends else model
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
