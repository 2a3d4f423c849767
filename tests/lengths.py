"""``python -m tests.lengths [model ...]``: prompts of many lengths in one process, and how often that compiles.

For each model, prompts of 40 lengths from 1 to 5000 and two cached steps after each, with the compiled forward. Counted
are Dynamo's graphs: those of prompts and those of steps. Every graph must have all the model's layers of linear
attention matched, the logits are compared with the eager model's, and running out of recompilations is an error. A
prompt beyond the bound must at least be no farther from fp64 than eager mode is.
``--markdown FILE`` writes the table down.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters

import kdacompile
from kdacompile import compat
from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.models.zoo import CASES, ModelCase

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid", "qwen3_next", "qwen3_5", "olmo_hybrid")
PREFILL_GRAPHS, STEP_GRAPHS = 3, 2
"""Any length, and one: Dynamo makes graphs of their own for sizes of one, of the prompt and of the cache that a prompt
of one token leaves. The third for prompts is transformers' own branch for prompts shorter than the convolution."""
ONE_CHUNK_APART = ("qwen3_next", "qwen3_5", "olmo_hybrid")
"""A fourth: what transformers' gated delta rule returns in fp32 lies otherwise within one chunk than for several."""
POOLS_APART = ("glm5_next",)
"""A third of steps: over caches of one pool, whose strides tell it from several. No function is replaced in a step, so
that results may lie in memory as these strides say, and they are guarded."""
BOUND = 1e-5
DYNAMO: dict[str, Any] = {"fail_on_recompile_limit_hit": True}  # where torch.compile would fall back to eager
TITLE = "| model | graphs of prompts | graphs of steps | largest graph | largest error | CPU s |"


@dataclass
class Tally:
    """What one model came to."""

    prefill: int = 0
    step: int = 0
    nodes: int = 0
    """Of the largest graph captured."""
    unmatched: int = 0
    """Graphs in which not every layer was matched."""
    errors: list[float] = field(default_factory=list[float])
    exact: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Of prompts beyond the bound: the errors of both forwards against fp64."""
    seconds: float = 0.0

    def problem(self, name: str) -> str:
        if self.unmatched:
            return f"{self.unmatched} graphs without all matches"
        most = PREFILL_GRAPHS + (name in ONE_CHUNK_APART), STEP_GRAPHS + (name in POOLS_APART)
        if self.prefill > most[0] or self.step > most[1]:
            return "too many graphs"
        beyond = sum(error > BOUND for error in self.errors)
        sound = beyond == len(self.exact) and all(have <= eager for have, eager in self.exact)
        return "" if sound else "too large an error"

    def row(self, name: str) -> str:
        error = f"{max(self.errors):.1e}"
        error += "".join(f" (from fp64: {have:.1e}, eager {eager:.1e})" for have, eager in self.exact)
        return f"| {name} | {self.prefill} | {self.step} | {self.nodes} nodes | {error} | {self.seconds:.0f} |"


def lengths(count: int, longest: int) -> list[int]:
    """1, the longest, and others in between, spread evenly over their magnitudes, in random order."""
    rng = random.Random(0)
    drawn = {1, longest}
    while len(drawn) < count:
        drawn.add(round(longest ** rng.random()))
    return rng.sample(sorted(drawn), count)


def measure(case: ModelCase, prompts: list[int], inner: str, attention: str = "sdpa") -> Tally:
    model, tally = case.build(attention=attention), Tally()
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="kda", options={"kda.inner": inner})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with torch.no_grad(), compat.dynamo_settings(DYNAMO):
        for length in prompts:
            caches = [case.prefill_inputs(model, length, cache=True, batch=1) for _ in range(2)]
            tally.prefill += compare(case, run, model, caches, tally)
            if tally.errors[-1] > BOUND:
                tally.exact.append(against_fp64(case, (run, model), length, attention))
            for position in (length, length + 1):
                step: dict[str, Any] = {"input_ids": case.tokens(1, 1, seed=position)}
                step["position_ids"] = torch.full((1, 1), position)
                tally.step += compare(case, run, model, [{**cache, **step} for cache in caches], tally)
    tally.seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    return tally


def compare(case: ModelCase, run: Any, model: Any, arguments: list[dict[str, Any]], tally: Tally) -> int:
    """Both forwards on the same arguments; how many graphs the compiled one captured."""
    before = counters["stats"]["unique_graphs"]
    with collecting() as report:
        have = run(**arguments[0])[0]
    tally.errors.append(relative_error(have, model(**arguments[1])[0]))
    for graph in report.graphs:
        tally.nodes = max(tally.nodes, graph.nodes)
        tally.unmatched += sum(match.pattern == case.pattern for match in graph.matches) != case.layers
    return counters["stats"]["unique_graphs"] - before


def against_fp64(case: ModelCase, forwards: tuple[Any, Any], length: int, attention: str) -> tuple[float, float]:
    """Errors of two forwards of a prompt: where a sparse layer chooses between tokens that are nearly tied, rounding
    decides, and eager mode is as far from the truth.
    """
    exact: Any = case.build(attention=attention).double()
    want = exact(**case.prefill_inputs(exact, length, cache=True, batch=1))[0]
    ours, eager = (run(**case.prefill_inputs(exact, length, cache=True, batch=1))[0] for run in forwards)
    return relative_error(ours, want), relative_error(eager, want)


def machine(inner: str, attention: str) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    asked = f"`kda.inner` {inner}, {attention} attention"
    return f"kdacompile {kdacompile.__version__}, {versions}, {os.cpu_count()} CPU cores, {asked}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lengths", description="prompts of many lengths in one process"
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--count", type=int, default=40, help="how many lengths")
    parser.add_argument("--longest", type=int, default=5000)
    parser.add_argument("--inner", default="inductor", help="kda.inner: the compiler of the rest")
    parser.add_argument("--attention", default="sdpa", help="of the other layers; sdpa is transformers' default")
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    arguments = parser.parse_args()
    prompts, good = lengths(arguments.count, arguments.longest), True
    where = machine(arguments.inner, arguments.attention)
    print(f"{where}: {len(prompts)} prompts, 1 to {max(prompts)} tokens, two steps after each")
    rows = [TITLE, "| --- " * TITLE.count(" | ") + "| --- |"]
    print(*rows, sep="\n", flush=True)
    for name in arguments.models:
        tally = measure(CASES[name], prompts, arguments.inner, arguments.attention)
        rows.append(tally.row(name))
        problem = tally.problem(name)
        print(rows[-1], problem, flush=True)
        good &= not problem
    if arguments.markdown:
        with arguments.markdown.open("a") as file:
            print("", where + ":", "", *rows, sep="\n", file=file)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
