"""MLA decode kernels without a GPU: what they take, how calls are cut, numbers in the interpreter, offline compilation.

The interpreter runs in a process of its own: whether a kernel is interpreted is decided when triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata, util
from typing import Any

import pytest
import torch
from packaging.version import Version

from kdacompile.lowering import cuda
from kdacompile.lowering.hopper import HopperDecode, run
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.split import Split, split, workers
from kdacompile.lowering.triton import TritonDecode
from kdacompile.lowering.triton.mla_run import Tiles, tiles
from tests.lowering.processes import INTERPRETED, passes

H200, A100, CONSUMER = 232448, 166912, 101376  # bytes of shared memory a block may have

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
no_interpreter = pytest.mark.skipif(
    Version(metadata.version("numpy")) >= Version("2.3"), reason="triton's interpreter fails with numpy 2.3 and later"
)


def decode_call(heads: int = 64, page: int = 64, **changes: Any) -> Attention:
    """One token over a paged cache of 512 + 64 columns, absorbed by the caller, bf16."""
    q = torch.zeros(2, 1, heads, 576, dtype=torch.bfloat16)
    cache = torch.zeros(6, page, 576, dtype=torch.bfloat16)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    call = Attention(
        q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], None, None, None, None, lengths, table,
        scale=0.1, causal=True, form="auto", out_dtype=torch.bfloat16,
    )  # fmt: skip
    return replace(call, **changes)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> HopperDecode:
    """The kernels, on a machine that answers for a Hopper GPU and its Triton."""
    monkeypatch.setattr(run, "machine", lambda x: None)  # pyright: ignore[reportUnknownLambdaType]
    return HopperDecode()


def test_hopper_takes_its_shapes(hopper: HopperDecode) -> None:
    assert hopper.declines(decode_call()) is None
    assert hopper.declines(decode_call(heads=17, page=192)) is None
    assert hopper.declines(decode_call(heads=1, mask=torch.zeros(1, 1, 1, 192).bool())) is None
    contiguous = decode_call(block_table=None)
    assert hopper.declines(replace(contiguous, latent=torch.zeros(2, 99, 512).bfloat16())) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent": torch.zeros(6, 64, 256).bfloat16()}, "R = 512"),
        ({"k_rope": None, "q_rope": None}, "D = 64"),
        ({"mask": torch.zeros(1, 1, 1, 192)}, "mask"),
        ({"mask": torch.zeros(1, 64, 1, 192).bool()}, "mask"),
        ({"scale": -1.0}, "scale"),
        ({"heads": 16, "q": torch.zeros(1, 1, 16, 512).bfloat16()}, "16 rows"),
        ({"page": 96}, "pages of 96"),
        ({"latent": torch.zeros(6, 64, 515).bfloat16()[..., 3:]}, "16 bytes"),
        ({"latent": torch.zeros(6, 512, 64).bfloat16().mT}, "columns"),
        ({"q_rope": torch.zeros(2, 1, 64, 64)}, "operands in"),
        (
            {"w_uk": torch.zeros(64, 512, 512).bfloat16(), "w_uv": torch.zeros(64, 512, 512).bfloat16(),
             "form": "expanded"},
            "expanded",
        ),
    ],
)  # fmt: skip
def test_hopper_declines_with_a_reason(hopper: HopperDecode, changes: dict[str, Any], reason: str) -> None:
    assert reason in (hopper.declines(decode_call(**changes)) or "")


def test_asked_before_the_portable_kernel() -> None:
    names = [kernels.name for kernels in cuda.ATTENTION]
    assert names.index("hopper") < names.index("triton")
    assert HopperDecode().declines(decode_call()) == "not a Hopper GPU"


@needs_triton
def test_portable_takes_the_rest() -> None:
    kernels = TritonDecode()
    for call in (
        decode_call(16),
        decode_call(page=7),
        decode_call(scale=-1.0),
        decode_call(mask=torch.zeros(1, 1, 1, 192)),
    ):
        assert kernels.declines(call) is None
    assert "operands in" in (kernels.declines(decode_call(q=torch.zeros(2, 1, 64, 512).double())) or "")
    wide = torch.zeros(6, 64, 2048).bfloat16()
    assert "R above" in (kernels.declines(decode_call(latent=wide)) or "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1, 8192, 264), Split(128, 128)),  # a block each
        ((1, 2, 32768, 132), Split(64, 64)),
        ((128, 2, 4096, 132), Split(128, 1)),
        ((32, 1, 4096, 132), Split(128, 4)),
        ((64, 64, 4096, 132), Split(64, 1)),
        ((3, 1, 1, 132), Split(3, 1)),
    ],
)
def test_equal_requests_are_cut_by_the_sizes_alone(arguments: tuple[int, ...], expected: Split) -> None:
    assert split(*arguments, lengths=False) == expected


def test_lengths_of_their_own_are_cut_on_the_device() -> None:
    assert split(128, 2, 4096, 132, lengths=True) == Split(66 + 128, 0)
    assert split(1, 1, 8192, 264, lengths=True) == Split(128, 128)
    assert split(600, 2, 4096, 132, lengths=True) == Split(600, 1)  # more than enough requests
    assert (workers(2, 132), workers(500, 132)) == (66, 1)


def test_tiles_fit_the_shared_memory() -> None:
    assert tiles(16, 576, 2, H200) == Tiles(16, 64, 4, 2, 2)
    assert tiles(16, 576, 2, A100) == Tiles(16, 32, 4, 2, 2)
    assert tiles(1, 576, 2, CONSUMER) == Tiles(16, 64, 4, 2, 1)
    assert tiles(128, 576, 2, H200) == Tiles(64, 64, 8, 2, 1)
    assert tiles(128, 576, 2, H200, tall=False) == Tiles(32, 64, 8, 2, 1)
    assert tiles(128, 576, 2, H200, masked=True) == Tiles(64, 32, 8, 2, 1)
    assert tiles(128, 576, 2, CONSUMER) == Tiles(32, 32, 8, 2, 1)
    assert tiles(128, 576, 4, H200) == Tiles(16, 32, 8, 2, 1)
    assert tiles(128, 576, 4, CONSUMER) is None


@needs_triton
@pytest.mark.parametrize(
    ("page", "scheduled", "partial", "dtype", "masked"),
    [
        (64, True, True, "bf16", False),
        (0, False, True, "bf16", True),
        (128, False, False, "bf16", False),
        (64, True, True, "fp16", True),
    ],
)
def test_compiles_for_hopper(page: int, scheduled: bool, partial: bool, dtype: str, masked: bool) -> None:
    """Registers for three warpgroups, nothing spilled, products that overlap, and the shared memory of one block."""
    from tests.lowering import hopper_offline as offline
    from tests.lowering import sass

    compiled = offline.compile_mla(page, scheduled, partial, dtype, masked)
    assert compiled.metadata.shared <= H200
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert offline.spilled_bytes(compiled) == 0
    assert sass.listing(compiled).count("WARPGROUP.DEPBAR") <= 4  # of 44 products: else ptxas waits for each


@needs_triton
def test_portable_kernels_compile() -> None:
    """For Ampere and Hopper: pages of any size, a mask, no positions; two programs fit a multiprocessor of an H200."""
    from tests.lowering import triton_offline as offline

    plain = offline.compile_attend(90)
    assert 2 * plain.metadata.shared <= H200 and "cp.async" in plain.asm["ptx"]
    masked = offline.compile_attend(80, BN=32, PAGE=100, MASK="bool", CAUSAL=True, D=0, DP=16)
    assert 2 * masked.metadata.shared <= A100
    assert "griddepcontrol" in plain.asm["ptx"] and "griddepcontrol" not in masked.asm["ptx"]
    compiled = (
        offline.compile_schedule(stay=False),
        offline.compile_schedule(stay=True),
        offline.compile_combine(512, 4, True),
        offline.compile_combine(64, 128, False),
    )
    assert all("griddepcontrol" in kernel.asm["ptx"] for kernel in compiled)


@needs_triton
@no_interpreter
def test_numbers_in_the_interpreter() -> None:
    passes("interpreted_mla", environment=INTERPRETED)


@needs_triton
@no_interpreter
def test_hopper_numbers_without_a_gpu() -> None:
    """The Hopper kernel with its warpgroups as threads, real barriers and late copies: numbers, races, deadlocks."""
    passes("mla_emulated", environment=INTERPRETED)
