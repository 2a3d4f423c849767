"""Writing down a function's operators without data: what make_fx gives, and the function's own numbers when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # torch-private: a second opinion
from torch.fx.experimental.proxy_tensor import make_fx

from kdacompile.compat import example_value, operators
from kdacompile.compat.operators import trace_fake, without_data
from kdacompile.graph.build import functional_graph
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


def described(results: Any) -> list[tuple[Any, ...]]:
    return [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in tensors(results)]


aten = torch.ops.aten
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.add.Tensor, ("x", 1)),
    (aten.add.Tensor, ("i", 1)),
    (aten.add.Tensor, ("i", 1.0)),
    (aten.add.Tensor, ("i", True)),
    (aten.mul.Tensor, ("turned", 2)),
    (aten.bmm.default, ("x", "turned")),
    (aten.sum.dim_IntList, ("x", [1], True)),
    (aten.cat.default, (["x", "x"], 2)),
    (aten.topk.default, ("x", 2)),
    (aten._to_copy.default, ("x",)),
    (aten.constant_pad_nd.default, ("x", [0, 1])),
]


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_what_an_operator_yields_without_data_is_remembered_as_it_is(default: torch.dtype) -> None:
    x = torch.empty(2, 6, 4, device="meta", dtype=torch.float32)
    given = {"x": x, "turned": torch.empty(2, 6, 4, device="meta").mT, "i": x.long()}

    def read(argument: Any) -> Any:
        if isinstance(argument, list):
            return list(map(read, argument))
        return given[argument] if isinstance(argument, str) else argument

    calls = [(function, tuple(map(read, arguments))) for function, arguments in CALLS]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        want = [described(f(*args)) for f, args in calls]
        for _ in range(2):
            assert [described(without_data(f, args, {})) for f, args in calls] == want
    finally:
        torch.set_default_dtype(before)


def test_views_and_writes_are_not_remembered() -> None:
    x = torch.empty(2, 6, device="meta")
    for _ in range(2):
        assert without_data(aten.view.default, (x, [12]), {})._base is x
        assert without_data(aten.add_.Tensor, (x, 1), {}) is x


def test_a_loop_asks_torch_for_each_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_known", {})
    traced(rows)
    once = len(operators._known)
    graph = traced(rows).graph
    calls = [node for node in graph.nodes if operators.is_operator(node.target)]
    assert 0 < len(operators._known) == once < len(calls) / 2
    functional_graph(graph)
    functional_graph(graph)
    assert len(operators._known) < len(calls) / 2
