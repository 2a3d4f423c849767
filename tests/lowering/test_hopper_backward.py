"""The hand-tuned kernels of the backward pass without a GPU: what they compute, and what is declined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdacompile.lowering.hopper import HopperGradients
from kdacompile.lowering.hopper.backward_run import HopperBackward
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton.backward_run import Backward
from tests.lowering import peer
from tests.lowering.differentiated import call_of, expected, given_betas, weights
from tests.lowering.processes import passes
from tests.lowering.test_triton import needs_triton, no_interpreter
from tests.ops.cases import make_case

MULTIPROCESSOR, RESERVED = 228 * 1024, 1024
"""Bytes of shared memory a multiprocessor has, and what of it each block takes for itself."""


@needs_triton
@pytest.mark.parametrize(
    "part",
    "gates tokens shapes groups runs beside extremes enlarging draws causality two_passes".split(),
)
def test_gradients_emulated(part: str) -> None:
    passes("hopper_emulated", part)


def test_what_errors_are_held_against_is_exact_without_rounding() -> None:
    for case in given_betas("token"):
        given = of_o, of_state = weights(case)
        assert of_o is not None and of_state is not None
        want, sizes = expected(case, given)
        found = peer.gradients(case, of_o.double(), of_state.double(), lambda x: x.double())
        assert all(float((x - want[name]).norm()) <= 1e-12 * sizes[name] for name, x in found.items())
        assert peer.error_of_gates(case.to(torch.bfloat16)) < 2e-2


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
    for scale in (0.0, 2.0**70, float("nan")):
        assert "scale" in str(HopperGradients().declines(call_of(case.with_options(scale=scale))))


class Counted(Scratch):
    """What is allocated, nothing launched."""

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda **given: None


@needs_triton
@pytest.mark.parametrize("execution", [HopperBackward, Backward])
@pytest.mark.parametrize(
    ("length", "heads"), [(8192, 32), (65536, 32), (65535, 32), (65536, 96), (262144, 32), (2**20, 4)]
)
def test_buffers_of_long_sequences(execution: type[Backward], length: int, heads: int) -> None:
    """No more than 1 GiB and the states at the boundaries of runs, however long a sequence is."""
    case = make_case(gate_fn="sigmoid", batch=1, heads=heads, groups=1, key_dim=128, value_dim=128, length=1)
    tokens = {n: case.tensors[n].to("meta", torch.bfloat16).expand(1, length, heads, 128) for n in ("q", "k", "v", "g")}
    tokens["beta"] = tokens["q"][..., 0]
    call = call_of(case.with_tensors(**tokens, initial_state=None).with_options(chunk_size=0))
    scratch = Counted()
    backward = execution(call, call.v, None, scratch)
    _, chunks = backward._cut()
    backward.run()
    runs = -(-length // (64 * chunks))
    states = (runs + 1) * heads * 128 * 128 * 4 if runs > 1 else 0
    assert 0 < scratch.allocated_bytes - states <= 2**30
    if (length, heads, execution) == (65536, 32, HopperBackward):
        assert (runs, scratch.allocated_bytes >> 20) == (8, 506)


@needs_triton
@no_interpreter
@pytest.mark.parametrize(
    ("name", "blocks", "spilled", "options"),
    [
        ("prepare", 3, 72, {"gate_fn": "sigmoid"}),
        ("prepare", 3, 96, {"gate": "fp32", "packed": True}),
        ("prepare", 3, 72, {"gate_fn": "sigmoid", "ahead": True}),
        ("prepare", 3, 72, {"gate_fn": "sigmoid", "solved": False}),
        ("prepare", 3, 104, {"gate": "fp32", "packed": True, "sigmoid": False}),
        ("scan", 1, 0, {"forward": 1}),
        ("scan", 1, 0, {"packed": True}),
        ("scan", 1, 0, {"early": "end"}),
        ("scan", 1, 0, {"ahead": True}),
        ("scan", 1, 0, {"delta": False, "early": "middle"}),
        ("scan", 1, 0, {"scalar": True, "values": 64, "delta": False}),
        ("scan", 1, 0, {"scalar": True, "packed": True}),
        ("gradients", 2, 160, {"gate": "fp32", "packed": True, "gate_fn": "sigmoid"}),
        ("gradients", 1, 208, {"gate": "fp32", "packed": True}),
        ("gradients", 2, 80, {"delta": False}),
        ("gradients", 2, 112, {"gate_fn": "sigmoid", "early": "end"}),
        ("gradients", 2, 272, {"early": "middle"}),
        ("prepare_scalar", 4, 48, {"gate": "fp32", "packed": True}),
        ("prepare_scalar", 4, 24, {"gate": "fp32", "packed": True, "solved": False}),
        ("prepare_scalar", 4, 216, {"pairs": False, "sigmoid": False}),
        ("scan", 1, 0, {"scalar": True}),
        ("scan", 1, 0, {"scalar": True, "pairs": False, "early": "end"}),
        ("gradients_scalar", 2, 40, {"gate": "fp32", "packed": True}),
        ("gradients_scalar", 2, 40, {"gate": "fp32", "early": "end"}),
        ("gradients_scalar", 2, 88, {"pairs": False, "early": "end"}),
        ("gradients_scalar", 2, 0, {"delta": False, "values": 64}),
    ],
)
def test_kernels_compile_for_hopper(name: str, blocks: int, spilled: int, options: dict[str, Any]) -> None:
    """``blocks`` are meant to share a multiprocessor, and its registers; ``spilled``: bytes of a thread."""
    from tests.lowering import hopper_offline as offline

    compiled = offline.compile_backward(name, **options)
    assert offline.spilled_bytes(compiled) <= spilled
    assert compiled.metadata.shared <= MULTIPROCESSOR // blocks - RESERVED
