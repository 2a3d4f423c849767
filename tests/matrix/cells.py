"""One cell of the matrix: what is asked of a model at one length, measured and judged.

A cell passes when every linear-attention layer is matched with the right pattern and mode, nothing else is matched, no
graph break is added to those the model has under any backend, and the logits are right: fp32 within 1e-5 of eager; bf16
no worse than 1.5 times eager's own error against an fp64 copy of the model; bf16 with the model's upcasts kept
(``kda.precision="fp32"``) no worse than eager's own error.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Numbers:
    """A dtype of the model, the ``kda.precision`` it runs under, and the bound its logits must keep."""

    dtype: torch.dtype
    precision: str
    error: float | None = None  # against eager
    ratio: float | None = None  # our error against fp64 over eager's error against fp64


NUMBERS = {
    "fp32": Numbers(torch.float32, "match", error=1e-5),
    "bf16": Numbers(torch.bfloat16, "match", ratio=1.5),
    # The bound is eager's own error. Two roundings of equal quality differ by chance; 5 % is that chance.
    "bf16-up": Numbers(torch.bfloat16, "fp32", ratio=1.05),
}
LENGTHS = (17, 64, 100, 128, 256, 1000)
MODES = {"prefill": "sequence", "step": "step"}
INNERS = ("eager", "aot_eager", "inductor")


@dataclass(frozen=True)
class Cell:
    """What to measure: ``length`` is that of the prompt, which for a step is in the cache already."""

    model: str
    length: int
    numbers: str
    what: str
    inner: str

    @property
    def case(self) -> ModelCase:
        return CASES[self.model]


@dataclass(frozen=True)
class Row:
    """A cell, measured."""

    cell: Cell
    matched: int
    breaks_added: int
    error: float  # fp32: ours against eager; bf16: ours against fp64
    ratio: float | None  # bf16: our error over eager's
    seconds: float  # the first call: capture, proof, compile, run
    problems: tuple[str, ...] = ()

    @classmethod
    def failed(cls, cell: Cell, problem: str) -> Row:
        """A cell that gave no numbers."""
        return cls(cell, 0, 0, float("nan"), None, 0.0, (problem,))


def measure(cell: Cell) -> Row:
    """Run one cell; a compile that raises makes a failed row."""
    try:
        return _measure(cell)
    except (KdaError, RuntimeError) as error:  # Dynamo's and Inductor's own errors are RuntimeErrors
        text = str(error).splitlines()
        return Row.failed(cell, f"{type(error).__name__}: {text[0][:200] if text else ''}")


def _measure(cell: Cell) -> Row:
    case, numbers = cell.case, NUMBERS[cell.numbers]
    model = case.build(numbers.dtype)
    own = _arguments(cell, model)
    started = time.perf_counter()
    report = _explained(model, own, options={"kda.inner": cell.inner, "kda.precision": numbers.precision})
    seconds = time.perf_counter() - started
    eager = _logits(model, _arguments(cell, model))
    ours, ratio = report.result[0], None
    error = relative_error(ours, eager)
    if numbers.ratio is not None:
        exact_model = copy.deepcopy(model).double()
        exact = _logits(exact_model, _arguments(cell, exact_model))
        error = relative_error(ours, exact)
        ratio = error / max(relative_error(eager, exact), 1e-12)
    matched = sum((m.pattern, m.mode) == (case.pattern, MODES[cell.what]) for m in report.matches)
    breaks = report.graph_count - _graphs_alone(cell.model, cell.what, cell.length)
    row = Row(cell, matched, breaks, error, ratio, seconds)
    problems = list(judge(row, len(report.matches)))
    if matched < case.layers:
        problems += [str(rejection) for rejection in report.rejections]
    return Row(cell, matched, breaks, error, ratio, seconds, tuple(problems))


def judge(row: Row, all_matches: int) -> Iterator[str]:
    """What is wrong with a row, in words; ``all_matches`` counts those of any pattern and mode."""
    bounds, layers = NUMBERS[row.cell.numbers], row.cell.case.layers
    if row.matched != layers:
        yield f"matched {row.matched} of {layers} layers"
    if all_matches != row.matched:
        yield f"{all_matches - row.matched} matches of another pattern or mode"
    if row.breaks_added > 0:
        yield f"{row.breaks_added} graph breaks added"
    if bounds.error is not None and not row.error <= bounds.error:  # also NaN
        yield f"error {row.error:.1e} above {bounds.error:.0e}"
    if bounds.ratio is not None and not (row.ratio is not None and row.ratio <= bounds.ratio):
        yield f"{row.ratio} times eager's error, {bounds.ratio} allowed"


def _logits(model: PreTrainedModel, kwargs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**kwargs)[0]


def _explained(model: PreTrainedModel, kwargs: dict[str, Any], **how: Any) -> Report:
    torch._dynamo.reset()
    with torch.no_grad():
        return kdacompile.explain(model, **how)(**kwargs)


def _arguments(cell: Cell, model: PreTrainedModel) -> dict[str, Any]:
    if cell.what == "step":
        return cell.case.step_inputs(model, prompt=cell.length)
    return cell.case.prefill_inputs(model, cell.length, cache=True)


def _eager_capture(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
    return graph.forward


@cache
def _graphs_alone(name: str, what: str, length: int) -> int:
    """How many graphs the model gives a backend that does nothing."""
    cell = Cell(name, length, "fp32", what, "eager")
    model = cell.case.build()
    return _explained(model, _arguments(cell, model), backend=_eager_capture).graph_count
