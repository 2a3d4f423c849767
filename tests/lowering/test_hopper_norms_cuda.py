"""Betas that may enlarge what they meet, with keys that the op normalises, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lowering.test_hopper_cuda import KERNELS, ROWS, check, expect, make_call, row
from tests.lowering.verify import relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

OF_EQUAL_KEYS = 3e-2
"""Roundings of everything else are larger, too, where all keys are equal; fp16 would leave NaN."""


@pytest.mark.parametrize("gate", ROWS)
def test_steps_that_enlarge(gate: str) -> None:
    call = row(gate, make_call(1, 256, 2, initial_state=None))
    if gate in ("log", "token"):
        assert call.g is not None
        call = replace(call, g=call.g - 2.0)
    most = 2.0 if gate in ("head", "none") else 4.0  # without decay, what is rounded grows with the state
    check(replace(call, beta=most * torch.rand(1, 256, 2, device="cuda"), sigmoid_beta=False))


def test_equal_keys_and_steps_that_enlarge_one_after_the_other() -> None:
    call = row("none", make_call(1, 256, 2, initial_state=None))
    beta = torch.rand(1, 256, 2, device="cuda")
    beta[:, 40:52] = 4.0
    call = replace(call, k=call.k[:, :1].expand_as(call.k).contiguous(), beta=beta, sigmoid_beta=False)
    o, _ = KERNELS.run(call)
    assert relative_error(o, expect(call)[0]) <= OF_EQUAL_KEYS
