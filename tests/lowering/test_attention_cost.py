"""The cost model of MLA's prompts on a CPU against what was measured (``docs/results/fits/mla-cpu.json``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdacompile.bench.turns import fitted
from kdacompile.lowering.cpu.attention_cost import WORTH, Prompt, is_too_small
from kdacompile.lowering.cpu.costs import Kind, loses

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "fits" / "mla-cpu.json"
ROWS: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(**row["call"])


def _priced(row: dict[str, Any]) -> bool:
    return _prompt(row).kind in Prompt.seconds


@pytest.mark.parametrize(
    "row", [row for row in ROWS if _priced(row)], ids=lambda row: "-".join(map(str, row["call"].values()))
)
def test_whichever_clearly_takes_longer_is_left_out(row: dict[str, Any]) -> None:
    if row["ratio"] > 1.25:
        assert loses(_prompt(row)) is not None
    if row["ratio"] < 0.8:
        assert loses(_prompt(row)) is None


def test_without_gradients_nothing_in_fp32_is_left_but_small_calls() -> None:
    rows = [row for row in ROWS if not (_priced(row) or _prompt(row).train)]
    assert rows and all(row["ratio"] < 0.7 for row in rows if _prompt(row).operations >= WORTH)
    assert all(loses(_prompt(row)) is None for row in rows)


@pytest.mark.parametrize("kind", Prompt.seconds, ids=str)
def test_constants_are_the_fit(kind: Kind) -> None:
    rows = [(_prompt(row), row["inductor"], row["kda"]) for row in ROWS]
    assert fitted([row for row in rows if row[0].kind == kind]) == pytest.approx(Prompt.seconds[kind], rel=0.01)


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
