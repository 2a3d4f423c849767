"""The kernels of the backward pass in Triton's interpreter, and what chooses them."""

from __future__ import annotations

import pytest
import torch

from kdacompile.lowering.triton import TritonGradients
from kdacompile.lowering.triton.backward_schedule import schedule
from tests.lowering.differentiated import PARTS, call_of
from tests.lowering.processes import INTERPRETED, passes
from tests.lowering.test_triton import needs_triton, no_interpreter
from tests.ops import cases


@needs_triton
@no_interpreter
@pytest.mark.parametrize("part", PARTS)
def test_gradients_in_the_interpreter(part: str) -> None:
    passes("differentiated", part, environment=INTERPRETED)


@needs_triton
def test_what_is_declined() -> None:
    wide = cases.make_case(key_dim=128, value_dim=128)
    assert TritonGradients().declines(call_of(wide)) is None
    assert TritonGradients().declines(call_of(wide.to(torch.float64))) == "no torch.float64 kernels"
    assert TritonGradients().declines(call_of(cases.make_case(key_dim=48, value_dim=200))) is None


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("width", [16, 80, 128, 256])
def test_schedules(width: int, item: int) -> None:
    for length in (1, 40, 8192):
        plan = schedule(width, width, length, item, channels=True, blocks=item == 2)
        blocks = (plan.chunk, plan.prepare_keys, plan.scan_columns, plan.columns)
        assert min(blocks) >= 16 and plan.chunk <= 64 and plan.keys == (8 if item == 2 else 16)
