"""One cell of the table of models: which MLA attentions were matched, and how far the logits are from eager's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kdacompile
from kdacompile.errors import KdaError
from tests.compare import relative_error
from tests.models.mla_zoo import CASES

BOUND = 1e-5
LENGTH = 17
MODES = {"prefill": "sequence", "step": "step"}


@dataclass(frozen=True)
class Cell:
    model: str
    attention: str  # eager or sdpa
    cache: str  # dynamic or static
    what: str  # prefill or step

    def __str__(self) -> str:
        return f"{self.model}-{self.attention}-{self.cache}-{self.what}"


@dataclass(frozen=True)
class Row:
    cell: Cell
    matched: int
    expected: int
    graphs: int
    error: float
    seconds: float
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "ok" if not self.problems else "FAIL " + "; ".join(self.problems)
        cell = f"{self.cell.model:<16}{self.cell.attention:<6}{self.cell.cache:<8}{self.cell.what:<8}"
        layers = f"{self.matched}/{self.expected}"
        return f"{cell}{layers:>5}{self.graphs:>7}{self.error:>10.1e}{self.seconds:>8.1f}  {verdict}"


def cells(models: Sequence[str]) -> Iterator[Cell]:
    for name in models:
        case = CASES[name]
        for attention, cache, what in itertools.product(case.implementations(), case.caches(), MODES):
            yield Cell(name, attention, cache, what)


def measure(cell: Cell, inner: str = "eager") -> Row:
    """Compile one model for one cell; a compile that raises becomes a failed row."""
    case = CASES[cell.model]
    model = case.build(cell.attention)

    def arguments() -> dict[str, Any]:
        return case.prefill(model, LENGTH, cell.cache) if cell.what == "prefill" else case.step(model, cell.cache)

    torch._dynamo.reset()
    with torch.no_grad():
        expected: Tensor = model(**arguments())[0]
        started = time.perf_counter()
        try:
            report = kdacompile.explain(model, options={"kda.inner": inner})(**arguments())
        except (KdaError, RuntimeError) as error:  # Dynamo's and Inductor's own errors are RuntimeErrors
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            return Row(cell, 0, case.attentions, 0, float("nan"), 0.0, (text,))
    seconds = time.perf_counter() - started
    found = [match for match in report.matches if match.pattern == "mla"]
    error = relative_error(report.result[0], expected)
    problems: list[str] = []
    if [match.mode for match in found] != [MODES[cell.what]] * case.attentions:
        problems += [f"matched {len(found)} of {case.attentions}", *(str(r) for r in report.rejections)]
    if error > BOUND:
        problems.append(f"error {error:.1e} above {BOUND:.0e}")
    if report.graph_count != 1 and not case.breaks_by_itself:
        problems.append(f"{report.graph_count} graphs")
    return Row(cell, len(found), case.attentions, report.graph_count, error, seconds, tuple(problems))
