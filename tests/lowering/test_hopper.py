"""The Hopper kernels without a GPU: what they take, their schedules, and that they compile where Triton is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import util
from typing import Any

import pytest
import torch

from kdacompile.lowering import cuda
from kdacompile.lowering.calls import Call
from kdacompile.lowering.hopper import HopperKernels, launches, run, schedule, schedules
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


@pytest.mark.parametrize(
    ("heads", "length", "columns", "spans"),
    [
        (32, 8192, 64, [(0, 128)]),
        (96, 8192, 128, [(0, 128)]),
        (66, 100, 64, [(0, 2)]),
        (67, 100, 128, [(0, 2)]),
        (132, 4096, 128, [(0, 64)]),
    ],
)
def test_schedules(heads: int, length: int, columns: int, spans: list[tuple[int, int]]) -> None:
    plan = schedule(1, length, heads, 128, 132)
    assert (plan.columns, plan.spans, plan.segments) == (columns, spans, 1)
    assert sum(chunks for _, chunks in plan.spans) == plan.chunks
    assert plan.scratch_bytes <= schedules.SCRATCH_LIMIT


def test_long_sequences_share_the_buffers() -> None:
    for length in (65536, 2**20):
        plan = schedule(1, length, 32, 128, 132)
        assert plan.scratch_bytes <= schedules.SCRATCH_LIMIT
        assert sum(chunks for _, chunks in plan.spans) == plan.chunks
        assert plan.spare == 132 - 64


@pytest.mark.parametrize(("keys", "width"), [(32, 64), (64, 64), (72, 128), (128, 128)])
def test_keys_are_padded_to_one_of_two_widths(keys: int, width: int) -> None:
    assert schedules.padded(keys) == width


@pytest.mark.parametrize("gate", ["channel", "token"])
def test_narrow_heads_leave_fewer_rows(gate: str) -> None:
    """M and A_qk stay 64 by 64; all else has a number a key."""
    squares = 2 * 64 * 64 * 2
    for width in schedules.WIDTHS:
        other = 3 * 64 * width * 2 + width * 4 if gate == "channel" else 4 * 64 * 4
        assert schedules.tile_bytes(gate, width) == squares + other
        plan = schedule(1, 8192, 32, 64, 132, width=width, gate=gate)
        assert (plan.early, plan.segments) == (32, 1)
        assert plan.scratch_bytes == 4096 * (schedules.tile_bytes(gate, width) + 4)
        few = schedule(1, 8192, 1, 64, 132, width=width, gate=gate)
        assert few.segments > 1
        between = () if few.few else ((few.segments, 1, width, 64),)
        assert few.segment_buffers == ((few.segments - 1, 1, width, 64 + width), *between)


def test_without_the_delta_rule_segments_need_not_run_at_once() -> None:
    plan = schedule(1, 8192, 96, 128, 132, gate="token", delta=False)
    assert (plan.columns, plan.tiles * plan.tile_bytes, plan.scratch_bytes > 0) == (64, 0, plan.segments > 1)
    few = schedule(1, 8192, 4, 128, 132, gate="token", delta=False)
    assert few.segments > 4
    assert few.scratch_bytes == 4 * (few.segments - 1) * 4 * (128 * 128 + 128)
    assert schedule(1, 8192, 4, 128, 132, gate="token", delta=False, packed=3).segments == 1
    narrow = schedule(1, 8192, 32, 64, 132, width=64, delta=False)
    assert narrow.tile_bytes == 2 * (2 * 64 * 64 + 64 * 64) + 64 * 4
    long = schedule(1, 65536, 32, 128, 132, delta=False)
    assert long.scratch_bytes <= schedules.SCRATCH_LIMIT and len(long.spans) > 1 and long.segments == 1


def test_a_scan_that_waits_for_memory_runs_alone() -> None:
    assert schedule(1, 8192, 96, 64, 132, width=64, tile_microseconds=4.1).early == 0


def test_a_scan_runs_beside_the_tiles_it_wants_last() -> None:
    for gate, microseconds in (("channel", 6.0), ("token", 4.0)):
        plan = schedule(1, 8192, 32, 128, 132, gate=gate, tile_microseconds=microseconds)
        workers = 132 * schedules.WORKERS[gate]
        assert plan.early == 32 * 2
        assert 0 < plan.rounds * workers < plan.tiles
        # The others end no later than the scan does, were a tile not slowed down by it.
        late = (plan.tiles - plan.rounds * workers) / (132 - plan.early) * microseconds
        assert late <= plan.chunks * 1.1
        apart = replace(plan, early=0, rounds=0)
        assert plan.scratch_bytes == apart.scratch_bytes + 4 * plan.tiles  # a counter for each tile
    slower = schedule(1, 8192, 32, 128, 132, tile_microseconds=9.0)
    assert slower.rounds > schedule(1, 8192, 32, 128, 132, tile_microseconds=6.0).rounds
    assert schedule(1, 8192, 96, 128, 132).early == 0  # no multiprocessors to speak of are left
    assert schedule(1, 200, 16, 128, 132).early == 0  # fewer tiles than multiprocessors


def test_few_heads_are_scanned_in_segments() -> None:
    for heads in (1, 5, 8):
        plan = schedule(1, 8192, heads, 128, 132)
        assert plan.segments > 1
        assert heads * 2 * plan.segments <= 132
    assert schedule(1, 300, 2, 128, 132).segments == 1


def test_a_dozen_heads_are_scanned_beside_their_tiles() -> None:
    for heads, width in ((12, 128), (16, 128), (24, 128), (32, 64)):
        assert schedule(1, 8192, heads, width, 132).early == heads * width // 64


def test_beside_few_blocks_no_more_tiles_come_than_they_take() -> None:
    """Others would only make their steps longer; where tiles take long, every multiprocessor is wanted."""
    at_work = {time: 132 - schedule(1, 8192, 16, 128, 132, tile_microseconds=time).early for time in (3.5, 4.2, 6.0)}
    assert at_work[6.0] == 132 - 32
    for time in (3.5, 4.2):
        taken = 16 / (0.96 * 0.92)  # tiles in a microsecond
        assert taken < at_work[time] / time < 1.1 * taken
    assert schedule(1, 8192, 32, 128, 132, tile_microseconds=4.2).early == 64  # not few


def test_the_scan_begins_beside_tiles_that_take_long_and_goes_on_in_segments() -> None:
    plan = schedule(1, 8192, 10, 128, 132)
    assert 0 < plan.leading < plan.chunks and plan.segments > 1
    assert 10 * 2 * plan.segments <= 132
    # The tiles of the leading chunks are not among the last ones.
    assert plan.leading * 10 < plan.tiles - (132 - plan.early)
    assert schedule(1, 8192, 10, 128, 132, folded=False).leading == schedule(1, 8192, 2, 128, 132).leading == 0
    assert schedule(1, 8192, 10, 128, 132, gate="token").leading == 0


def test_packed_sequences_share_the_buffers() -> None:
    plan = schedule(1, 1000, 4, 128, 132, packed=3)
    assert (plan.chunks, plan.tiles_per_chunk, plan.sequence_heads) == (1000 // 64 + 3, 4, 12)


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
