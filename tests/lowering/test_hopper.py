"""The Hopper kernels without a GPU: what they take, and that they compile where Triton is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import util
from typing import Any

import pytest
import torch

from kdacompile.lowering import cuda
from kdacompile.lowering.calls import Call
from kdacompile.lowering.hopper import HopperKernels, launches, run, schedule
from kdacompile.lowering.scratch import Scratch
from tests.lowering.sass import listing, unwritten

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
        ({"gate_fn": "new"}, "gate function 'new'"),
        ({"g": torch.zeros(1, 256, 2, 128, dtype=torch.float16)}, "float32"),
        ({"out_dtype": torch.float32}, "bfloat16"),
        ({"q": torch.randn(1, 256, 2, 128)}, "bfloat16"),
        ({"v": torch.randn(1, 256, 2, 60, dtype=torch.bfloat16)}, "steps of 8"),
        ({"q": torch.randn(1, 256, 2, 24, dtype=torch.bfloat16)}, "K from 32"),
        ({"q": torch.randn(1, 256, 2, 256, dtype=torch.bfloat16)}, "to 128"),
        ({"v": torch.randn(1, 1, 2, 128, dtype=torch.bfloat16), "q": torch.randn(1, 1, 2, 128).bfloat16()}, "short"),
    ],
)
def test_declines_with_a_reason(hopper: HopperKernels, change: dict[str, object], reason: str) -> None:
    assert reason in (hopper.declines(replace(kda_call(), **change)) or "")  # pyright: ignore[reportArgumentType]


def test_other_machines_decline() -> None:
    assert HopperKernels().declines(kda_call()) == "not a Hopper GPU"


def test_asked_before_the_emitted_kernels() -> None:
    assert [kernels.name for kernels in cuda.IMPLEMENTATIONS] == ["hopper", "triton"]


def test_takes_gates_without_a_bound(hopper: HopperKernels) -> None:
    call = kda_call()
    for gate_fn in ("softplus", "log", "logsigmoid", "factor"):
        assert hopper.declines(replace(call, gate_fn=gate_fn)) is None
    assert hopper.declines(replace(call, gate_scale=-30.0)) is None
    assert hopper.declines(replace(call, gate_fn="log", g=torch.zeros(1, 256, 2, 128))) is None


def test_takes_packed_sequences_and_other_widths(hopper: HopperKernels) -> None:
    call = kda_call()
    assert hopper.declines(replace(call, cu_seqlens=torch.tensor([0, 100, 256]))) is None
    assert hopper.declines(replace(call, v=torch.randn(1, 256, 2, 256, dtype=torch.bfloat16))) is None


POINTERS = frozenset(
    "A_log dt_bias beta places announced buffer decay factors g o_rows initial final cu_seqlens chunk_offsets ends "
    "states decays".split()
)


class Launched:
    """In place of a kernel: binds what it is launched with to the kernel's parameters."""

    def __init__(self, kernel: Any, order: list[str]) -> None:
        self.name, self.parameters, self.order = kernel.__name__, list(kernel.arg_names), order

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(count > 0 for count in grid)

        def launch(*args: Any, **named: Any) -> None:
            constants = {name: named[name] for name in named if name in self.parameters}
            assert set(named) - set(constants) <= {"num_warps", "num_stages", "launch_pdl"}
            bound = dict(zip(self.parameters, args, strict=False)) | constants
            assert len(args) + len(constants) == len(self.parameters) == len(bound)
            assert [name for name, value in bound.items() if not _is_of_its_kind(name, value)] == []
            self.order.append(self.name)

        return launch


