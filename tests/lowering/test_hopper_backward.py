"""The hand-tuned kernels of the backward pass without a GPU: what they compute, and what is declined."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from kdacompile.lowering.hopper import HopperGradients
from tests.lowering.differentiated import call_of
from tests.lowering.test_triton import ROOT, needs_triton, no_interpreter
from tests.ops.cases import make_case

MULTIPROCESSOR, RESERVED = 228 * 1024, 1024
"""Bytes of shared memory a multiprocessor has, and what of it each block takes for itself."""


@needs_triton
@pytest.mark.parametrize(
    "part", ["gates", "tokens", "shapes", "groups", "beside", "extremes", "draws", "causality", "two_passes"]
)
def test_gradients_emulated(part: str) -> None:
    command = [sys.executable, "-m", "tests.lowering.hopper_emulated", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@needs_triton
def test_what_is_declined() -> None:
    case = make_case(key_dim=128, value_dim=128, length=70).with_options(chunk_size=0)
    wide, narrow = (
        "only bf16 heads of 128 channels have hand-tuned kernels",
        "only chunks of 64 tokens have hand-tuned kernels",
    )
    assert HopperGradients().declines(call_of(case)) == wide
    case = case.to(torch.bfloat16)
    assert HopperGradients().declines(call_of(case)) == "not a Hopper GPU"
    assert HopperGradients().declines(call_of(case.with_options(chunk_size=32))) == narrow
    factor = make_case(gate="token", gate_fn="factor", key_dim=128, value_dim=128, length=70).with_options(chunk_size=0)
    left = "a factor's gradient divides by it: left to the emitted kernels"
    assert HopperGradients().declines(call_of(factor.to(torch.bfloat16))) == left


@needs_triton
@no_interpreter
@pytest.mark.parametrize(
    ("name", "blocks", "spilled", "options"),
    [
        ("prepare", 3, 72, {"gate_fn": "sigmoid"}),
        ("prepare", 3, 96, {"gate": "fp32", "packed": True}),
        ("scan", 1, 0, {"forward": 1}),
        ("scan", 1, 0, {"packed": True}),
        ("scan", 1, 0, {"early": "end"}),
        ("gradients", 2, 160, {"gate": "fp32", "packed": True, "gate_fn": "sigmoid"}),
        ("gradients", 1, 208, {"gate": "fp32", "packed": True}),
        ("gradients", 2, 80, {"delta": False}),
        ("gradients", 2, 112, {"gate_fn": "sigmoid", "early": "end"}),
        ("gradients", 2, 272, {"early": "middle"}),
        ("prepare_scalar", 3, 0, {"gate": "fp32", "packed": True}),
        ("scan", 1, 0, {"scalar": True}),
        ("gradients_scalar", 2, 40, {"gate": "fp32", "packed": True}),
        ("gradients_scalar", 2, 40, {"gate": "fp32", "early": "end"}),
        ("gradients_scalar", 2, 0, {"delta": False, "values": 64}),
    ],
)
def test_kernels_compile_for_hopper(name: str, blocks: int, spilled: int, options: dict[str, Any]) -> None:
    """``blocks`` are meant to share a multiprocessor, and its registers; ``spilled``: bytes of a thread."""
    from tests.lowering import hopper_offline as offline

    compiled = offline.compile_backward(name, **options)
    assert offline.spilled_bytes(compiled) <= spilled
    assert compiled.metadata.shared <= MULTIPROCESSOR // blocks - RESERVED
