"""Constants that only move numbers about are computed once, in the model's dtype, unless that rounds any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.graph.build import functional_graph
from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.constants import constant
from tests.mla.spellings import causal

HALF = torch.bfloat16
SIZE = 80  # more numbers than are compared one by one


def constants_of(fn: Callable[..., Tensor]) -> dict[str, Value]:
    """The last constant of each operator in a function of one tensor."""
    found: dict[str, Value] = {}

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        found.update({op.name: op.out for op in functional_graph(gm.graph).ops if op.out.const})
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(torch.zeros(SIZE, SIZE, dtype=HALF))
    return found


def keep() -> Tensor:
    return causal(SIZE, SIZE)


def filled(number: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x + torch.zeros(SIZE, SIZE, dtype=HALF).masked_fill(keep(), number)


def chosen(x: Tensor) -> Tensor:
    kept, hidden = (torch.full((), number, dtype=HALF) for number in (0.0, -torch.inf))
    return x + torch.where(keep(), kept, hidden)


@pytest.mark.parametrize("number", [-torch.inf, 0.5, -1e4, 0.1])
def test_a_number_that_is_filled_in(number: float) -> None:
    data = constant(constants_of(filled(number))["masked_fill"])
    kept = float(torch.tensor(number, dtype=HALF)) == number
    assert data.dtype == (HALF if kept else torch.float64)
    assert torch.equal(data, torch.zeros(SIZE, SIZE, dtype=data.dtype).masked_fill(keep(), number))


def test_numbers_that_are_chosen() -> None:
    data = constant(constants_of(chosen)["where"])
    assert data.dtype == HALF
    assert torch.equal(data, torch.zeros(SIZE, SIZE, dtype=HALF).masked_fill(~keep(), -torch.inf))


def test_a_cast_that_rounds() -> None:
    """Positions above 256 are none in bfloat16: the model's own numbers are the function."""
    positions = constants_of(lambda x: x + torch.arange(SIZE * SIZE).view(SIZE, SIZE).to(HALF))["_to_copy"]
    have, want = constant(positions), torch.arange(SIZE * SIZE).view(SIZE, SIZE)
    assert torch.equal(have.double(), want.double())
    compared = constants_of(lambda x: x + (torch.arange(SIZE * SIZE).view(SIZE, SIZE).to(HALF) > 300.0))["gt"]
    assert torch.equal(constant(compared), want.to(HALF) > 300.0)


def test_products_of_what_was_chosen_are_computed_in_both() -> None:
    def product(x: Tensor) -> Tensor:
        kept, hidden = (torch.full((), number, dtype=HALF) for number in (1.5, 0.25))
        return x + torch.where(keep(), kept, hidden) * 1.1

    data = constant(constants_of(product)["mul"])
    want = torch.where(keep(), 1.5, 0.25).double() * 1.1
    assert data.dtype == torch.float64
    assert torch.equal(data, want)