def _is_of_its_kind(name: str, value: object) -> bool:
    if name.startswith("d_"):
        return not isinstance(value, (int, float, torch.Tensor))
    if name in ("scale", "eps", "gate_scale", "bound", "shift", "unshift"):
        return isinstance(value, float)
    if name.isupper():
        return isinstance(value, (int, str))
    return isinstance(value, torch.Tensor) == (name in POINTERS)


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("gate_fn", "heads", "length", "expected"),
    [
        ("sigmoid", 32, 2048, ["prepare", "scan"]),
        ("sigmoid", 96, 256, ["prepare", "scan"]),
        ("softplus", 32, 2048, ["prepare_unbounded", "scan"]),
        ("sigmoid", 16, 8192, ["prepare", "scan_channel"]),
        ("softplus", 1, 4096, ["prepare_unbounded", "scan_channel", "scan_channel"]),
        ("sigmoid", 10, 8192, ["prepare", "scan_channel", "scan_channel", "scan_channel"]),
        ("token", 32, 2048, ["prepare_scalar", "scan"]),
        ("token", 1, 4096, ["prepare_scalar", "scan", "combine", "scan"]),
    ],
)
def test_launches(
    hopper: HopperKernels, monkeypatch: pytest.MonkeyPatch, gate_fn: str, heads: int, length: int, expected: list[str]
) -> None:
    """Every launch gives every parameter once, and something of its kind."""
    call = kda_call(length, heads, heads)
    call = log_call(call, "token") if gate_fn == "token" else replace(call, gate_fn=gate_fn)
    assert hopper.declines(call) is None
    assert _launched(call, monkeypatch) == expected


def _launched(call: Call, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of a call on an H200, in order."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 132)  # pyright: ignore[reportUnknownLambdaType]
    made = launches.launches(call, launches.scheduled(call), Scratch(poison=True))
    order: list[str] = []
    for name in ("scan", "scan_channel", "combine", "linear", "bounded", "unbounded", "scalar"):
        if hasattr(made, name):
            setattr(made, name, Launched(getattr(made, name), order))
    made.run()
    return order


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("gate", "heads", "length", "expected"),
    [
        ("channel", 32, 2048, ["prepare_unbounded", "linear"]),
        ("channel", 1, 8192, ["prepare_unbounded", "linear", "linear"]),
        ("token", 132, 2048, ["linear"]),
        ("token", 4, 8192, ["linear", "linear"]),
        ("head", 4, 8192, ["linear", "linear"]),
        ("none", 4, 8192, ["linear", "linear"]),
    ],
)
def test_launches_without_the_delta_rule(
    hopper: HopperKernels, monkeypatch: pytest.MonkeyPatch, gate: str, heads: int, length: int, expected: list[str]
) -> None:
    call = replace(log_call(kda_call(length, heads, heads), gate), delta=False, beta=None, qk_l2norm_eps=0.0)
    for one in (call, replace(call, qk_l2norm_eps=1e-6), replace(call, initial_state=torch.zeros(1, heads, 128, 128))):
        assert hopper.declines(one) is None
        assert _launched(one, monkeypatch) == expected


