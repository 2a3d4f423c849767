"""The worked example of ``docs/architecture.md``: what the printers say of it, kept up to date."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.lowering.linear_attention import linear_attention_program
from kdacompile.lowering.text import to_text
from tests.compare import worst_error
from tests.graph.test_stages import EXACT

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
KERNEL = Path(__file__).parents[1] / "lowering" / "goldens" / "triton.linear_attention_chunk.py.txt"
BLOCK = re.compile(r"(<!-- (\w+) -->\n```\w*\n)(.*?)(```\n)", re.DOTALL)


def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.relu() @ k.relu().mT).tril()
    return (scores / (scores.sum(-1, keepdim=True) + 1)) @ v


@pytest.mark.skipif(not EXACT, reason="the text is that of CI's torch")
def test_the_example_is_what_the_printers_say() -> None:
    """``KDA_ACCEPT=1`` writes it into the document."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 3, size, generator=generator) for size in (6, 6, 5))
    torch._dynamo.reset()
    report = explain(model, options={"kda.lift": False}, stages=True)(q, k, v)
    assert worst_error(report.result, model(q, k, v)) <= 1e-5
    made = {stage.name: stage.text for stage in report.stages}
    assert made["match"].startswith("proven")
    made["program"] = to_text(linear_attention_program("none", False)).split("  carry ")[0]
    made["kernel"] = KERNEL.read_text().split("def scan")[1].split("tl.arange(0, C)[None, :]\n")[1]
    text = DOCUMENT.read_text()
    assert {name for _, name, _, _ in BLOCK.findall(text)} == made.keys()
    new = BLOCK.sub(lambda found: f"{found[1]}{made[found[2]]}{found[4]}", text)
    if os.environ.get("KDA_ACCEPT") == "1":
        DOCUMENT.write_text(new)
    assert DOCUMENT.read_text() == new, "the example changed; KDA_ACCEPT=1 accepts"
