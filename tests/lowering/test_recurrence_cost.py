"""The cost model of linear attention's prompts on a CPU against what was measured
(``docs/results/fits/recurrence-cpu.json``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdacompile.bench.turns import fitted
from kdacompile.lowering.cpu.costs import Kind, loses
from kdacompile.lowering.cpu.recurrence_cost import Region, is_estimated

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "fits" / "recurrence-cpu.json"
ROWS: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row["case"].values())))
def test_whichever_clearly_takes_longer_is_left_out(row: dict[str, Any]) -> None:
    region = Region(**row["call"])
    if row["ratio"] > 1.25:
        assert loses(region) is not None
    if row["ratio"] < 0.8:
        assert loses(region) is None


@pytest.mark.parametrize("kind", Region.seconds, ids=str)
def test_constants_are_the_fit(kind: Kind) -> None:
    rows = [(Region(**row["call"]), row["inductor"], row["kda"]) for row in ROWS]
    assert fitted([row for row in rows if row[0].kind == kind]) == pytest.approx(Region.seconds[kind], rel=0.01)


def test_a_loop_over_tokens_is_not_estimated() -> None:
    assert not is_estimated(operators=5 * 64, tokens=64)
    assert is_estimated(operators=5 * 4, tokens=4) and is_estimated(operators=11 * 16, tokens=1024)