def log_call(call: Call, gate: str) -> Call:
    """The call with log gates of another shape."""
    batch, length, heads, _ = call.v.shape
    shapes = {"channel": (batch, length, heads, 128), "token": (batch, length, heads), "head": (heads,)}
    g = torch.randn(shapes[gate]) if gate in shapes else None
    return replace(call, gate=gate, gate_fn="log", g=g, A_log=None, dt_bias=None)


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "kernel",
    [
        "bounded",
        "unbounded",
        "fp32",
        "token",
        "scan64",
        "scan128",
        "ends",
        "token_scan64",
        "token_scan128",
        "token_ends",
    ],
)
def test_compiles_for_hopper(kernel: str, packed: bool) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "bounded": lambda: offline.compile_prepare(packed),
        "unbounded": lambda: offline.compile_prepare_unbounded("bf16", packed),
        "fp32": lambda: offline.compile_prepare_unbounded("fp32", packed, "log"),
        "token": lambda: offline.compile_prepare_scalar(packed),
        "scan64": lambda: offline.compile_scan(64, packed),
        "scan128": lambda: offline.compile_scan(128, packed),
        "ends": lambda: offline.compile_scan(64, output=False),
        "token_scan64": lambda: offline.compile_scan(64, packed, scalar=True),
        "token_scan128": lambda: offline.compile_scan(128, packed, scalar=True),
        "token_ends": lambda: offline.compile_scan(64, output=False, scalar=True),
    }
    _fits(kernels[kernel]())


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "kernel",
    ["bounded", "unbounded", "token", "token_apart", "scan64", "scan128", "ends", "token_scan64", "token_scan64_apart"],
)
def test_narrow_heads_compile_for_hopper(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "bounded": lambda: offline.compile_prepare(ready=True, width=64),
        "unbounded": lambda: offline.compile_prepare_unbounded("fp32", width=64),
        "token": lambda: offline.compile_prepare_scalar(ready=True, width=64),
        "scan64": lambda: offline.compile_scan(64, ready=True, width=64),
        "scan128": lambda: offline.compile_scan(128, packed=True, width=64),
        "ends": lambda: offline.compile_scan(64, output=False, width=64),
        "token_scan64": lambda: offline.compile_scan(64, packed=True, scalar=True, width=64),
        "token_apart": lambda: offline.compile_prepare_scalar(ready=True, width=64, apart=True),
        "token_scan64_apart": lambda: offline.compile_scan(64, scalar=True, width=64, apart=True),
    }
    _fits(kernels[kernel]())


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "kernel",
    "bounded unbounded token none narrow linear linear_narrow given given_folded given_fp32 given_token".split(),
)
def test_keys_as_they_are_compile_for_hopper(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "bounded": lambda: offline.compile_prepare(raw=True),
        "unbounded": lambda: offline.compile_prepare_unbounded("fp32", raw=True, ready=True, gate_fn="log"),
        "token": lambda: offline.compile_prepare_scalar(raw=True, packed=True),
        "none": lambda: offline.compile_prepare_scalar(raw=True, gate_fn="none"),
        "narrow": lambda: offline.compile_prepare_unbounded(raw=True, width=64),
        "given": lambda: offline.compile_prepare(ready=True, sigmoid=False),
        "given_folded": lambda: offline.compile_prepare(folded=True, sigmoid=False),
        "given_fp32": lambda: offline.compile_prepare_unbounded("fp32", gate_fn="log", folded=True, sigmoid=False),
        "given_token": lambda: offline.compile_prepare_scalar(apart=True),
        "linear": lambda: offline.compile_prepare_unbounded("fp32", raw=True, delta=False, ready=True),
        "linear_narrow": lambda: offline.compile_prepare_unbounded(raw=True, delta=False, packed=True, width=64),
    }
    compiled = kernels[kernel]()
    _fits(compiled)
    assert unwritten(listing(compiled)) == []  # see ``inverse.leave_inverse``


