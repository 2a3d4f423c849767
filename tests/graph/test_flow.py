"""The way of a graph: each stage once, nothing entered that a graph has no use for, and no calls back up."""

from __future__ import annotations

import pytest

from kdacompile.report import trace
from tests.flow import follow


@pytest.mark.parametrize(("name", "most"), [("delta_rule_loop", 11), ("latent_attention", 13)])
def test_a_graph_enters_few_modules_and_stays_on_its_way(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_stage", lambda name, made: None)  # an earlier test may have left logs on
    flow = follow(name)
    assert {"kdacompile.backend", "kdacompile.graph.build", "kdacompile.rewrite.splice"} <= flow.entered.keys()
    assert len(flow.entered) <= most, "\n".join(flow.entered)
    assert flow.upward.keys() <= {("kdacompile.backend", "kdacompile.capture.open_lengths")}
