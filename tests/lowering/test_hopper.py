"""The Hopper kernels without a GPU: what they take, their schedules, and that they compile where Triton is."""

from __future__ import annotations

from dataclasses import replace
from importlib import util

import pytest
import torch

from kdacompile.lowering import cuda
from kdacompile.lowering.calls import Call
from kdacompile.lowering.hopper import HopperKernels, run, schedule

SHARED_MEMORY = 232448  # bytes a block may have on sm_90


def kda_call(length: int = 256, heads: int = 2, value_heads: int = 2, device: str = "cpu") -> Call:
    """KDA with its lower bound on gates, everything fused, bf16."""
    q = torch.randn(1, length, heads, 128, dtype=torch.bfloat16, device=device)
    v = torch.randn(1, length, value_heads, 128, dtype=torch.bfloat16, device=device)
    beta = torch.randn(1, length, value_heads, dtype=torch.bfloat16, device=device)
    A_log, dt_bias = torch.zeros(value_heads, device=device), torch.zeros(value_heads, 128, device=device)
    return Call(
        q, q, v, v, beta, None, A_log, dt_bias, None, scale=128**-0.5, delta=True, gate="channel", gate_fn="sigmoid",
        gate_scale=-5.0, sigmoid_beta=True, qk_l2norm_eps=1e-6, chunk_size=0, out_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> HopperKernels:
    """The kernels, on a machine that answers for a Hopper GPU and its Triton."""
    monkeypatch.setattr(run, "machine", lambda x: None)  # pyright: ignore[reportUnknownLambdaType]
    return HopperKernels()


def test_takes_the_gated_delta_rule(hopper: HopperKernels) -> None:
    call = replace(kda_call(), gate="token", gate_fn="softplus", g=torch.zeros(1, 256, 2))
    assert hopper.declines(call) is None
    assert hopper.declines(replace(call, gate_fn="log", gate_scale=1.0)) is None


def test_takes_bounded_kda(hopper: HopperKernels) -> None:
    assert hopper.declines(kda_call()) is None
    assert hopper.declines(kda_call(heads=1, value_heads=4, length=129)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"delta": False}, "delta rule"),
        ({"gate": "head"}, "per channel or per token"),
        ({"gate": "token", "g": torch.zeros(1, 256, 2), "gate_fn": "factor"}, "factor gate"),
        ({"gate_fn": "softplus"}, "bounded"),
        ({"gate_scale": -5.3}, "bounded"),
        ({"qk_l2norm_eps": 0.0}, "unit vectors"),
        ({"cu_seqlens": torch.tensor([0, 256])}, "packed"),
        ({"out_dtype": torch.float32}, "bfloat16"),
        ({"q": torch.randn(1, 256, 2, 128)}, "bfloat16"),
        ({"v": torch.randn(1, 256, 2, 64, dtype=torch.bfloat16)}, "K = V = 128"),
        ({"v": torch.randn(1, 1, 2, 128, dtype=torch.bfloat16), "q": torch.randn(1, 1, 2, 128).bfloat16()}, "short"),
    ],
)
def test_declines_with_a_reason(hopper: HopperKernels, change: dict[str, object], reason: str) -> None:
    assert reason in (hopper.declines(replace(kda_call(), **change)) or "")  # pyright: ignore[reportArgumentType]


def test_other_machines_decline() -> None:
    assert HopperKernels().declines(kda_call()) == "not a Hopper GPU"


def test_asked_before_the_emitted_kernels() -> None:
    assert [kernels.name for kernels in cuda.IMPLEMENTATIONS] == ["hopper", "triton"]


@pytest.mark.parametrize(
    ("lanes", "length", "columns", "spans"),
    [
        (32, 8192, 64, [(0, 128)]),
        (96, 8192, 128, [(0, 128)]),
        (66, 100, 64, [(0, 2)]),
        (67, 100, 128, [(0, 2)]),
        (32, 65536, 64, [(0, 508), (508, 508), (1016, 8)]),
    ],
)
def test_schedules(lanes: int, length: int, columns: int, spans: list[tuple[int, int]]) -> None:
    plan = schedule(lanes, length, 132)
    assert (plan.columns, plan.spans) == (columns, spans)
    assert sum(chunks for _, chunks in plan.spans) == plan.chunks
    assert plan.scratch_bytes(lanes) <= run.SCRATCH_LIMIT


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["prepare", "prepare_scalar", "scan64", "scan128"])
def test_compiles_for_hopper(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    prepares = {"prepare": offline.compile_prepare, "prepare_scalar": offline.compile_prepare_scalar}
    compiled = prepares[kernel]() if kernel in prepares else offline.compile_scan(int(kernel.removeprefix("scan")))
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in compiled.asm["ptx"]
