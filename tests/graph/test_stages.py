"""Graphs as text at every stage: goldens of a dozen models, and what the printer says of one operator."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from kdacompile.explainer import explain
from kdacompile.report.findings import Stage
from kdacompile.report.report import Report
from tests.compare import worst_error
from tests.graph.models import MODELS, delta_rule_loop, stages_of, tokens

GOLDENS = Path(__file__).parent / "goldens"
EXACT = torch.__version__.startswith("2.13.")
"""How a function decomposes differs from torch version to torch version; goldens are those of CI's."""


@pytest.mark.parametrize("name", MODELS)
def test_golden(name: str) -> None:
    """``KDA_ACCEPT=1`` stores the text instead."""
    report, ours, expected = stages_of(name)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == MODELS[name][2], str(report)
    assert {"dynamo", "functional"} <= {stage.name for stage in report.stages}
    assert ("rewritten" in [stage.name for stage in report.stages]) == bool(report.matches)
    path = GOLDENS / f"{name}.txt"
    text = "\n".join(map(_kept, report.stages))
    if os.environ.get("KDA_ACCEPT") == "1" and EXACT:
        path.write_text(text)
    if EXACT:
        assert path.read_text() == text, f"{name} changed; KDA_ACCEPT=1 accepts"


def _kept(stage: Stage) -> str:
    """Of a region that was refused, the reason alone, without its numbers."""
    refused = stage.name == "match" and not stage.text.startswith("proven")
    return f"{stage.name}: {stage.text.splitlines()[0].split(' (')[0]}\n" if refused else str(stage)


def test_an_operator_names_types_arguments_and_line() -> None:
    report = explain(delta_rule_loop, options={"kda.lift": False}, stages=True)(*tokens())
    text = next(stage.text for stage in report.stages if stage.name == "functional")
    line = delta_rule_loop.__code__.co_firstlineno + 2
    assert re.search(rf"^%\d+\[2,3,4\]:f32 = aten\.sigmoid\(%\d+\)  # models\.py:{line}$", text, re.MULTILINE)


def test_stages_are_kept_only_where_they_are_asked_for() -> None:
    report = explain(delta_rule_loop, options={"kda.lift": False})(*tokens())
    assert report.matches and not report.stages


def test_stages_survive_json() -> None:
    report, _, _ = stages_of("delta_rule_loop")
    assert Report.from_json(report.to_json()).stages == report.stages
