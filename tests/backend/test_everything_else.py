"""Models without linear attention: bit-identical to Inductor, not a graph more, one cheap look of ours."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdacompile import backend, compat
from kdacompile.graph import build
from kdacompile.report.collect import collecting
from kdacompile.search import matching
from tests.backend.layers import compiled, delta_arguments, gated_delta_loop, patterns
from tests.compare import tensors

Function = Callable[..., Any]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager_attention_with_rope(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2])[:, None] / 10000.0 ** (torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    cos, sin = place.cos().repeat(1, 2), place.sin().repeat(1, 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    scores = rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def graph_break(x: Tensor) -> Tensor:
    y = x.relu() * 2
    torch._dynamo.graph_break()
    return y @ y.transpose(-1, -2)


HEADS = tuple(torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
MODELS: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)), (torch.randn(4, 12),)),
    "conv": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2)),
        (torch.randn(2, 3, 9, 9),),
    ),
    "attention": (attention, HEADS),
    "eager_attention_with_rope": (eager_attention_with_rope, HEADS),
    "norms": (nn.Sequential(nn.LayerNorm(12), nn.RMSNorm(12), nn.Softmax(-1)), (torch.randn(4, 12),)),
    "graph_break": (graph_break, (torch.randn(2, 5, 5),)),
}


@pytest.fixture
def functional_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that functional ones were built of."""
    built: list[torch.fx.Graph] = []

    def counting(graph: torch.fx.Graph, *rest: Any, **options: Any) -> Any:
        built.append(graph)
        return build.functional_graph(graph, *rest, **options)

    monkeypatch.setattr(matching, "functional_graph", counting)
    return built


def graphs_of(fn: Function, arguments: tuple[Tensor, ...], compiler: Any) -> tuple[Any, int]:
    count = 0

    def counting(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal count
        count += 1
        return compiler(gm, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(fn, backend=counting, dynamic=False)(*arguments), count


@pytest.mark.parametrize("name", MODELS)
def test_bit_identical_to_inductor(name: str, functional_graphs: list[torch.fx.GraphModule]) -> None:
    fn, arguments = MODELS[name]
    if isinstance(fn, nn.Module):
        fn.eval()
    with collecting() as report:
        ours, our_graphs = graphs_of(fn, arguments, backend.kda)
    theirs, their_graphs = graphs_of(fn, arguments, torch._inductor.compile)
    assert all(torch.equal(x, y) for x, y in zip(tensors(ours), tensors(theirs), strict=True))
    assert our_graphs == their_graphs
    assert not report.matches
    if name not in ("eager_attention_with_rope", "attention"):  # products of activations deserve a look
        assert not functional_graphs


@pytest.mark.parametrize("name", ["linear_attention", *MODELS])
def test_a_call_costs_nothing_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo gets is the very function Inductor made: nothing of ours runs at a call, match or no match."""
    fn, arguments = (gated_delta_loop, delta_arguments()) if name == "linear_attention" else MODELS[name]
    made: list[Any] = []
    given: list[Any] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        config_patches[compat.PASS_OPTION](gm.graph)
        made.append(gm.forward)
        return made[-1]

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(backend.kda(gm, inputs))
        return given[-1]

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    torch._dynamo.reset()
    with torch.no_grad(), collecting() as report:
        torch.compile(fn, backend=keep)(*arguments)
    assert bool(report.matches) == (name == "linear_attention")
    assert given
    assert all(map(operator.is_, given, made))
    assert len(given) == len(made)


def grows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    return gated_delta_loop(q, k, v, g, beta), torch.cat([cache, k], 1)


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_what_capture_asks_is_worked_out_once(
    inner: str, functional_graphs: list[torch.fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A growing cache has capture ask whether the graph is rewritten; the compiler gets that very result."""

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        config_patches[compat.PASS_OPTION](gm.graph)
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    torch._dynamo.reset()
    arguments: Any = (*delta_arguments(), torch.randn(delta_arguments()[1].shape))
    options: Any = {"kda.inner": inner, "kda.lift": False}
    with torch.no_grad(), collecting() as report:
        ours = torch.compile(grows, backend="kda", options=options, dynamic=False)(*arguments)
    assert patterns(report) == ["gated_delta_rule"]
    assert len(functional_graphs) == 1
    torch.testing.assert_close(ours, grows(*arguments))


def test_a_functional_graph_is_built_where_a_look_pays(functional_graphs: list[torch.fx.GraphModule]) -> None:
    with torch.no_grad():
        compiled(gated_delta_loop)(*delta_arguments())
    assert len(functional_graphs) == 1


def test_the_log_says_what_matched(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="kdacompile"):
        compiled(gated_delta_loop)(*delta_arguments())
    text = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("kdacompile"))
    assert "matched gated_delta_rule (sequence)" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, "coordinate_descent_tuning, max_autotune"),
        ({"epilogue_fusion": False}, "epilogue_fusion"),
        ({"mode": "default"}, None),
    ],
)
def test_what_only_inductor_reads_is_told_where_it_does_not_run(
    options: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    backend._say_not_inductor.cache_clear()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="kdacompile"):
        for fn in (gated_delta_loop, torch.sin):
            arguments = delta_arguments() if fn is gated_delta_loop else (torch.ones(3),)
            torch.compile(fn, backend="kda", options={"kda.inner": "eager", **options})(*arguments)
    told = [record.getMessage() for record in caplog.records if "Inductor does not run" in record.getMessage()]
    assert len(told) == (said is not None)  # once, not for each graph
    assert said is None or told[0].endswith(said)


def test_torch_logs_knows_our_name() -> None:
    logger = logging.getLogger("kdacompile")
    level, handlers = logger.level, list(logger.handlers)
    try:
        torch._logging.set_logs(modules={"kdacompile": logging.DEBUG})
        assert logging.getLogger("kdacompile.search.compiler_pass").isEnabledFor(logging.DEBUG)
    finally:
        torch._logging.set_logs()
        logger.setLevel(level)
        logger.handlers = handlers


def test_structured_trace_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, str] = {}

    def record(name: str, metadata_fn: Function = dict, payload_fn: Function = str, **_: Any) -> None:
        if name == "artifact" and "kdacompile" in metadata_fn().get("name", ""):
            written[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(torch._logging, "trace_structured", record)
    with torch.no_grad(), collecting() as report:
        compiled(gated_delta_loop)(*delta_arguments())
    assert patterns(report) == ["gated_delta_rule"]
    assert set(written) == {f"kdacompile_{name}" for name in ("dynamo", "functional", "match", "report", "rewritten")}
    assert "1 x gated_delta_rule" in written["kdacompile_report"]
    assert "kdacompile.linear_attention" in written["kdacompile_rewritten"]
    assert "kdacompile.linear_attention" not in written["kdacompile_dynamo"]
    assert "select" in written["kdacompile_functional"]
    assert "proven" in written["kdacompile_match"]
    with torch.no_grad(), collecting() as report:
        compiled(gated_delta_loop, options={"kda.disable": ["gated_delta_rule"]})(*delta_arguments())
    assert [rejection.code for rejection in report.rejections] == ["disabled"]
    assert "[disabled]" in written["kdacompile_report"]
