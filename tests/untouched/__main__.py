"""``python -m tests.untouched``: every program under backend="kda" and under Inductor alone, compared bit for bit.

Compared are all results, the number of graphs, and the source code Inductor generated: the same code takes the same
time. Matrix products are compiled under each setting of ``torch.set_float32_matmul_precision``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Torch-private: the source code that Inductor generates, and the switch of its caches.
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from kdacompile import compat
from kdacompile.backend import kda
from kdacompile.report.collect import collecting
from kdacompile.settings import Settings
from tests.compare import tensors
from tests.untouched.networks import NETWORKS, Compile
from tests.untouched.operators import OPERATORS, PRODUCTS, Maker

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = ("highest", "high", "medium")
HEADER = f"{'program':<44}{'graphs':>8}{'results':>9}{'s':>7}  verdict"


@dataclass(frozen=True)
class Program:
    """Something to compile and run; ``precision`` is that of fp32 matrix products."""

    name: str
    run: Callable[[Compile], Any]
    precision: str = "highest"


@dataclass(frozen=True)
class Outcome:
    """What a program gave under one backend."""

    results: list[Tensor]
    graphs: int
    code: list[str]


def programs() -> Iterator[Program]:
    for name, maker in OPERATORS.items():
        for dtype in DTYPES:
            for precision in PRECISIONS if name in PRODUCTS and dtype == "fp32" else ("highest",):
                suffix = "" if precision == "highest" else f" {precision}"
                yield Program(f"{name} {dtype}{suffix}", runner(maker, DTYPES[dtype]), precision)
    for name, run in NETWORKS.items():
        yield Program(name, run)


def runner(maker: Maker, dtype: torch.dtype) -> Callable[[Compile], Any]:
    def run(compile_: Compile) -> Any:
        fn, arguments = maker(dtype)
        return [compile_(fn)(*arguments), arguments]  # some arguments are written to

    return run


def inductor(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return compat.compile_fx(gm, inputs, {})


def outcome(program: Program, backend: Backend) -> Outcome:
    graphs, code = 0, list[str]()

    def counting(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return backend(gm, inputs)

    if backend is kda:
        marked: Any = counting
        marked.kdacompile_settings = Settings()  # Dynamo's calls are looked at as they are for the backend itself
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(program.precision)
    before = GraphLowering.save_output_code
    try:
        GraphLowering.save_output_code = staticmethod(code.append)
        with inductor_config.patch(force_disable_caches=True):
            results = tensors(program.run(lambda fn: torch.compile(fn, backend=counting)))
    finally:
        GraphLowering.save_output_code = before
        torch.set_float32_matmul_precision("highest")
    return Outcome(results, graphs, [re.sub(r"# AOT ID: .*", "", text) for text in code])  # a serial number


def differences(ours: Outcome, theirs: Outcome) -> Iterator[str]:
    if ours.graphs != theirs.graphs:
        yield f"{ours.graphs} graphs, Inductor alone {theirs.graphs}"
    if not theirs.results or len(ours.results) != len(theirs.results):
        yield f"{len(ours.results)} results, Inductor alone {len(theirs.results)}"
    pairs = zip(ours.results, theirs.results, strict=False)
    unequal = sum(not same_bits(x, y) for x, y in pairs)
    if unequal:
        yield f"{unequal} results differ"
    if not theirs.code or ours.code != theirs.code:
        yield "the generated code differs"


def same_bits(x: Tensor, y: Tensor) -> bool:
    if (x.dtype, x.shape, x.stride()) != (y.dtype, y.shape, y.stride()):
        return False
    return torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))


def compare(program: Program) -> bool:
    started = time.perf_counter()
    with collecting() as report:
        ours = outcome(program, kda)
    theirs = outcome(program, inductor)
    problems = list(differences(ours, theirs))
    problems += [f"matched {match.pattern} at {match.source}" for match in report.matches]
    seconds = time.perf_counter() - started
    verdict = "; ".join(["FAIL", *problems]) if problems else "same bits, same code"
    print(f"{program.name:<44}{ours.graphs:>8}{len(ours.results):>9}{seconds:>7.1f}  {verdict}", flush=True)
    return not problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.untouched", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose name contains this")
    only = parser.parse_args(argv).only
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    chosen = [program for program in programs() if only in program.name]
    print(HEADER, flush=True)
    same = sum(map(compare, chosen))
    print(f"{same} of {len(chosen)} programs are exactly Inductor's")
    return 0 if chosen and same == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
