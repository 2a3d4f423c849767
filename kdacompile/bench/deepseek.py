"""A decode step of transformers' DeepSeek-V3 on a CUDA device: Inductor alone and ``backend="kda"``.

    python -m kdacompile.bench.deepseek [--cache 8192] [--batch 16] [--layers 4] [--heads 128] [--json FILE]

The attention has its real sizes (hidden 7168, latents of 1536 and 512, heads of 128 + 64 and 128 channels). The
mixture of experts is replaced by a dense MLP of 2048 and the vocabulary is small, so that attention is what is
measured. bf16, random weights, a static cache filled with random numbers up to its last slot; every contender in a
process of its own, each in the default mode and in ``reduce-overhead`` (CUDA graphs). They compile side by side and are
timed one after the other. Errors are the logits', against the same weights in fp32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import device_clock, record, rows
from kdacompile.bench.relay import Job, Outcome, Relay, Steps
from kdacompile.errors import BenchError
from kdacompile.report.collect import collecting

MODULE = "kdacompile.bench.deepseek"
CONTENDERS = tuple((backend, mode) for mode in ("default", "reduce-overhead") for backend in ("inductor", "kda"))
GOAL = 10.0
"""How many times faster than Inductor alone a step at the default sizes is meant to be."""
SAMPLES = 21
TOGETHER = 4  # requests at once in fp32: the model's own form expands the caches of all
READY_SECONDS, TIMED_SECONDS = 300.0, 60.0

Figures = dict[str, Any]


def build(args: argparse.Namespace) -> Any:
    """The model in fp32, its weights rounded to bf16."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 1024,
        "max_position_embeddings": args.cache,
        "first_k_dense_replace": args.layers,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    return model.eval().bfloat16().float()


class Step:
    """One token for every request of ``requests``, over a cache that has room for just that."""

    def __init__(self, model: Any, args: argparse.Namespace, requests: range) -> None:
        from transformers import StaticCache

        self.last = args.cache - 1
        self.tokens = 3 + torch.tensor(requests, device="cuda")[:, None]
        self.cache: Any = StaticCache(model.config, args.cache)
        model(input_ids=self.tokens, past_key_values=self.cache, use_cache=True)
        for row, request in enumerate(requests):
            generator = torch.Generator("cuda").manual_seed(request)
            for layer in self.cache.layers:
                for held in (layer.keys, layer.values):
                    held[row] = torch.randn(held.shape[1:], generator=generator, device="cuda").bfloat16()

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.last)

    def __call__(self, forward: Callable[..., Any]) -> Tensor:
        """The logits; the step that follows another rewinds first."""
        positions = torch.full_like(self.tokens, self.last)
        out = forward(input_ids=self.tokens, position_ids=positions, past_key_values=self.cache, use_cache=True)
        return out.logits


def milliseconds(step: Step, forward: Callable[..., Any]) -> float:
    """The median over steps, on the device's clock."""
    samples: list[float] = []
    for _ in range(SAMPLES):
        step.rewind()
        samples.append(1e-3 * device_clock.elapsed(lambda: step(forward)))
    return statistics.median(samples)


def exact_logits(model: Any, args: argparse.Namespace) -> Tensor:
    """What a model in fp32 gives."""
    parts: list[Tensor] = []
    for start in range(0, args.batch, TOGETHER):
        step = Step(model, args, range(start, min(start + TOGETHER, args.batch)))
        step.rewind()
        parts.append(step(model))
    return torch.cat(parts)


def measured(sizes: str, contender: str) -> Steps:
    """One contender in a process of its own (see ``relay``)."""
    args, (backend, mode) = argparse.Namespace(**json.loads(sizes)), contender.split()
    with torch.no_grad():
        model = build(args)
        want = exact_logits(model, args)
        model = model.bfloat16()
        torch.cuda.empty_cache()  # others get ready as well
        step = Step(model, args, range(args.batch))
        compiled = torch.compile(model, backend=backend, mode=mode, dynamic=False)
        step.rewind()
        with collecting() as report:
            seconds = device_clock.seconds_until_done(lambda: step(compiled))
        if backend == "kda" and [match.pattern for match in report.matches] != ["mla"] * args.layers:
            raise BenchError(detail=str(report))
        for _ in range(3):  # CUDA graphs are recorded
            step.rewind()
            step(compiled)
        yield None
        step.rewind()
        have = step(compiled).clone()
        error = rows.relative_error(have, want.double())
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        figures = {"ms": milliseconds(step, compiled), "error": error, "compile_s": seconds}
        yield contender, figures | {"peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30}


def run_all(args: argparse.Namespace) -> dict[str, Figures]:
    """Every contender in its own process; figures, or ``{"failure": text}``."""
    results: dict[str, Figures] = {f"{backend} {mode}": {} for backend, mode in CONTENDERS}

    def done(job: Job, outcome: Outcome) -> None:
        failed = {"failure": "\n".join([outcome.failure or "no figures", *outcome.stderr[-8:]])}
        results[job.name] = outcome.found.get(job.name, failed)

    group = json.dumps({name: getattr(args, name) for name in ("cache", "batch", "layers", "heads")})
    Relay(READY_SECONDS, TIMED_SECONDS).run([[Job(name, MODULE, group, name) for name in results]], done)
    return results


def sizes(args: argparse.Namespace) -> str:
    return f"{args.layers} layers of {args.heads} heads, bf16"


def table(results: dict[str, Figures], args: argparse.Namespace) -> str:
    """One line a contender, and how the pairs compare."""
    lines = [f"one token over {args.cache} cached, batch {args.batch}, {sizes(args)}"]
    for name, figures in results.items():
        if "failure" in figures:
            lines.append(f"  {name:<26}failed: {figures['failure']}")
            continue
        text = f"{figures['ms']:9.3f} ms   error {figures['error']:.1e}   compiled in {figures['compile_s']:.0f} s"
        lines.append(f"  {name:<26}{text}   {figures['peak_gib']:.2f} GiB on top")
    for mode in dict.fromkeys(mode for _, mode in CONTENDERS):
        theirs, ours = (results.get(f"{backend} {mode}", {}).get("ms") for backend in ("inductor", "kda"))
        if theirs and ours:
            ratio = theirs / ours
            goal = f", goal {GOAL:g}: {'met' if ratio >= GOAL else 'MISSED'}"
            lines.append(f"  {mode}: {ratio:.1f} times faster than Inductor alone{goal}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kdacompile.bench.deepseek", description=__doc__)
    for name, default in (("cache", 8192), ("batch", 16), ("layers", 4), ("heads", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise BenchError(detail="this benchmark needs a CUDA device")
    results = run_all(args)
    print(table(results, args))
    if args.json is not None:
        case = {"name": f"step over {args.cache}", "results": results}
        record.write(
            args.json, "deepseek", [case], device=torch.cuda.get_device_name(), title=f"DeepSeek-V3, {sizes(args)}"
        )
    return 1 if any("failure" in figures for figures in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
