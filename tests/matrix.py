"""The full table: every model, length and dtype, prefill and cached step. ``python -m tests.matrix --help``.

A row passes when every linear-attention layer is matched with the right pattern and mode, no graph break is added to
those the model has under any backend, and the logits are right: fp32 within 1e-5 of eager; bf16 no worse than 1.5 times
eager's own error against an fp64 copy of the model (1.05 times with ``--precision fp32``, which keeps upcasts).
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kdacompile
from kdacompile.errors import KdaError
from kdacompile.report import Report
from tests.compare import relative_error
from tests.models.zoo import CASES, ModelCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FP32_BOUND = 1e-5
BF16_RATIO = {"match": 1.5, "fp32": 1.05}
MODES = {"prefill": "sequence", "step": "step"}
HEADER = (
    f"{'model':<17}{'T':>6} {'dtype':<6}{'what':<9}{'layers':>7}{'breaks':>8}{'error':>10}{'ratio':>7}{'s':>8}  verdict"
)


@dataclass(frozen=True)
class Row:
    """One cell of the matrix, measured."""

    model: str
    length: int
    dtype: str
    what: str
    matched: int
    expected: int
    breaks_added: int
    error: float  # fp32: ours against eager; bf16: ours against fp64
    ratio: float | None  # bf16: our error over eager's
    seconds: float
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        verdict = "ok" if not self.problems else "FAIL " + "; ".join(self.problems)
        layers = f"{self.matched}/{self.expected}"
        return (
            f"{self.model:<17}{self.length:>6} {self.dtype:<6}{self.what:<9}{layers:>7}{self.breaks_added:>+8}"
            f"{self.error:>10.1e}{ratio:>7}{self.seconds:>8.1f}  {verdict}"
        )


def logits(model: PreTrainedModel, kwargs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**kwargs)[0]


def explained(model: PreTrainedModel, kwargs: dict[str, Any], **how: Any) -> Report:
    torch._dynamo.reset()
    with torch.no_grad():
        return kdacompile.explain(model, **how)(**kwargs)


def eager_capture(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
    return graph.forward


def arguments(case: ModelCase, model: PreTrainedModel, what: str, length: int) -> dict[str, Any]:
    if what == "step":
        return case.step_inputs(model, prompt=length)
    return case.prefill_inputs(model, length, cache=True)


@cache
def graphs_alone(name: str, what: str, length: int) -> int:
    """How many graphs the model gives a backend that does nothing."""
    case = CASES[name]
    model = case.build()
    return explained(model, arguments(case, model, what, length), backend=eager_capture).graph_count


def measure(name: str, length: int, dtype: str, what: str, options: dict[str, Any], precision: str) -> Row:
    case = CASES[name]
    model = case.build(DTYPES[dtype])
    started = time.perf_counter()
    report = explained(model, arguments(case, model, what, length), options=options)
    seconds = time.perf_counter() - started
    eager = logits(model, arguments(case, model, what, length))
    ours, ratio = report.result[0], None
    error = relative_error(ours, eager)
    if dtype == "bf16":
        exact_model = copy.deepcopy(model).double()
        exact = logits(exact_model, arguments(case, exact_model, what, length))
        error = relative_error(ours, exact)
        ratio = error / max(relative_error(eager, exact), 1e-12)
    matched = sum((m.pattern, m.mode) == (case.pattern, MODES[what]) for m in report.matches)
    breaks = report.graph_count - graphs_alone(name, what, length)
    problems = list(judge(case.layers, matched, len(report.matches), breaks, error, ratio, precision))
    if matched < case.layers:
        problems += [str(rejection) for rejection in report.rejections]
    return Row(name, length, dtype, what, matched, case.layers, breaks, error, ratio, seconds, tuple(problems))


def judge(
    layers: int, matched: int, all_matches: int, breaks: int, error: float, ratio: float | None, precision: str
) -> Iterator[str]:
    if matched != layers:
        yield f"matched {matched} of {layers} layers"
    if all_matches != matched:
        yield f"{all_matches - matched} matches of another pattern or mode"
    if breaks > 0:
        yield f"{breaks} graph breaks added"
    if ratio is None and error > FP32_BOUND:
        yield f"error {error:.1e} above {FP32_BOUND:.0e}"
    if ratio is not None and ratio > BF16_RATIO[precision]:
        yield f"{ratio:.2f} times eager's error"


def cell(name: str, length: int, dtype: str, what: str, options: dict[str, Any], precision: str) -> Row:
    """:func:`measure`, with a compile that raises turned into a failed row."""
    try:
        return measure(name, length, dtype, what, options, precision)
    except (KdaError, RuntimeError) as error:  # Dynamo's and Inductor's own errors are RuntimeErrors
        text = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        return Row(name, length, dtype, what, 0, CASES[name].layers, 0, float("nan"), None, 0.0, (text,))


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--models", type=names, default=list(CASES), help="comma-separated; default: all")
    parser.add_argument("--lengths", type=names, default=["17", "64", "100", "128", "256", "1000"])
    parser.add_argument("--dtypes", type=names, default=list(DTYPES))
    parser.add_argument("--what", type=names, default=list(MODES), help="prefill,step")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="who compiles the rest")
    parser.add_argument("--precision", choices=tuple(BF16_RATIO), default="match", help="the kda.precision setting")
    args = parser.parse_args(argv)
    for chosen, known in ((args.models, CASES), (args.dtypes, DTYPES), (args.what, MODES)):
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    options = {"kda.inner": args.inner, "kda.precision": args.precision}
    print(HEADER, flush=True)
    rows: list[Row] = []
    for name in args.models:
        for length in map(int, args.lengths):
            for dtype in args.dtypes:
                for what in args.what:
                    rows.append(cell(name, length, dtype, what, options, args.precision))
                    print(rows[-1], flush=True)
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} rows pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
