"""The executor on CUDA tensors: right answers, and no host sync but the one on cu_seqlens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from kdacompile.lowering import run_linear_attention, run_linear_attention_step
from tests.lowering.verify import Case, executor, make_inputs, verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS = [(gate, delta) for gate in ("none", "head", "token", "channel") for delta in (True, False)]


@contextmanager
def sync_is_an_error() -> Generator[None, None, None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strength", ["mild", "strong", "reset"])
@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_every_row(gate: str, delta: bool, gate_form: str, strength: str) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        case = Case(gate, delta, 150, gate_form=gate_form, strength=strength, value_heads=4, dtype=dtype, device="cuda")
        verify(executor, case, tolerance=tolerance)


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_packed_sequences(gate: str, delta: bool) -> None:
    verify(executor, Case(gate, delta, lengths=(33, 0, 70), device="cuda"), tolerance=2e-6)


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_no_host_sync(gate: str, delta: bool) -> None:
    inputs = make_inputs(Case(gate, delta, 100, device="cuda"))
    token = make_inputs(Case(gate, delta, 1, device="cuda"))
    with sync_is_an_error():
        run_linear_attention(inputs)
        run_linear_attention_step(token)
