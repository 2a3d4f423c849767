"""Every model of transformers that has linear or latent attention, on a GPU: prompts, steps and gradients are eager's.

The models are small, so that widths are seldom those of hand-tuned kernels: it is the way there that is tested, and
what transformers does differently on a GPU (where flash-linear-attention is installed, its functions).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import cache_tensors, relative_error

pytest.importorskip("transformers")

from tests.models import generation, mla_zoo, zoo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
LENGTH = 70  # two chunks, the second one padded
FP32, BF16 = 1e-4, 3e-2


@pytest.fixture(autouse=True)
def attention_without_cudnn(request: pytest.FixtureRequest) -> Iterator[None]:
    """For minimax: torch gives its attention the mask of a step, [2, 1, 1, 1], on which it crashes in bf16."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and "minimax" not in request.node.name)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def on_device(tree: Any) -> Any:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in tree.items()}


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, int]:
    model, layers = generation.build(name)
    return model.to(DEVICE, dtype), layers


def inputs(name: str, model: Any) -> dict[str, Any]:
    """Of a prompt with a new cache."""
    if name in mla_zoo.CASES:
        return on_device(mla_zoo.CASES[name].prefill(model, LENGTH, "dynamic"))
    return on_device(zoo.CASES[name].prefill_inputs(model, LENGTH, cache=True))


def cache_of(kwargs: dict[str, Any]) -> Any:
    return next(value for name, value in kwargs.items() if name in ("past_key_values", "cache_params"))


def run(model: Any, kwargs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The logits of a prompt and of three steps behind it, and the caches then."""
    rows = [model(**kwargs)[0]]
    for at in range(LENGTH, LENGTH + 3):
        step = {"input_ids": mla_zoo.tokens(1, seed=at).to(DEVICE)}
        if "past_key_values" in kwargs:
            step["position_ids"] = torch.full((2, 1), at, device=DEVICE)
        rows.append(model(**(kwargs | step))[0])
    return torch.cat(rows, 1), cache_tensors(cache_of(kwargs))


def compiled(model: Any, name: str) -> None:
    torch._dynamo.reset()
    # The efficient kernel does not take minimax's mask of a step, [2, 1, 1, 1] (nor with backend="eager").
    inner = "inductor" if name == "minimax" else "eager"
    model.forward = torch.compile(model.forward, backend="kda", options={"kda.inner": inner})


def assert_all_matched(report: Report, layers: int) -> None:
    """In some graph, each of them; no other reason than the cost."""
    assert sum(len(graph.matches) for graph in report.graphs) >= 2 * layers, str(report)


@pytest.mark.parametrize("name", generation.names())
def test_prompt_and_steps(name: str) -> None:
    model, layers = built(name)
    with torch.no_grad():
        expected, state = run(model, inputs(name, model))
        compiled(model, name)
        with collecting() as report:
            found, own_state = run(model, inputs(name, model))
    assert_all_matched(report, layers)
    assert relative_error(found, expected) < FP32
    assert max(relative_error(*pair) for pair in zip(own_state, state, strict=True) if pair[1].any()) < FP32


@pytest.mark.parametrize("name", generation.names())
def test_half_precision(name: str) -> None:
    """Beside eager in fp32: at most a little above what eager itself is off."""
    model, layers = built(name)
    half, _ = built(name, torch.bfloat16)
    with torch.no_grad():
        exact, _ = run(model, inputs(name, model))
        eager, _ = run(half, inputs(name, half))
        compiled(half, name)
        with collecting() as report:
            found, _ = run(half, inputs(name, half))
    assert_all_matched(report, layers)
    assert relative_error(found.float(), exact) < BF16 + 1.5 * relative_error(eager.float(), exact)


@pytest.mark.parametrize("name", generation.names())
def test_gradients(name: str) -> None:
    model, _ = built(name)
    given = {"input_ids": mla_zoo.tokens(LENGTH).to(DEVICE), "use_cache": False}

    def gradients() -> list[Tensor]:
        loss = model(**given)[0].float().square().mean()
        wanted = [each for each in model.parameters() if each.requires_grad]
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))

    expected = gradients()
    compiled(model, name)
    with collecting() as report:
        found = gradients()
    assert report.matches, str(report)
    whole = max(float(x.norm()) for x in expected)
    for ours, eager in zip(found, expected, strict=True):
        assert float((ours - eager).norm()) < 1e-3 * float(eager.norm()) + 1e-5 * whole
