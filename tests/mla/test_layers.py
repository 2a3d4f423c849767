"""Whole layers are matched, in one graph for every length, with the same numbers and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile.patterns.mla import proof
from tests.compare import relative_error
from tests.mla.layer_near_misses import LEFT_ALONE, WITH_WHAT_THEY_HAVE
from tests.mla.layer_steps import LAYERS
from tests.mla.layers import BATCH, HEADS, NOPE, QK, RANK, ROPE, VALUE, WIDTH

EAGER: dict[str, Any] = {"kda.inner": "eager"}
ALONE = {"OneRequest", "SglangFallback"}
"""Requests one by one: an attention for each."""
CARRIED = {"ScaledOperands"}
"""With a mask that is a buffer, whose values a graph does not know."""
UNMASKED = {"DividedAtTheEnd", "LogSumExp", "RankFirstWeights", "DropoutOfNothing", "HalfPrecision"}


def bound(name: str) -> float:
    return 1e-2 if name == "HalfPrecision" else 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_matched(name: str) -> None:
    case = LAYERS[name]
    module, arguments = case.module(), case.arguments()
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        expected = module(*arguments)
    attentions = BATCH if name in ALONE else 1
    assert [(m.pattern, m.mode) for m in report.matches] == [("mla", case.mode)] * attentions, str(report)
    assert not report.rejections, str(report)
    assert relative_error(report.result, expected) < bound(name)
    causal = case.mode == "sequence" and name not in CARRIED | UNMASKED
    assert all(("causal mask" in m.absorbed) == causal for m in report.matches)
    assert all(("mask" in m.roles) == (name in CARRIED) for m in report.matches)


@pytest.mark.parametrize("name", LAYERS)
def test_every_length_and_gradients(name: str) -> None:
    case = LAYERS[name]
    module = case.module()
    torch._dynamo.reset()
    options: Any = EAGER | {"kda.expect": {"mla": BATCH if name in ALONE else 1}}
    compiled = torch.compile(module, backend="kda", dynamic=True, options=options)
    with kdacompile.collecting() as report:
        for longer in (0, 6):
            arguments = [x.requires_grad_() for x in case.arguments(longer)]
            leaves = [*arguments, *module.parameters()]
            result, expected = compiled(*arguments), module(*arguments)
            assert relative_error(result, expected) < bound(name)
            cotangent = torch.randn_like(expected)
            have = torch.autograd.grad(result, leaves, cotangent, allow_unused=True)
            want = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True)
            for x, y in zip(have, want, strict=True):
                assert (x is None) == (y is None)
                assert x is None or y is None or relative_error(x, y) < 10 * bound(name)
    assert len(report.graphs) == 1, str(report)


@pytest.mark.parametrize("name", ["TokensFirst", "StackedHalves", "RotatedAfterExpanding", "DividedAtTheEnd"])
def test_many_tokens_are_proven_on_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LARGEST", 2 * 4 * 260 * 260)
    case = LAYERS[name]
    module, arguments = case.module(), case.arguments(300)
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        assert len(report.matches) == 1, str(report)
        assert relative_error(report.result, module(*arguments)) < bound(name)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_near_misses_equal_eager(name: str) -> None:
    torch.manual_seed(0)
    module, arguments = LEFT_ALONE[name](), LAYERS["LogSumExp"].arguments()
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        assert not report.matches, str(report)
        assert torch.equal(report.result, module(*arguments))


@pytest.mark.parametrize("name", WITH_WHAT_THEY_HAVE)
def test_odd_keys_and_masks_are_handed_on(name: str) -> None:
    torch.manual_seed(0)
    module, arguments = WITH_WHAT_THEY_HAVE[name](), LAYERS["LogSumExp"].arguments()
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        assert len(report.matches) == 1 and "causal mask" not in report.matches[0].absorbed, str(report)
        assert relative_error(report.result, module(*arguments)) < 1e-6


class Scaled(nn.Module):
    """Its scale is a number that it holds, which ``dynamic=True`` makes a symbol of, one for each layer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.wq, self.wkv_a = nn.Linear(WIDTH, HEADS * QK), nn.Linear(WIDTH, RANK + ROPE)
        self.wkv_b, self.wo = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False), nn.Linear(HEADS * VALUE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, rope = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        q = self.wq(x).unflatten(-1, (HEADS, QK)).transpose(1, 2)
        k, v = self.wkv_b(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        hidden = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
        return x + self.wo(((q @ k.mT * self.scale + hidden).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_numbers_of_several_layers_where_all_sizes_are_open() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled(scale) for scale in (0.3, 0.4, 0.3)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="kda", dynamic=True, options={"kda.inner": "eager"})
    with torch.no_grad(), kdacompile.collecting() as report:
        for batch, tokens in ((2, 11), (3, 17)):
            x = torch.randn(batch, tokens, WIDTH)
            assert relative_error(compiled(x), model(x)) < 1e-5
    assert [match.pattern for match in report.matches] == ["mla"] * 3, str(report)
    assert len(report.graphs) == 1
