"""``kda.expect`` and ``kda.strict`` count what one captured graph holds, graphs nested in it included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kdacompile
from kdacompile.errors import StrictError
from tests.backend.layers import Layer

INNERS = ["eager", "inductor"]


class Checkpointed(nn.Module):
    """Two layers, each of which is recomputed in the backward pass, and a third that has nothing to match."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), nn.Linear(12, 12)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def run(model: Callable[..., Any], inner: str, **options: Any) -> Tensor:
    torch._dynamo.reset()
    given = {"kda.inner": inner, "kda.cost_model": False, **{f"kda.{key}": value for key, value in options.items()}}
    return torch.compile(model, backend="kda", options=given)(torch.randn(2, 5, 12))


@pytest.mark.parametrize("inner", INNERS)
def test_layers_in_checkpoints_are_counted_together(inner: str) -> None:
    model = Checkpointed()
    run(model, inner, expect={"gated_delta_rule": 2}, strict=True).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(StrictError, match="gated_delta_rule: 2 of 3"):
        run(model, inner, expect={"gated_delta_rule": 3})


@pytest.mark.parametrize("inner", INNERS)
def test_nothing_in_any_nested_graph(inner: str) -> None:
    model = Checkpointed()
    model.layers = model.layers[2:]
    with pytest.raises(StrictError, match="nothing matched"):
        run(model, inner, strict=True)


def test_a_region_counts_as_often_as_it_is_called() -> None:
    layers = [Layer() for _ in range(3)]
    region: Any = torch.compiler.nested_compile_region(Layer.forward)

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(layer, x)
        return x

    run(model, "inductor", expect={"gated_delta_rule": 3})
    with pytest.raises(StrictError, match="gated_delta_rule: 3 of 4"):
        run(model, "inductor", expect={"gated_delta_rule": 4})


def test_the_pass_alone_counts_so_too() -> None:
    """Inductor shows it each graph; which of them is the outermost, nobody tells."""
    found = [kdacompile.inductor_pass(expect={"gated_delta_rule": count}, cost_model=False) for count in (2, 3)]
    model = Checkpointed()
    torch.compile(model, options={"pre_grad_custom_pass": found[0]})(torch.randn(2, 5, 12))
    torch._dynamo.reset()
    with pytest.raises(StrictError, match="gated_delta_rule: 2 of 3"):
        torch.compile(model, options={"pre_grad_custom_pass": found[1]})(torch.randn(2, 5, 12))
