"""Writing down a function's operators without data: what make_fx gives, and the function's own numbers when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # torch-private: a second opinion
from torch.fx.experimental.proxy_tensor import make_fx

from kdacompile.compat import example_value
from kdacompile.compat.operators import trace_fake
from tests.compare import tensors, worst_error

SHAPES = ((2, 6, 4), (2, 6, 4), (2, 6))


def rows(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Buffers, writes through views, several results of one call, products that reshape in place."""
    out = torch.zeros(2, 6, 4, dtype=x.dtype, device=x.device)
    first, second = x.split(2, dim=-1)
    for t in range(3):
        out[:, t] = out[:, t].clone() + (x[:, t] * y[:, t]).sum(-1, keepdim=True) * z[:, t, None]
    out[..., :2] -= first * second
    return (out @ y[0].mT) @ z[0], {"state": y.new_zeros(3).add_(z.sum())}


def literals(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    picked = torch.tensor([0, 2, 5])
    return x[:, picked] * torch.tensor([1.0, 2.0, 3.0])[:, None] if x.device.type == "cpu" else y


def reshaped(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    flat = x + y
    flat.unsqueeze_(0)
    return flat.mul_(2.0) + z[None, :, :, None]


def arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def traced(fn: Callable[..., Any]) -> torch.fx.GraphModule:
    return trace_fake(fn, [(shape, torch.empty(shape).stride(), torch.float32, "cpu") for shape in SHAPES])


@pytest.mark.parametrize("fn", [rows, literals, reshaped])
def test_the_graph_is_the_function(fn: Callable[..., Any]) -> None:
    graph = traced(fn)
    have, want = graph(*arguments()), fn(*arguments())
    assert worst_error(tensors(have), tensors(want)) == 0.0
    for node in graph.graph.nodes:
        if isinstance(value := example_value(node), Tensor):
            assert value.device == torch.device("cpu"), node


@pytest.mark.parametrize("fn", [rows, literals, reshaped])
def test_sizes_and_strides_are_those_of_make_fx(fn: Callable[..., Any]) -> None:
    def described(graph: torch.fx.GraphModule) -> list[Any]:
        named = [(str(node.target), node.meta.get("val")) for node in graph.graph.nodes if node.op == "call_function"]
        return [(name, x.shape, x.stride(), x.dtype) for name, x in named if isinstance(x, Tensor) and name not in FREE]

    with torch.no_grad(), FakeTensorMode() as fakes:
        fakes.allow_non_fake_inputs = True  # literals
        theirs = make_fx(fn)(*(torch.empty(shape) for shape in SHAPES))
    assert described(traced(fn)) == described(theirs)


FREE = ("aten.lift_fresh_copy.default", "aten.unsqueeze_.default")  # make_fx names them otherwise


def test_tensors_of_others_are_refused() -> None:
    held = torch.ones(4)
    with pytest.raises(RuntimeError, match="not an argument"):
        traced(lambda x, y, z: x * held)


def test_data_are_refused() -> None:
    with pytest.raises(RuntimeError):
        traced(lambda x, y, z: x if bool((z > 0).all()) else y)
