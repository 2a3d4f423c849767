"""Few heads on a Hopper GPU: segments of a sequence, and chunks that are scanned beside their tiles before them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.hopper import launches, schedule
from tests.lowering.test_hopper_cuda import KERNELS, TOLERANCE, check, fresh_schedules, make_call, pytestmark
from tests.lowering.verify import relative_error

__all__ = ["fresh_schedules", "pytestmark"]


@pytest.mark.parametrize(("heads", "length", "keys"), [(1, 5001, 128), (5, 2500, 128), (7, 8200, 128), (5, 4100, 64)])
def test_segments(heads: int, length: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(1, length, heads, keys=keys, gate_fn="softplus", spread=1.0)
    assert launches.scheduled(call).segments > 1
    check(call)
    check(replace(call, initial_state=None))
    assert call.g is not None
    mild = replace(call, dt_bias=None, A_log=None, g=call.g - 8)  # hardly any decay: what is carried over matters
    o, state = KERNELS.run(mild)
    monkeypatch.setattr("kdacompile.lowering.hopper.schedules.MAX_SEGMENTS", 1)
    schedule.cache_clear()
    in_one, state_in_one = KERNELS.run(mild)
    assert relative_error(o, in_one.double()) <= TOLERANCE
    assert relative_error(state, state_in_one.double()) <= TOLERANCE


@pytest.mark.parametrize("gate_fn", ["sigmoid", "softplus"])
def test_segments_behind_chunks_that_are_scanned_beside_their_tiles(
    gate_fn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make_call(1, 8150, 10, gate_fn=gate_fn, spread=1.0)
    plan = launches.scheduled(call)
    assert plan.leading > 0 and plan.segments > 1
    check(call)
    check(replace(call, initial_state=None))
    assert call.g is not None
    mild = replace(call, dt_bias=None, A_log=None, g=call.g - 8)  # hardly any decay: what is carried over matters
    o, state = KERNELS.run(mild)
    again, state_again = KERNELS.run(mild)
    assert torch.equal(o, again) and torch.equal(state, state_again)
    alone = replace(plan, leading=0, segments=1, early=0, rounds=0)
    monkeypatch.setattr("kdacompile.lowering.hopper.run.scheduled", lambda call: alone)
    in_one, state_in_one = KERNELS.run(mild)
    assert relative_error(o, in_one.double()) <= TOLERANCE
    assert relative_error(state, state_in_one.double()) <= TOLERANCE
