"""transformers' models with stand-ins for causal_conv1d and mamba_ssm bound the way transformers binds the packages."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.lifting import mamba_like

hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
zoo = pytest.importorskip("tests.models.zoo")

CONVOLUTION, LAYER = "causal_conv1d_fn", "mamba_split_conv1d_scan_combined"
HOMES = {CONVOLUTION: "causal_conv1d", LAYER: "mamba_ssm.ops.triton.ssd_combined"}
WRAPPERS = {CONVOLUTION: "causal_conv1d_fn", LAYER: "mamba2_split_conv1d_scan_combined"}
"""transformers' names for them."""


@pytest.fixture(autouse=True)
def captures_are_no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 Dynamo takes every capture for an export, and transformers calls its own functions in one."""
    monkeypatch.setattr(hub_kernels, "is_torchdynamo_exporting", lambda: False)


def bind(kind: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-ins and let transformers decorate the model's functions anew."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    for name in names:
        package, standin = HOMES[name].partition(".")[0], getattr(mamba_like, name)
        monkeypatch.setattr(standin, "__module__", HOMES[name])
        for path in (package, HOMES[name]):
            module = types.ModuleType(path)
            module.__dict__.update({"__version__": "0.0.test", name: standin})
            monkeypatch.setitem(sys.modules, path, module)
        decorate = hub_kernels.use_kernel_func_from_hub_with_fallback(name, package)
        original = getattr(modeling, WRAPPERS[name])
        monkeypatch.setattr(modeling, WRAPPERS[name], decorate(original.__wrapped__))


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "aot_eager"})


def test_training_mamba2_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    bind("mamba2", (CONVOLUTION, LAYER), monkeypatch)
    case = zoo.CASES["mamba2"]
    model = case.build().train()
    inputs = case.prefill_inputs(model, 40, cache=False)
    gradients: list[tuple[torch.Tensor, ...]] = []
    with collecting() as report:
        for forward in (compiled(model), model):
            loss = forward(**inputs).logits.square().sum()
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert [(match.pattern, match.lifted) for match in report.matches] == [("simple_gla", LAYER)] * case.layers
    assert counters["stats"]["unique_graphs"] == 1
    for have, want in zip(*gradients, strict=True):
        assert relative_error(have, want) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"])
def test_a_convolution_in_front_of_linear_attention_cuts_no_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bind(kind, (CONVOLUTION,), monkeypatch)
    case = zoo.CASES[kind]
    model = case.build()
    with torch.no_grad(), collecting() as report:
        have = compiled(model)(**case.prefill_inputs(model, 40, cache=True)).logits
        want = model(**case.prefill_inputs(model, 40, cache=True)).logits
    assert [match.pattern for match in report.matches].count(case.pattern) == case.layers
    assert counters["stats"]["unique_graphs"] == 1
    assert relative_error(have, want) < 1e-5
