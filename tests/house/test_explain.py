from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import kdacompile
from examples import quickstart
from kdacompile.errors import UnknownOptionError
from kdacompile.report.findings import GraphReport
from tests.house.samples import MATCH, emitting_backend

BACKEND = emitting_backend(GraphReport(matches=(MATCH,), nodes=3))


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def talkative(x: Tensor) -> Tensor:
    print("before any operator")
    return x + 1


def test_a_function_is_run_once_and_reported() -> None:
    report = kdacompile.explain(torch.sin, backend=BACKEND)(torch.ones(3))
    torch.testing.assert_close(report.result, torch.ones(3).sin())
    assert report.matches == [MATCH]
    assert report.graph_count == 1
    assert report.graph_breaks == []


def test_a_module_keeps_its_gradients() -> None:
    layer = nn.Linear(3, 2)
    report = kdacompile.explain(layer, backend=BACKEND)(torch.ones(1, 3))
    assert report.title == "Linear"
    assert report.result.requires_grad
    with torch.no_grad():
        assert not kdacompile.explain(layer, backend=BACKEND)(torch.ones(1, 3)).result.requires_grad


def test_breaks_come_with_reason_and_line() -> None:
    report = kdacompile.explain(broken, backend=BACKEND)(torch.ones(3))
    assert report.graph_count == 2
    (graph_break,) = report.graph_breaks
    assert "graph_break" in graph_break.reason
    assert graph_break.source == f"{__file__}:{broken.__code__.co_firstlineno + 2}"


def test_breaks_are_told_wherever_reports_are_collected() -> None:
    torch._dynamo.reset()
    with kdacompile.collecting() as report:
        torch.compile(broken, backend="kda", options={"kda.inner": "eager"})(torch.ones(3))
    (graph_break,) = report.graph_breaks
    assert graph_break.source == f"{__file__}:{broken.__code__.co_firstlineno + 2}"
    assert "graph breaks" in str(report)


def test_a_break_before_the_first_operator_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    report = kdacompile.explain(talkative, backend=BACKEND)(torch.ones(3))
    assert capsys.readouterr().out == "before any operator\n"
    assert report.graph_count == 1
    assert len(report.graph_breaks) == 1


def test_explaining_again_captures_again_without_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            assert kdacompile.explain(broken, backend=BACKEND)(torch.ones(3)).graph_count == 2


def test_another_size_is_not_captured_as_dynamic() -> None:
    shapes: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: Any = None, options: Any = None) -> Any:
        del mode, options
        shapes.extend(size for value in example_inputs for size in getattr(value, "shape", [value]))
        return gm.forward

    for length in (3, 4, 5):
        kdacompile.explain(torch.cos, backend=backend)(torch.ones(length))
    assert shapes == [3, 4, 5]


def test_compiled_functions_of_the_caller_are_left_alone() -> None:
    counter = CompileCounter()
    compiled = torch.compile(broken, backend=counter)
    compiled(torch.ones(3))
    before = counter.frame_count
    kdacompile.explain(broken, backend=BACKEND)(torch.ones(3))
    assert kdacompile.explain(compiled, backend=BACKEND)(torch.ones(3)).graph_count == 2
    compiled(torch.ones(3))
    assert counter.frame_count == before


def test_mode_and_options_reach_the_backend_with_a_cheap_inner_compiler() -> None:
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: Any = None, options: Any = None) -> Any:
        del example_inputs
        seen.append((mode, options))
        return gm.forward

    kdacompile.explain(torch.sin, backend=backend)(torch.ones(2))
    kdacompile.explain(torch.sin, backend=backend, mode="default", options={"kda.inner": "inductor"})(torch.ones(2))
    assert seen == [(None, {"kda.inner": "eager"}), ("default", {"kda.inner": "inductor"})]


def test_the_real_backend_is_the_default() -> None:
    report = kdacompile.explain(torch.sin)(torch.ones(3))
    torch.testing.assert_close(report.result, torch.ones(3).sin())
    assert report.matches == []
    assert report.graph_count == 1
    with pytest.raises(UnknownOptionError):
        kdacompile.explain(torch.sin, options={"kda.strct": True})(torch.ones(3))


class Gated(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        state, out = torch.zeros(1, 2, 4, 4), list[Tensor]()
        for t in range(q.shape[1]):
            state = state * g[:, t].sigmoid()[..., None] + k[:, t, :, :, None] * v[:, t, :, None]
            out.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(out, 1)


def test_tensors_have_the_names_that_the_model_has() -> None:
    q, k, v, g = torch.randn(4, 1, 6, 2, 4)
    (match,) = kdacompile.explain(Gated())(q, k, v=v, g=g).matches
    assert [match.roles[role].split()[0] for role in "qkvg"] == ["q", "k", "v", "g"]


def test_a_lifted_function_keeps_its_names_and_tells_its_time() -> None:
    report = kdacompile.explain(quickstart.gated_delta_rule)(*quickstart.inputs(16))
    (match,) = report.matches
    assert match.lifted and [text.split()[0] for text in match.roles.values()] == ["q", "k", "v", "g", "beta"]
    assert "lifted: gated_delta_rule is replaced" in str(report)
    assert report.seconds["lift"] > 0
    with kdacompile.collecting() as later:
        torch.compile(torch.sin, backend="kda", options={"kda.inner": "eager"})(torch.ones(3))
    assert "lift" not in later.seconds
