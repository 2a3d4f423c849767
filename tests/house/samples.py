"""Reports to test with, and a backend that stands in for the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacompile.report.collect import emit
from kdacompile.report.findings import GraphBreak, GraphReport, Match, Rejection
from kdacompile.report.report import Report

MATCH = Match(
    pattern="kda",
    mode="sequence",
    source=f"{__file__}:1",
    roles={"q": "query", "g": "<gate & co>"},
    max_error=3.1e-7,
    op="kdacompile::linear_attention",
    absorbed=("l2norm", "scale"),
)
NEAR_MISS = Rejection(
    pattern="gated_delta_rule",
    reason="the state passes through tanh between two steps",
    source="model.py:12",
    code="operator",
)


def sample_report() -> Report:
    first = GraphReport(
        matches=(MATCH,), rejections=(NEAR_MISS,), nodes=120, seconds={"functional": 0.25, "proof": 0.5}
    )
    second = GraphReport(rejections=(NEAR_MISS,), nodes=7, seconds={"functional": 0.25}, from_cache=True)
    report = Report(graphs=[first, second], graph_breaks=[GraphBreak("print was called", "model.py:3")], title="Tiny")
    report.captured = 2
    return report


def emitting_backend(report: GraphReport) -> Callable[..., Any]:
    """A backend that reports the same for every graph and runs it as it is."""

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: Any = None, options: Any = None) -> Any:
        del example_inputs, mode, options
        emit(report)
        return gm.forward

    return backend
