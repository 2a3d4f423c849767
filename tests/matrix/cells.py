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
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Torch-private: a backend that runs graphs as they are and counts them.
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from kdacompile.backend import kda
from kdacompile.errors import KdaError
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from kdacompile.settings import parse
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
    # The bound is eager's own error; 5 % is the chance in which two roundings of equal quality differ.
    "bf16-up": Numbers(torch.bfloat16, "fp32", ratio=1.05),
}
LENGTHS = (17, 64, 100, 128, 256, 1000)
MODES = {"prefill": "sequence", "step": "step"}
TOKENS, STEP_BATCH, STEP_DRAWS = 512, 16, 8
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
    checked: tuple[str, ...] = ()  # how each match was shown: "exactly", or "by probes" and what stood in the way
    problems: tuple[str, ...] = ()

    @classmethod
    def failed(cls, cell: Cell, problem: str) -> Row:
        """A cell that gave no numbers."""
        return cls(cell, 0, 0, float("nan"), None, 0.0, problems=(problem,))


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
    draws = _draws(cell, model)
    compiled = _Compiled(model, {"kda.inner": cell.inner, "kda.precision": numbers.precision})
    started = time.perf_counter()
    first = _logits(compiled, draws[:1])
    seconds, graphs, report = time.perf_counter() - started, compiled.graphs, compiled.report
    ours = torch.cat([*first, *_logits(compiled, draws[1:])])
    eager = torch.cat(_logits(model, draws))
    error, ratio = relative_error(ours, eager), None
    if numbers.ratio is not None:
        exact_model = copy.deepcopy(model).double()
        exact = torch.cat(_logits(exact_model, _draws(cell, exact_model)))
        error = relative_error(ours, exact)
        ratio = error / max(relative_error(eager, exact), 1e-12)
    matched = sum((m.pattern, m.mode) == (case.pattern, MODES[cell.what]) for m in report.matches)
    breaks = graphs - _graphs_alone(cell.model, cell.what, cell.length)
    row = Row(cell, matched, breaks, error, ratio, seconds, tuple(m.checked for m in report.matches))
    problems = list(judge(row, sum(m.pattern != "mla" for m in report.matches)))
    if matched < case.layers:
        problems += [str(rejection) for rejection in report.rejections]
    return replace(row, problems=tuple(problems))


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


class _Compiled:
    """A model compiled by the backend with these options; counts graphs and keeps the report of the latest call."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        self.graphs = 0
        self.report = Report()

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.graphs += 1
            return kda(graph, inputs, options=options)

        marked: Any = backend
        marked.kdacompile_settings = parse(None, options)  # functions are lifted as for the backend itself
        self.model = torch.compile(model, backend=backend, dynamic=False)

    def __call__(self, **kwargs: Any) -> Any:
        with collecting() as self.report:
            return self.model(**kwargs)


def _logits(model: Callable[..., Any], draws: list[dict[str, Any]]) -> list[Tensor]:
    """The logits of every draw. The caches in ``draws`` are left as they are."""
    with torch.no_grad():
        return [model(**copy.deepcopy(kwargs))[0] for kwargs in draws]


def _draws(cell: Cell, model: PreTrainedModel) -> list[dict[str, Any]]:
    """What the model is called with: once, and few sequences, unless chance is in the verdict.

    bf16 errors are chance. They are averaged over at least ``TOKENS`` tokens of a prefill; a step has one token a
    sequence, so it is made with several tokens, one after the other, each on the same caches.
    """
    chance = NUMBERS[cell.numbers].ratio is not None
    if cell.what == "prefill":
        batch = max(2, TOKENS // cell.length) if chance else 2
        return [cell.case.prefill_inputs(model, cell.length, cache=True, batch=batch)]
    batch = STEP_BATCH if chance else 2
    first = cell.case.step_inputs(model, prompt=cell.length, batch=batch)
    more = range(1, STEP_DRAWS if chance else 1)
    return [first, *({**first, "input_ids": cell.case.tokens(1, batch, seed=seed)} for seed in more)]


@cache
def _graphs_alone(name: str, what: str, length: int) -> int:
    """How many graphs the model gives a backend that does nothing."""
    cell = Cell(name, length, "fp32", what, "eager")
    model = cell.case.build()
    counter = CompileCounter()
    torch._dynamo.reset()
    _logits(torch.compile(model, backend=counter, dynamic=False), _draws(cell, model))
    return counter.frame_count
