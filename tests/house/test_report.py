from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from torch import fx

from kdacompile.errors import ReportFormatError, StrictError
from kdacompile.report.collect import collecting, emit
from kdacompile.report.findings import GraphReport, Rejection
from kdacompile.report.report import Report, enforce
from kdacompile.report.source import name_of
from kdacompile.settings import parse
from tests.house.samples import MATCH, NEAR_MISS, sample_report


def test_json_brings_back_everything_but_the_result() -> None:
    report = sample_report()
    report.result = object()
    again = Report.from_json(report.to_json())
    assert again.result is None
    report.result = None
    assert again == report
    assert str(again) == str(report)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "graphs": [{}]}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ReportFormatError):
        Report.from_json(text)


def test_json_is_plain() -> None:
    payload = json.loads(sample_report().to_json())
    assert payload["graphs"][0]["matches"][0]["absorbed"] == ["l2norm", "scale"]


def test_identical_rejections_are_counted_not_repeated() -> None:
    other = Rejection("kda", "other", "model.py:1", "roles")
    report = Report(graphs=[GraphReport(rejections=(NEAR_MISS, other)), GraphReport(rejections=(NEAR_MISS,))])
    assert [(rejection.code, rejection.count) for rejection in report.rejections] == [
        ("operator", 2),
        ("roles", 1),
    ]
    assert "(2 times)" in str(report)


def test_text_names_lines_reasons_and_sums() -> None:
    text = str(sample_report())
    for part in ("Tiny", "2 graphs", "1 x kda", MATCH.source, "3.1e-07", "q = query", "l2norm, scale"):
        assert part in text
    for part in (NEAR_MISS.reason, NEAR_MISS.source, "model.py:3: print was called", "functional 0.500, proof 0.500"):
        assert part in text
    assert "no matches" in str(Report())


def test_html_is_one_page_with_everything_escaped() -> None:
    page = sample_report().to_html()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<h1>") == 1
    for part in ("Kimi Delta Attention (KDA)", "S_t = (I - b_t k_t k_t^T)", "&lt;gate &amp; co&gt;", "3.1e-07"):
        assert part in page
    for part in (NEAR_MISS.reason, "2 times", "print was called", "model.py:12", "proof"):
        assert part in page
    assert "<gate" not in page
    assert "Reports to test with" in page  # the source line itself
    assert "http" not in page  # nothing is loaded from elsewhere


def test_layers_that_differ_in_their_tensors_alone_are_one_entry() -> None:
    other = replace(MATCH, roles={"q": "other_query"}, max_error=9e-7)
    report = Report(graphs=[GraphReport(matches=(MATCH, other)), GraphReport(matches=(replace(MATCH, mode="step"),))])
    report.device = "cuda"
    assert [(layers.count, layers.max_error) for layers in report.layers] == [(2, 9e-7), (1, MATCH.max_error)]
    text = str(report)
    assert f"2 layers: kda (sequence) at {MATCH.source}" in text
    assert "max error 9.0e-07" in text and "q = query (in the first)" in text
    assert "kdacompile plan kda --target cuda_sm90" in text
    page = report.to_html()
    assert "2 layers: Kimi Delta Attention" in page and "stages and buffers on NVIDIA Hopper" in page


def test_a_near_miss_leads_to_what_to_do() -> None:
    report = Report(graphs=[GraphReport(rejections=(NEAR_MISS,))])
    assert "near-misses.md#operator" in str(report)
    assert 'near-misses.md#operator">' in report.to_html()


def test_html_of_an_empty_or_foreign_report() -> None:
    assert "Nothing matched" in Report().to_html()
    unknown = Report(graphs=[GraphReport(rejections=(Rejection("from_the_future", "why", "gone.py:9", "proof"),))])
    assert "from_the_future" in unknown.to_html()


def test_collectors_nest() -> None:
    first, second = GraphReport(nodes=1), GraphReport(nodes=2)
    with collecting() as outer:
        emit(first)
        with collecting() as inner:
            emit(second)
    emit(GraphReport(nodes=3))
    assert outer.graphs == [first, second]
    assert inner.graphs == [second]


def test_a_collector_sees_only_its_own_thread() -> None:
    with collecting() as report:
        thread = threading.Thread(target=emit, args=(GraphReport(),))
        thread.start()
        thread.join()
    assert report.graph_count == 0


def test_a_collector_ends_with_its_block_even_after_an_error() -> None:
    with pytest.raises(KeyError), collecting() as report:
        raise KeyError
    emit(GraphReport())
    assert report.graphs == []


def test_enforce_passes_what_is_asked_for() -> None:
    graph = GraphReport(matches=(MATCH, MATCH), rejections=(NEAR_MISS,))
    enforce(graph, parse())
    enforce(graph, parse(None, {"kda.expect": {"kda": 2}}))
    enforce(GraphReport(matches=(MATCH,)), parse(None, {"kda.strict": True}))


def test_enforce_raises_with_the_reasons() -> None:
    graph = GraphReport(matches=(MATCH,), rejections=(NEAR_MISS, NEAR_MISS))
    with pytest.raises(StrictError, match=r"kda: 1 of 2") as raised:
        enforce(graph, parse(None, {"kda.expect": {"kda": 2}}))
    assert len(raised.value.reasons) == 1
    assert NEAR_MISS.reason in raised.value.reasons[0]
    assert f"found: kda at {MATCH.source}" in str(raised.value)
    with pytest.raises(StrictError, match="near misses"):
        enforce(graph, parse(None, {"kda.strict": True}))
    with pytest.raises(StrictError, match="nothing matched in a graph of 5 nodes"):
        enforce(GraphReport(nodes=5), parse(None, {"kda.strict": True}))


def test_a_view_goes_by_the_name_of_what_it_is_a_view_of() -> None:
    graph = fx.Graph()
    gate = graph.call_function(torch.exp, (graph.placeholder("x"),))
    gate.name = "forget_gate"
    view = graph.call_method("expand", (graph.call_method("unflatten", (gate, -1, (2, -1))), 2))
    assert name_of(view) == "forget_gate"
    summed = graph.call_method("sum", (view,))
    assert name_of(summed) == "sum_1" and name_of(graph.call_method("view", (summed, -1))) == "view"
