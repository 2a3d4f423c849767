"""The hand-tuned kernels of the backward pass without a GPU: what they compute, and what is declined."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kdacompile.lowering.hopper import HopperGradients
from tests.lowering.differentiated import call_of
from tests.lowering.test_triton import ROOT, needs_triton, no_interpreter
from tests.ops.cases import make_case


@needs_triton
@pytest.mark.parametrize("part", ["gates", "shapes", "groups", "extremes", "causality"])
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
    head = make_case(gate="head", key_dim=128, value_dim=128, length=70).with_options(chunk_size=0).to(torch.bfloat16)
    assert HopperGradients().declines(call_of(head)) == "a gate per head is left to the emitted kernels"


@needs_triton
@no_interpreter
@pytest.mark.parametrize(("name", "spilled"), [("prepare", 32), ("scan", 0), ("gradients", 64)])
def test_kernels_compile_for_hopper(name: str, spilled: int) -> None:
    from tests.lowering import hopper_offline as offline

    for compiled in (
        offline.compile_backward(name, gate="fp32", packed=True),
        offline.compile_backward(name, delta=False),
    ):
        assert offline.spilled_bytes(compiled) <= spilled
        assert compiled.metadata.shared <= 232448  # what a block may have
