"""Regions run again on other numbers by the plan of their first run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kdacompile.graph.build import functional_graph
from kdacompile.patterns.engine.evaluate import Region
from kdacompile.patterns.engine.reduced import CannotReduce


def region_of(function: Any, *inputs: Tensor) -> Region:
    regions: list[Region] = []

    def backend(gm: fx.GraphModule, _: list[Any]) -> Any:
        functional = functional_graph(gm.graph)
        regions.append(Region(functional.ops, functional.inputs, list(functional.outputs)))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return regions[0]


def mixed(x: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(3.0) + 1.0  # a constant: computed once
    pairs = torch.stack((x * weights, y), 1)
    return (pairs.transpose(1, 2).reshape(x.shape[0], 6) @ torch.ones(6, 2)).softmax(-1)


def test_every_run_computes_the_function() -> None:
    region = region_of(mixed, torch.randn(4, 3), torch.randn(4, 3))
    for rows in (4, 2, 4, 2, 2):
        x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
        pairs = torch.stack((x * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), y), 1)
        expected = (pairs.transpose(1, 2).reshape(rows, 6) @ torch.ones(6, 2, dtype=torch.float64)).softmax(-1)
        assert torch.allclose(region([x, y])[0], expected, rtol=1e-12)
    assert len(region.plans) == 2


def test_what_may_be_cut_down_is_asked_in_every_run() -> None:
    region = region_of(lambda x, y: x + y, torch.randn(4, 3), torch.randn(4, 3))
    same, other = torch.ones(4, 3), torch.arange(12.0).view(4, 3)
    x = torch.randn(2, 3)
    assert torch.equal(region([x, same])[0], x.double() + 1)
    with pytest.raises(CannotReduce):
        region([x, other])
