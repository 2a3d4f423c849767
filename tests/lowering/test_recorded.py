"""Remembered calls, on the host: what is launched again, for which operands, and what is never remembered."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import recorded
from kdacompile.lowering.hopper import launches as hopper
from kdacompile.lowering.hopper import mla_run as hopper_mla
from kdacompile.lowering.operands import tensors
from kdacompile.lowering.recorded import Memory, Recorder
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.split import workers
from kdacompile.lowering.triton import mla_run
from kdacompile.lowering.triton import run as portable
from kdacompile.ops.errors import SizeError
from kdacompile.ops.fused import FusedKernels
from tests.lowering.processes import passes
from tests.lowering.recorded_offline import Kernel, floats
from tests.lowering.test_hopper import kda_call, log_call
from tests.ops.mla_cases import make_mla

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")


def doubled(x: int, out: int, N: int, factor: float) -> None:
    for i in range(N):
        floats(out, N)[i] = factor * floats(x, N)[i]


class Doubling:
    """Twice x and its square in two launches, over a scratch buffer and a transposed copy; calls are counted."""

    def __init__(self) -> None:
        self.memory, self.calls = Memory(), 0
        self.kernel = Kernel("doubled", ["x", "out", "N", "factor"], doubled)

    def __call__(self, x: Tensor, *others: Tensor | None, factor: float = 2.0) -> Tensor:
        return self.memory.run(factor, (x, *others), lambda scratch: self.run(scratch, x, factor))[0]

    def run(self, scratch: Scratch, x: Tensor, factor: float) -> tuple[Tensor, ...]:
        self.calls += 1
        x = scratch.contiguous(x)
        half = scratch.empty(tuple(x.shape), x.dtype, x.device)
        out = scratch.result(tuple(x.shape), x.dtype, x.device)
        scratch.launch(self.kernel, (1,))(x, half, x.numel(), factor=factor / 2)
        scratch.launch(self.kernel, (1,))(half, out, N=x.numel(), factor=2.0, num_warps=4)
        return (out,)


def test_a_call_of_a_known_kind_only_launches() -> None:
    op = Doubling()
    for _ in range(3):
        x = torch.randn(4, 6)
        assert torch.equal(op(x), 2 * x)
    assert (op.calls, op.kernel.compiled, len(op.kernel.launches)) == (1, 2, 6)


def test_what_is_copied_first_is_copied_again() -> None:
    op = Doubling()
    for _ in range(3):
        x = torch.randn(6, 4)
        assert torch.equal(op(x.T), 2 * x.T)
        later = torch.randn(7, 12)[1:, 2::3]  # begins inside its memory
        assert torch.equal(op(later), 2 * later)
    assert op.calls == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.randn(8, 3),
        lambda x: torch.randn(6, 4).T,
        lambda x: torch.randn(25)[1:].view(4, 6),  # 4 bytes beyond a multiple of 16
        lambda x: torch.randn(4, 6).to("meta"),
    ],
    ids=["shape", "strides", "alignment", "device"],
)  # fmt: skip
def test_another_kind_is_decided_anew(other: Callable[[Tensor], Tensor]) -> None:
    op = Doubling()
    x = torch.zeros(4, 6)
    op(x)
    kind = other(x)
    if kind.is_meta:
        op.kernel.body = None
    op(kind)
    op(x, None)
    op(x, factor=3.0)
    assert op.calls == 4
    op(x)
    assert op.calls == 4


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST", 2)
    op = Doubling()
    for length in (1, 2, 3, 3, 2, 1):
        op(torch.zeros(length))
    assert op.calls == 4


def test_no_tensor_is_kept() -> None:
    import gc
    import weakref

    op, x = Doubling(), torch.randn(4, 6).T
    out = op(x)
    kept = [weakref.ref(x), weakref.ref(out)]
    op.kernel.launches.clear()
    del x, out
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def unseen(scratch: Scratch, x: Tensor) -> tuple[Tensor, ...]:
    """A launch on memory that did not come from the scratch memory."""
    out = scratch.result(tuple(x.shape), x.dtype, x.device)
    scratch.launch(Kernel("doubled", ["x", "out", "N", "factor"], doubled), (1,))(x + 0, out, x.numel(), 2.0)
    return (out,)


def elsewhere(scratch: Scratch, x: Tensor) -> tuple[Tensor, ...]:
    scratch.once()
    return (scratch.result(tuple(x.shape), x.dtype, x.device).copy_(2 * x),)


def fresh(scratch: Scratch, x: Tensor) -> tuple[Tensor, ...]:
    return (2 * x,)


@pytest.mark.parametrize("call", [unseen, elsewhere, fresh])
def test_what_was_not_seen_is_not_repeated(call: Callable[[Scratch, Tensor], tuple[Tensor, ...]]) -> None:
    memory = Memory()
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(memory.run((), (x,), lambda scratch, x=x: call(scratch, x))[0], 2 * x)


def test_operands_at_one_address_are_not_told_apart() -> None:
    op, x = Doubling(), torch.randn(4)
    assert torch.equal(op(x, x), 2 * x)
    assert torch.equal(op(torch.ones(4), x), torch.full((4,), 2.0))  # the kind was not remembered with x twice
    assert torch.equal(op(torch.ones(4), x), torch.full((4,), 2.0))
    assert op.calls == 2


def stand_in(monkeypatch: pytest.MonkeyPatch, module: Any) -> dict[str, Kernel]:
    """In the place of every kernel of a module."""
    kernels = {name: Kernel(name, list(x.arg_names)) for name, x in vars(module).items() if hasattr(x, "arg_names")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    return kernels


def stand_in_for_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    load = portable.load_source

    def loaded(name: str, text: str) -> Any:
        module = load(name, text)
        stand_in(monkeypatch, module)
        return module

    monkeypatch.setattr(portable, "load_source", loaded)


def repeatable(run: Callable[[Any, Scratch], tuple[Tensor, ...]], call: Any, names: tuple[str, ...]) -> list[str]:
    """The kernels that are launched again: the same, with arguments from the same places, wherever the operands lie."""
    found: list[recorded.Recorded | None] = []
    for _ in range(2):
        given = {name: x if x is None else moved(x) for name in names for x in (getattr(call, name),)}
        recorder = Recorder(tuple(given.values()))
        found.append(recorder.recorded(run(replace(call, **given), recorder)))
    assert found[0] is not None and found[0] == found[1]
    return [step.kernel.kernel.name if isinstance(step, recorded.Launch) else "torch" for step in found[0].steps]


def moved(x: Tensor) -> Tensor:
    """Memory of the same shape and strides."""
    other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    other.as_strided((other.untyped_storage().nbytes() // x.element_size(),), (1,)).fill_(1)
    return other


LINEAR = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")
LATENT = ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask", "sinks", "lengths", "block_table")


def latent_call(page: int) -> Attention:
    """A decode step of four requests in bf16, with weights, lengths and sinks."""
    sizes: dict[str, Any] = {"heads": 64, "rank": 512, "rope": 64, "tokens": 1, "cached": 256, "sinks": True}
    case = make_mla(batch=4, lengths=(9, 70, 256, 1), page=page, **sizes)
    operands = (x.bfloat16() if x is not None and x.is_floating_point() else x for x in case.positional)
    given: dict[str, Any] = dict(zip(LATENT, operands, strict=True)) | case.options | {"out_dtype": torch.bfloat16}
    return Attention(**given)


@needs_triton
def test_the_emitted_step_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_emitted(monkeypatch)
    one = replace(kda_call(1), initial_state=torch.zeros(1, 2, 128, 128))
    assert repeatable(lambda call, scratch: portable.run_step(call, None, scratch), one, LINEAR) == ["step"]
    in_place = repeatable(lambda call, scratch: portable.run_step(call, call.initial_state, scratch), one, LINEAR)
    assert in_place == ["step"]
    whole = repeatable(portable.run_chunks, kda_call(100), LINEAR)
    assert whole == ["gram", "inverse", "apply", "scan"]


@needs_triton
@pytest.mark.parametrize(
    ("heads", "gate_fn"),
    [(32, "sigmoid"), (96, "sigmoid"), (32, "softplus"), (1, "softplus"), (32, "head"), (2, "none"), (4, "channel")],
)
def test_the_kernels_of_hopper_gpus(monkeypatch: pytest.MonkeyPatch, heads: int, gate_fn: str) -> None:
    """With the delta rule, or without it with log gates of a shape."""
    from kdacompile.lowering.hopper import (
        combine,
        linear,
        prepare,
        prepare_scalar,
        prepare_unbounded,
        scan,
        scan_channel,
    )

    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)  # pyright: ignore[reportUnknownLambdaType]
    for module in (combine, linear, prepare, prepare_scalar, prepare_unbounded, scan, scan_channel):
        stand_in(monkeypatch, module)

    def run(call: Any, scratch: Scratch) -> tuple[Tensor, ...]:
        return hopper.launches(call, hopper.scheduled(call), scratch).run()

    call = kda_call(2048, heads, heads)
    if gate_fn in ("sigmoid", "softplus"):
        assert len(repeatable(run, replace(call, gate_fn=gate_fn), LINEAR)) >= 2
        return
    call = replace(log_call(call, gate_fn), beta=None, qk_l2norm_eps=0.0)
    assert "scan" in repeatable(run, call, LINEAR)
    assert "linear" in repeatable(run, replace(call, delta=False), LINEAR)


@needs_triton
@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("tuned", [False, True], ids=["portable", "hopper"])
def test_latent_attention(monkeypatch: pytest.MonkeyPatch, tuned: bool, page: int) -> None:
    """Between two products with the weights; a length for all requests is copied to each first."""
    from kdacompile.lowering.hopper import mla as hopper_kernels
    from kdacompile.lowering.triton import mla, mla_split

    for module in (mla, mla_split, hopper_kernels):
        stand_in(monkeypatch, module)
    call = latent_call(page)
    run = hopper_mla.HopperDecode().run if tuned else mla_run.TritonDecode().run
    multiprocessors = mla_run.device_of(call.q.device).multiprocessors
    steps = ["torch", "schedule", "attend", "combine", "torch"]
    assert repeatable(run, call, LATENT) == steps
    assert call.lengths is not None
    one = replace(call, lengths=call.lengths[:1].expand(4))
    assert repeatable(run, one, LATENT) == ["torch", *steps]
    rows = mla_run.table_rows(4, workers(1, multiprocessors), stay=tuned)
    shared = replace(call, schedule=torch.zeros(4 * rows, dtype=torch.int32))
    assert repeatable(run, shared, (*LATENT, "schedule")) == ["torch", "attend", "combine", "torch"]


@needs_triton
def test_the_op_validates_and_chooses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_emitted(monkeypatch)
    asked: list[object] = []

    def choose(call: Any) -> Any:
        asked.append(call.q.shape)
        return portable.TritonKernels()

    kernels = FusedKernels(choose, remember=True)
    call = kda_call(1)
    options: dict[str, Any] = {
        name: getattr(call, name)
        for name in ("scale", "delta", "gate", "gate_fn", "gate_scale", "sigmoid_beta", "qk_l2norm_eps", "out_dtype")
    }
    operands = [None if x is None else moved(x) for x in tensors(call)[:8]]
    operands[5] = torch.zeros(1, 2, 128, 128)
    for _ in range(3):
        kernels.inplace_step(*operands, **options)
    assert len(asked) == 1
    with pytest.raises(SizeError):
        kernels.inplace_step(*operands[:4], torch.zeros(1, 1, 3).bfloat16(), *operands[5:], **options)
    state = operands[5]
    assert state is not None
    inside = state.view(torch.bfloat16).flatten()[:256].view(1, 1, 2, 128)
    kernels.inplace_step(*operands[:2], inside, *operands[3:], **options)  # by torch: v is read before it is written
    assert len(asked) == 1


@needs_triton
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for a stand-in of the CUDA driver")
def test_the_driver_is_asked_for_the_same(tmp_path: Path) -> None:
    """Triton's whole launching path, the driver replaced: parameters, grids and attributes are those of the call."""
    import triton

    if not triton.__version__.startswith("3.6."):
        pytest.skip("Triton's launcher is gone past for 3.6 alone (kdacompile/compat/launches.py), and used for others")
    headers = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "include"
    library, source = tmp_path / "libcuda.so.1", Path(__file__).parent / "driver_stub.c"
    options = ["-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    paths = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    passes("launched", str(tmp_path), environment=paths)
