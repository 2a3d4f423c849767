"""``python -m tests.lengths [model ...]``: prompts of many lengths in one process, and how often that compiles.

For each model, prompts of 40 lengths from 1 to 5000 and two cached steps after each, with the compiled forward. Counted
are Dynamo's graphs: those of prompts and those of steps. The logits are compared with the eager model's.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

import kdacompile
from tests.compare import relative_error
from tests.models.zoo import CASES, ModelCase

MODELS = ("kimi_linear", "glm5_next", "bailing_hybrid", "qwen3_next", "qwen3_5", "olmo_hybrid")
PREFILL_GRAPHS, STEP_GRAPHS = 3, 3
"""The first length as it is, any length, and one: Dynamo makes graphs of their own for sizes of one, here of the prompt
and of the cache that a prompt of one token leaves."""
BOUND = 1e-5


@dataclass
class Tally:
    """What one model came to."""

    prefill: int = 0
    step: int = 0
    errors: list[float] = field(default_factory=list[float])

    @property
    def holds(self) -> bool:
        return self.prefill <= PREFILL_GRAPHS and self.step <= STEP_GRAPHS and max(self.errors) <= BOUND


def lengths(count: int, longest: int) -> list[int]:
    """1, the longest, and others in between, spread evenly over their magnitudes, in random order."""
    rng = random.Random(0)
    drawn = {1, longest}
    while len(drawn) < count:
        drawn.add(round(longest ** rng.random()))
    return rng.sample(sorted(drawn), count)


def measure(case: ModelCase, prompts: list[int], inner: str) -> Tally:
    model, tally = case.build(), Tally()
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="kda", options={"kda.inner": inner})
    with torch.no_grad():
        for length in prompts:
            caches = [case.prefill_inputs(model, length, cache=True, batch=1) for _ in range(2)]
            tally.prefill += compare(run, model, caches, tally)
            for position in (length, length + 1):
                step: dict[str, Any] = {"input_ids": case.tokens(1, 1, seed=position)}
                step["position_ids"] = torch.full((1, 1), position)
                tally.step += compare(run, model, [{**cache, **step} for cache in caches], tally)
    return tally


def compare(run: Any, model: Any, arguments: list[dict[str, Any]], tally: Tally) -> int:
    """Both forwards on the same arguments; how many graphs the compiled one captured."""
    before = counters["stats"]["unique_graphs"]
    have, want = run(**arguments[0])[0], model(**arguments[1])[0]
    tally.errors.append(relative_error(have, want))
    return counters["stats"]["unique_graphs"] - before


def main() -> int:
    parser = argparse.ArgumentParser(description="prompts of many lengths in one process")
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--count", type=int, default=40, help="how many lengths")
    parser.add_argument("--longest", type=int, default=5000)
    parser.add_argument("--inner", default="inductor", help="kda.inner: the compiler of the rest")
    arguments = parser.parse_args()
    prompts, good = lengths(arguments.count, arguments.longest), True
    print(f"kdacompile {kdacompile.__version__}, torch {torch.__version__}: {len(prompts)} prompts, {min(prompts)} to")
    print(f"{max(prompts)} tokens, two steps after each\n{'model':<16}{'prefill':>9}{'steps':>7}{'error':>10}{'s':>8}")
    for name in arguments.models:
        start = time.perf_counter()
        tally = measure(CASES[name], prompts, arguments.inner)
        took = time.perf_counter() - start
        verdict = "" if tally.holds else "  too many graphs or too large an error"
        print(f"{name:<16}{tally.prefill:>9}{tally.step:>7}{max(tally.errors):>10.1e}{took:>8.0f}{verdict}", flush=True)
        good &= tally.holds
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
