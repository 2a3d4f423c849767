"""transformers as people call it: a padding mask and a growing cache, sizes left to torch.compile."""

from __future__ import annotations

import pytest
import torch

from kdacompile.report.collect import collecting
from tests.models.mla_zoo import CASES, tokens


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_generate_with_a_padding_mask_takes_two_graphs_and_both_are_matched(name: str) -> None:
    """A mask's length has a symbol of its own, which guards compare with the prompt's or the cache's."""
    model = CASES[name].build("sdpa")
    model.generation_config.pad_token_id = 0  # type: ignore[union-attr]
    ids = tokens(17)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(ids, **given)  # type: ignore[operator]
        model.forward = torch.compile(model.forward, backend="kda", options={"kda.inner": "eager"})
        with collecting() as report:
            found = model.generate(ids, **given)  # type: ignore[operator]
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert [len(graph.matches) for graph in report.graphs] == [2, 2], report.rejections
