"""Compilations that ``generate()`` costs: three at most, where each once took more. The whole table is
``python -m tests.models``.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.compare import relative_error
from tests.models.generation import Cell, build, measure
from tests.models.mla_zoo import CASES, tokens


@pytest.mark.parametrize("model", ["axk1", "youtu"])
def test_assisted_generation_takes_three_graphs(model: str) -> None:
    """The prompt, several tokens, one token: over whole caches and cut ones, however many logits are kept."""
    row = measure(Cell(model, "assisted"))
    assert not row.problems
    assert row.matched == (2, 2, 2)


def test_a_mask_of_pools_does_not_cut_a_step() -> None:
    """Prompt and step are a graph each, as they are where ``capture_dynamic_output_shape_ops`` is on."""
    row = measure(Cell("glm5_next", "greedy"))
    assert not row.problems
    assert row.matched == (2, 2)


@pytest.mark.parametrize(("way", "graphs"), [("greedy", 2), ("static", 2), ("assisted", 3)])
def test_a_loop_over_experts_does_not_cut_the_graph(way: str, graphs: int) -> None:
    row = measure(Cell("longcat_flash", way))
    assert not row.problems
    assert row.matched == (2,) * graphs


def test_any_number_of_logits_over_any_cache() -> None:
    """The number is opened, and what a cache was cut from is not guarded: results are eager's all the same."""
    model, _ = build("youtu")
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend="kda", options={"kda.inner": "eager"})
    cases = ((20, 3, 4, 4), (20, 3, 4, 2), (20, 0, 4, 7), (31, 9, 5, 0), (20, 11, 3, 1), (9, 5, 6, 3))
    for length, cut, new, kept in cases:
        results: list[torch.Tensor] = []
        for forward in (model.forward, compiled):
            cache = CASES["youtu"].new_cache(model, "dynamic")
            with torch.no_grad():
                forward(input_ids=tokens(length), past_key_values=cache, use_cache=True, logits_to_keep=kept)
                if cut:
                    cache.crop(-cut)
                step = tokens(new, seed=length)
                results.append(forward(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=kept)[0])
        assert results[0].shape == results[1].shape
        assert relative_error(results[1], results[0]) <= 1e-5
