"""What every example prints: progress while it works, what matched, and a table beside eager and Inductor."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kdacompile
from kdacompile.bench import measure
from kdacompile.doctor import device_problem
from kdacompile.report.report import Report

_STARTED = time.perf_counter()


@dataclass
class Result:
    """One contender's numbers; ``error`` is relative to eager's result, ``call`` what :func:`print_table` times."""

    name: str
    first_call: float
    call: Callable[[], Any]
    error: float | None = None


def arguments(description: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, and no compiling by Inductor at all")
    parser.add_argument("--device", default="cpu")
    found = parser.parse_args(argv)
    problem = device_problem(found.device)
    if problem is not None:
        parser.error(problem)
    return found


def compiled(fn: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """``fn`` under backend="kda"; with --quick what is not rewritten runs eagerly instead of through Inductor."""
    if args.quick:
        return torch.compile(fn, backend="kda", options={"kda.inner": "eager"})
    say("Inductor starts: once a machine it checks the C++ compiler and precompiles headers ...")
    torch.compile(torch.square, backend="inductor")(torch.zeros(8, device=args.device))
    torch.compiler.reset()
    return torch.compile(fn, backend="kda")


def say(text: str) -> None:
    """A progress line with the time since the start."""
    print(f"[{time.perf_counter() - _STARTED:6.1f} s] {text}", flush=True)


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: torch.device | str) -> tuple[Any, float]:
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def contend(
    name: str, call: Callable[[], Tensor], device: torch.device | str, expected: Tensor | None = None
) -> tuple[Tensor, Result]:
    """The first call; for a compiled function that is the compile."""
    say(f"{name}: first call ...")
    value, first = timed(call, device)
    say(f"{name}: first call took {first:.2f} s")
    return value, Result(name, first, call, None if expected is None else relative_error(value, expected))


def contend_kda(call: Callable[[], Tensor], device: torch.device | str, expected: Tensor) -> tuple[Report, Result]:
    """:func:`contend` for a function compiled with backend="kda", with the report of what it did."""
    with kdacompile.collecting() as report:
        _, result = contend("kda", call, device, expected)
    return report, result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def print_matches(report: Report) -> None:
    """What was rewritten, from which line of the model, and why the rest was not."""
    for match in report.matches:
        print(f"  matched {match.pattern} ({match.mode}) at {match.source}, proven to {match.max_error:.0e}")
    if not report.matches:
        print("  nothing matched")
    for rejection in report.rejections:
        print(f"  not rewritten: {rejection.pattern} at {rejection.source}: {rejection.reason}")


def print_table(results: Sequence[Result]) -> None:
    """Time the contenders in turn; print medians, quartiles, and how much faster kda is, or that nobody can tell.

    What is timed has been compiled: a call that would compile again, as in another grad mode, is an error.
    """
    say(f"running {', '.join(result.name for result in results)} in turn ...")
    with torch.compiler.set_stance("fail_on_recompile"):
        runs = measure.timings({result.name: result.call for result in results})
    print(f"\n{'':<10}{'first call':>12}{'error':>12}   run")
    for result in results:
        error = "" if result.error is None else f"{result.error:.1e}"
        print(f"{result.name:<10}{result.first_call:>10.2f} s{error:>12}   {runs[result.name]}")
    print()
    for name in ("eager", "inductor"):
        if name in runs:
            print(f"kda beside {name}: {measure.Speedup.of(runs[name], runs['kda'])}")
    if measure.load():
        print(f"warning: {measure.load()}")
    print()


def verdict(problems: Sequence[str]) -> int:
    """The exit status, with the reasons printed."""
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print("all checks passed")
    return 1 if problems else 0