def test_a_register_that_one_branch_writes_for_both_is_found() -> None:
    def after(branch: str) -> list[str]:
        lines = ["@P0 BRA `(.L_x_1)", "R2UR UR30, R4", "UIADD3.64 UR8, UR30, 0x2, URZ", branch]
        code = [f"        /*{n:04x}*/  {line} ;" for n, line in enumerate(["R2UR UR31, R5", *lines])]
        return unwritten("\n".join([*code, ".L_x_1:", "        /*0010*/  HGMMA R24, R60, gdesc[UR28], R24 ;"]))

    assert after("EXIT") == after("NOP") == ["0010: HGMMA R24, R60, gdesc[UR28], R24"]
    text = "        /*0000*/  R2UR UR31, R5 ;\n        /*0001*/  R2UR UR30, R4 ;\n"
    assert unwritten(text + "        /*0002*/  HGMMA R24, R60, gdesc[UR28], R24 ;") == []


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kernel", ["token", "packed", "normalised", "ends", "channel", "beside", "channel_ends"])
def test_rows_without_the_delta_rule_compile_into_registers(kernel: str, width: int) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, dict[str, Any]] = {
        "token": {}, "packed": {"packed": True, "gate_fn": "none"}, "normalised": {"raw": False},
        "ends": {"output": False}, "channel": {"scalar": False}, "beside": {"scalar": False, "ready": True},
        "channel_ends": {"scalar": False, "output": False},
    }  # fmt: skip
    compiled = offline.compile_linear(**kernels[kernel], width=width)
    _fits(compiled)
    assert offline.spilled_bytes(compiled) == 0


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
def test_a_gate_function_without_a_formula_does_not_compile() -> None:
    from triton.compiler.errors import CompilationError

    from tests.lowering import hopper_offline as offline

    with pytest.raises(CompilationError):
        offline.compile_prepare_unbounded("bf16", packed=False, gate_fn="tanh")


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["bounded", "unbounded", "token", "scan", "few_scan", "token_scan"])
def test_compiles_side_by_side(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "bounded": lambda: offline.compile_prepare(ready=True),
        "unbounded": lambda: offline.compile_prepare_unbounded(ready=True),
        "token": lambda: offline.compile_prepare_scalar(ready=True),
        "scan": lambda: offline.compile_scan(64, ready=True),
        "few_scan": lambda: offline.compile_scan_channel(ready=True),
        "token_scan": lambda: offline.compile_scan(64, scalar=True, ready=True),
    }
    compiled = kernels[kernel]()
    _fits(compiled)
    ours, theirs = ("ld.acquire.gpu", "griddepcontrol.wait"), ("atom.global.gpu.release", "launch_dependents")
    assert all(word in compiled.asm["ptx"] for word in (ours if "scan" in kernel else theirs))


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["bounded", "bounded_raw", "unbounded", "fp32"])
def test_products_with_the_inverse_find_room(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "bounded": lambda: offline.compile_prepare(folded=True),
        "bounded_raw": lambda: offline.compile_prepare(raw=True, ready=True, folded=True),
        "unbounded": lambda: offline.compile_prepare_unbounded(ready=True, folded=True),
        "fp32": lambda: offline.compile_prepare_unbounded("fp32", gate_fn="log", folded=True),
    }
    _fits(kernels[kernel]())


def test_keys_as_they_are_leave_no_room_beside_gates_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 132)  # pyright: ignore[reportUnknownLambdaType]
    call = replace(kda_call(256, 8, 8), qk_l2norm_eps=0.0)
    assert launches.scheduled(call).few
    assert not launches.scheduled(replace(call, gate_fn="softplus")).few
    assert launches.scheduled(replace(call, gate_fn="softplus", qk_l2norm_eps=1e-6)).few


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["beside", "ends", "ahead", "many"])
def test_products_of_a_scan_are_under_way_together(kernel: str) -> None:
    from tests.lowering import hopper_offline as offline

    kernels: dict[str, Callable[[], Any]] = {
        "beside": lambda: offline.compile_scan_channel(ready=True),
        "ends": lambda: offline.compile_scan_channel(output=False),
        "ahead": lambda: offline.compile_scan_channel(ahead=True),
        "many": lambda: offline.compile_scan(64, ready=True),
    }
    compiled = kernels[kernel]()
    _fits(compiled)
    assert offline.spilled_bytes(compiled) == 0
    text = listing(compiled)
    # Where ptxas cannot tell which registers belong to a product under way it waits after every one of them.
    assert 0 < 3 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA.")


def test_few_blocks_of_a_scan_have_a_chain_of_their_own() -> None:
    assert all(schedule(1, 8192, heads, 128, 132).few for heads in (1, 8, 16))
    assert not any(schedule(1, 8192, heads, 128, 132).few for heads in (24, 32, 96))
    assert not schedule(1, 8192, 4, 128, 132, gate="token").few
    assert not schedule(1, 8192, 4, 64, 132, width=64).few


@pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("width", [64, 128])
def test_combine_compiles_into_registers(width: int) -> None:
    from tests.lowering import hopper_offline as offline

    compiled = offline.compile_combine(width)
    _fits(compiled)
    assert offline.spilled_bytes(compiled) == 0


def _fits(compiled: Any) -> None:
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "wgmma.mma_async" in compiled.asm["ptx"]
