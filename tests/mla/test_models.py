"""A cheap sample of transformers models with MLA, one graph over many prompts and one over many decode steps.

Every model, attention implementation and cache: ``python -m tests.mla``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kdacompile import backend
from kdacompile.report.collect import collecting
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
    Cell("glm5_next", "sdpa", "dynamic", "prefill"),
)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_sample(cell: Cell) -> None:
    row = measure(cell)
    assert not row.problems, str(row)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_one_graph_for_all_decode_steps(kind: str) -> None:
    """The first step already leaves a dynamic cache's length open."""
    case = CASES["deepseek_v3"]
    model = case.build("sdpa")
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        own = backend.kda(graph, inputs, options={"kda.inner": "eager", "kda.expect": {"mla": case.attentions}})
        graphs.append(len(graphs))  # not where the backend has the graph captured once more
        return own

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count)
    own, theirs = case.step(model, kind), case.step(model, kind)
    with torch.no_grad():
        for position in range(9, 13):
            step = {"input_ids": tokens(1, seed=position), "position_ids": torch.full((2, 1), position)}
            ours, want = compiled(**own | step)[0], model(**theirs | step)[0]
            assert relative_error(ours, want) <= BOUND
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear"])
def test_one_graph_for_all_prompts(name: str) -> None:
    case = CASES[name]
    model = case.build("sdpa")
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(model, backend="kda", options={"kda.inner": "eager"})
    with torch.no_grad(), collecting() as report:
        for length in (9, 33, 5, 70):
            own, theirs = (case.prefill(model, length, "dynamic") for _ in range(2))
            assert relative_error(compiled(**own)[0], model(**theirs)[0]) <= BOUND
    assert counters["stats"]["unique_graphs"] == 1
    assert report.counts["mla"] == case.attentions


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear", "hy_v4"])
def test_under_autocast(name: str) -> None:
    """Weights are rounded to the queries' dtype, which is autocast's; what enters was rounded to it as well. hy_v4
    rounds them to the values' dtype, and only these are autocast's.
    """
    case = CASES[name]
    model, prompt, found = case.build(), tokens(9), []
    compiled: Any = torch.compile(model, backend="kda", options={"kda.inner": "aot_eager", "kda.cost_model": False})
    torch._dynamo.reset()
    for run, enabled in ((model, False), (model, True), (compiled, True)):
        model.zero_grad()
        with collecting() as report, torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = run(prompt, use_cache=False)[0]
        result.float().square().mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((result, gradient))
    assert report.counts["mla"] == case.attentions
    exact, plain, ours = found
    assert ours[0].dtype == plain[0].dtype
    for place in range(2):
        assert relative_error(ours[place], exact[place]) <= 1.5 * relative_error(plain[place], exact[place])


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
