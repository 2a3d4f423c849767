"""A cheap sample of transformers models with MLA, and one graph over many decode steps.

Every model, attention implementation and cache: ``python -m tests.mla``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile import backend
from tests.compare import relative_error
from tests.mla.sweep import BOUND, Cell, measure

pytest.importorskip("transformers")

from tests.models.mla_zoo import CASES, tokens

# Torch-private: what Inductor switches on before it runs its passes.
InductorsDispatcher: Any = torch._C._EnablePythonDispatcher

SAMPLE = (
    Cell("deepseek_v3", "eager", "static", "prefill"),
    Cell("deepseek_v2", "sdpa", "dynamic", "step"),
    Cell("hy_v4", "eager", "static", "step"),
)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_sample(cell: Cell) -> None:
    row = measure(cell)
    assert not row.problems, str(row)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_one_graph_for_all_decode_steps(kind: str) -> None:
    """The first step specialises on its length; a dynamic cache that grew makes one dynamic graph, and no more."""
    case = CASES["deepseek_v3"]
    model = case.build("sdpa")
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(graphs))
        return backend.kda(graph, inputs, options={"kda.inner": "eager", "kda.expect": {"mla": case.attentions}})

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count)
    own, theirs = case.step(model, kind), case.step(model, kind)
    with torch.no_grad():
        for position in range(9, 13):
            step = {"input_ids": tokens(1, seed=position), "position_ids": torch.full((2, 1), position)}
            ours, want = compiled(**own | step)[0], model(**theirs | step)[0]
            assert relative_error(ours, want) <= BOUND
    assert len(graphs) <= (2 if kind == "dynamic" else 1)


@pytest.mark.parametrize("what", ["prefill", "step"])
def test_the_pass_reads_the_same_within_inductor(what: str) -> None:
    """Operators decompose otherwise under the dispatcher that Inductor's passes run with."""
    case = CASES["deepseek_v3"]
    model = case.build("sdpa")

    def within(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        guard = InductorsDispatcher()
        try:
            return backend.kda(graph, inputs, options={"kda.inner": "eager", "kda.expect": {"mla": case.attentions}})
        finally:
            del guard

    torch._dynamo.reset()
    own, theirs = (case.step(model, "static") if what == "step" else case.prefill(model, 9, "static") for _ in range(2))
    with torch.no_grad():
        assert relative_error(torch.compile(model, backend=within)(**own)[0], model(**theirs)[0]) <= BOUND
