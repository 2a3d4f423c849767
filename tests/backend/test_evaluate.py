"""Regions run again on other numbers by the plan of their first run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kdacompile.graph.build import functional_graph
from kdacompile.patterns.engine import constants
from kdacompile.patterns.engine.constants import constant, parts_of_constant
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


def mask(x: Tensor, *, shift: float = 0.0) -> Tensor:
    """Added to scores: a window of documents of five tokens, each entry of which follows from few numbers."""
    places = torch.arange(x.shape[-1])
    document = torch.div(places, 5, rounding_mode="floor")
    seen = (places <= places[:, None]) & (document == document[:, None]) & (places[:, None] - places < 4)
    return x + torch.where(seen.expand(2, -1, -1), shift, -torch.inf).to(x.dtype)


@pytest.mark.parametrize("shift", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_constants_are_made_in_parts(dtype: torch.dtype, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    region = region_of(functools.partial(mask, shift=shift), torch.randn(2, 13, 13, dtype=dtype))
    value = next(value for value in region.ops[-1].reads if value.const)
    whole = constant(value)
    monkeypatch.setattr(constants, "PART", 30)
    pieces = list(parts_of_constant(value))
    assert len(pieces) > 1 and all(data.shape[dim] == size for (dim, _, size), data in pieces)
    assert torch.equal(torch.cat([data for _, data in pieces], pieces[0][0][0]), whole)
    assert torch.equal(constant(value), whole)


def test_the_end_of_a_large_constant_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    for part in (30, 1 << 18):
        monkeypatch.setattr(constants, "PART", part)
        region = region_of(mask, torch.randn(2, 13, 13))
        region.tails = frozenset({13})
        have = region([x])[0]
        assert torch.equal(have, mask(torch.zeros(2, 13, 13, dtype=torch.float64))[:, 5:, 5:] + x)
        assert any(region.constants.waits(value) for op in region.ops for value in op.reads) == (part == 30)
        assert torch.equal(region([x])[0], have)
