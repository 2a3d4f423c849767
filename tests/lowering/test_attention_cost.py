"""The cost model of MLA's prompts on a CPU against what was measured (``docs/results/fits/mla-cpu.json``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdacompile.bench.latent_prompts import fitted
from kdacompile.lowering.cpu.attention_cost import (
    LEAST,
    TRAINING,
    WORTH,
    Prompt,
    estimated_ratio,
    is_too_small,
    loses,
)

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "fits" / "mla-cpu.json"
ROWS: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(**row["prompt"])


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["prompt"]["train"]], ids=lambda row: str(list(row["prompt"].values()))
)
def test_estimates_agree_with_what_was_measured(row: dict[str, Any]) -> None:
    """Within a third; and wherever one of the two clearly takes longer, that one is left out."""
    prompt, measured = _prompt(row), row["ratio"]
    assert 0.75 < estimated_ratio(prompt) / measured < 1.33
    if measured > 1.25:
        assert loses(prompt) is not None
    if measured < 1.0:
        assert loses(prompt) is None


def test_without_gradients_nothing_of_these_sizes_is_left() -> None:
    for row in ROWS:
        prompt = _prompt(row)
        if not prompt.train:
            assert row["ratio"] < 0.6 and loses(prompt) is None and not is_too_small(prompt)


def test_constants_are_the_fit() -> None:
    rows = [(_prompt(row), row["inductor"], row["kda"]) for row in ROWS if row["prompt"]["train"]]
    assert fitted(rows) == pytest.approx(TRAINING, rel=0.01)


def test_nothing_is_said_of_what_is_smaller_than_all_that_was_measured() -> None:
    least = min((_prompt(row) for row in ROWS), key=lambda prompt: prompt.operations)
    assert least.operations >= LEAST
    smaller = replace(least, heads=1, tokens=8, cached=8)
    assert loses(replace(smaller, train=True)) is None
    assert is_too_small(smaller) and not is_too_small(replace(smaller, train=True))


def test_where_a_call_is_too_small() -> None:
    """deepseek_v3 of 64 channels: 64 tokens were 1.05 times as long as an op, 256 took 0.63 times as long."""
    small = Prompt(1, 64, 64, 4, 12, 8, 20, 24)
    assert small.operations < WORTH and is_too_small(small)
    assert not is_too_small(replace(small, tokens=256, cached=256))


def test_scores_that_causality_leaves_are_counted_in_blocks() -> None:
    prompt = Prompt(1, 300, 300, 1, 1, 1, 1, 1, causal=True)
    assert prompt.pairs(blocks=True) == 128 * 128 + 128 * 256 + 44 * 300
    chunk = Prompt(1, 200, 300, 1, 1, 1, 1, 1, causal=True)
    assert chunk.pairs(blocks=True) == 128 * 228 + 72 * 300
    assert chunk.pairs(blocks=False) == 200 * 300
