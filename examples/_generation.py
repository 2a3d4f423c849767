"""Prefill and greedy cached decode of a transformers model under eager, kda and Inductor, side by side."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

import kdacompile
from kdacompile.report.report import Report

if __package__:
    from examples import _common as common
else:
    import _common as common

transformers_logging.set_verbosity_error()  # it warns that optional CUDA kernels are missing

Forward = Callable[..., Any]
MakeCache = Callable[[], Any]


@dataclass(frozen=True)
class Run:
    """One contender: what it generated, and how long each part took once compiled."""

    name: str
    first_call: float  # prefill and all decode steps of a first generation: the compile
    prefill: float
    token: float
    logits: Tensor  # of the prefill
    tokens: Tensor


def generate(forward: Forward, make_cache: MakeCache, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor, float]:
    """Greedy decode; returns the prefill's logits, the new tokens and the prefill's seconds."""
    cache = make_cache()
    start = time.perf_counter()
    logits = forward(input_ids=prompt, past_key_values=cache, use_cache=True).logits
    common.synchronize(prompt.device)
    prefill = time.perf_counter() - start
    tokens = [logits[:, -1:].argmax(-1)]
    for step in range(steps):
        position = torch.full_like(tokens[-1], prompt.shape[1] + step)
        out = forward(input_ids=tokens[-1], past_key_values=cache, position_ids=position, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return logits, torch.cat(tokens, dim=1), prefill


def contend(name: str, forward: Forward, make_cache: MakeCache, prompt: Tensor, steps: int) -> Run:
    common.say(f"{name}: first generation ({prompt.shape[1]} tokens of prompt, {steps} steps) ...")
    _, first = common.timed(lambda: generate(forward, make_cache, prompt, steps), prompt.device)
    common.say(f"{name}: took {first:.2f} s; once more, warm ...")
    (logits, tokens, prefill), total = common.timed(lambda: generate(forward, make_cache, prompt, steps), prompt.device)
    return Run(name, first, prefill, (total - prefill) / steps, logits, tokens)


def print_table(runs: list[Run]) -> None:
    eager = runs[0]
    print(f"\n{'':<10}{'first call':>12}{'prefill':>13}{'a token':>12}{'logits error':>14}  tokens")
    for run in runs:
        error = common.relative_error(run.logits, eager.logits)
        same = "equal" if torch.equal(run.tokens, eager.tokens) else "DIFFERENT"
        print(
            f"{run.name:<10}{run.first_call:>10.2f} s{1000 * run.prefill:>10.1f} ms{1000 * run.token:>9.2f} ms"
            f"{error:>14.1e}  {same}"
        )
    print()


def steps_of(args: argparse.Namespace) -> int:
    """How many tokens are decoded after the prompt."""
    return 4 if args.quick else 32


def compare(
    model: PreTrainedModel,
    args: argparse.Namespace,
    pattern: str,
    layers: int,
    length: int,
    make_cache: MakeCache | None = None,
) -> int:
    """The whole example: run the contenders, print what matched and the table, check, return the exit status.

    ``make_cache``: a new empty cache; by default one that grows.
    """
    steps, new = steps_of(args), make_cache or (lambda: DynamicCache(config=model.config))
    model = model.to(args.device).eval()
    prompt = torch.randint(3, model.config.vocab_size, (1, length), device=args.device)
    torch.compiler.reset()
    with torch.no_grad():
        eager = contend("eager", model, new, prompt, steps)
        with kdacompile.collecting() as report:
            kda = contend("kda", common.compiled(model, args), new, prompt, steps)
        common.print_matches(report)
        print_table([eager, kda])
        if args.quick:
            common.say("Inductor alone: left out by --quick")
        else:
            torch.compiler.reset()
            common.say("Inductor alone, on the same model: this can take a minute or two")
            alone = contend("inductor", torch.compile(model, backend="inductor"), new, prompt, steps)
            print_table([eager, kda, alone])
    return common.verdict(problems(report, eager, kda, pattern, layers))


def problems(report: Report, eager: Run, kda: Run, pattern: str, layers: int) -> list[str]:
    found: list[str] = []
    for mode in ("sequence", "step"):
        matched = sum((match.pattern, match.mode) == (pattern, mode) for match in report.matches)
        if matched < layers:  # a step that recompiles for a grown cache is matched again
            found.append(f"{matched} of {layers} layers matched as {pattern} ({mode})")
    error = common.relative_error(kda.logits, eager.logits)
    if error > 1e-5:
        found.append(f"logits differ from eager's by {error:.1e}")
    if not torch.equal(kda.tokens, eager.tokens):
        found.append("the generated tokens differ from eager's")
    return found
