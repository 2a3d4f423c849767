"""Emitted Triton: its text (goldens), its numbers in Triton's interpreter, and what it declines.

The interpreter runs in a process of its own: whether a kernel is interpreted is decided when triton is imported.
"""

from __future__ import annotations

import inspect
import linecache
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from kdacompile.lowering.calls import Call
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.triton import TritonKernels
from kdacompile.lowering.triton.configs import Device, choose, step_columns
from kdacompile.lowering.triton.kernels import chunk_source
from kdacompile.lowering.triton.load import load_source
from kdacompile.lowering.triton.placement import place
from kdacompile.lowering.triton.run import inverse_precision
from kdacompile.lowering.triton.step import step_source
from kdacompile.lowering.triton.variant import Variant
from tests.lowering.differentiated import call_of
from tests.lowering.processes import INTERPRETED, passes
from tests.lowering.test_program import check_golden
from tests.ops.cases import make_case

H200 = Device((9, 0), 132, 232448)
CONSUMER = Device((8, 9), 128, 101376)
KIMI = Variant("channel", True, True, "softplus", rate=True, bias=True, sigmoid_beta=True, l2norm=True, state=True)

needs_triton = pytest.mark.skipif(util.find_spec("triton") is None, reason="triton is not installed")
no_interpreter = pytest.mark.skipif(
    Version(metadata.version("numpy")) >= Version("2.3"), reason="triton's interpreter fails with numpy 2.3 and later"
)


@pytest.mark.parametrize(
    "variant",
    [KIMI, Variant("token", True, True, packed=True), Variant("none", False, False)],
    ids=lambda variant: variant.name,
)
def test_chunk_kernels_golden(variant: Variant) -> None:
    check_golden(f"triton.{variant.name}.py.txt", chunk_source(variant))


@pytest.mark.parametrize("pool", [False, True])
def test_step_kernel_golden(pool: bool) -> None:
    variant = replace(KIMI, form="token", pool=pool)
    check_golden(f"triton.{variant.name}.py.txt", step_source(variant))


def test_placements_golden() -> None:
    check_golden("triton.placements.txt", "\n".join(str(place(linear_attention_program(*row))) for row in ROWS))


@pytest.mark.parametrize("row", ROWS)
def test_what_crosses_is_computed_once_and_read(row: tuple[str, bool]) -> None:
    placement = place(linear_attention_program(*row))
    made = [op.output for ops in (placement.gram, placement.inverse, placement.apply) for op in ops]
    read = {value for op in placement.scan for value in op.inputs}
    for buffer in placement.buffers:
        assert made.count(buffer.value) == 1 and (buffer.value in read) == (buffer.reader == "scan")
    assert all(op.output is None or op.output not in made or op.result.type.shape == ("C", 1) for op in placement.scan)


def test_every_variant_is_python() -> None:
    gates = [("none", "log"), *((gate, fn) for gate in ("head", "token", "channel") for fn in ("log", "sigmoid"))]
    for gate, fn in gates:
        for flag in (True, False):
            variant = Variant(gate, flag, flag, fn, flag, flag, flag, flag, flag, not flag)
            compile(chunk_source(variant), variant.name, "exec")
            compile(step_source(replace(variant, packed=False, form="token")), variant.name, "exec")


@pytest.mark.parametrize("device", [H200, CONSUMER])
@pytest.mark.parametrize("width", [16, 80, 128, 256])
@pytest.mark.parametrize("item", [2, 4])
def test_schedules_fit_the_device(device: Device, width: int, item: int) -> None:
    for lanes, length in ((1, 100000), (32, 8192), (4096, 1), (96, 8192)):
        config = choose(device, key_width=width, value_width=width, lanes=lanes, length=length, item=item)
        keys = max(16, 1 << (width - 1).bit_length())
        stage = item * config.chunk * (3 * keys + config.chunk + config.scan_columns)
        assert config.scan_stages == 1 or config.scan_stages * stage <= device.shared_memory
        blocks = (config.scan_columns, config.apply_columns, config.apply_keys, config.gram_keys)
        assert min(config.chunk, *blocks) >= 16
    assert choose(device, key_width=width, value_width=width, lanes=8, length=9, item=item).chunk == 16
    # H200, K = V = 128, 16-bit: the blocks of V that were fastest at 32 and at 96 heads
    for lanes, columns in ((32, 32), (96, 128), (128, 128)):
        marked = choose(H200, key_width=128, value_width=128, lanes=lanes, length=8192, item=2)
        assert (marked.scan_columns, marked.chunk, marked.gram_warps) == (columns, 64, 4)
    bounded = choose(H200, key_width=128, value_width=128, lanes=32, length=8192, item=2, bounded=True)
    assert (bounded.gram_keys, bounded.gram_warps) == (16, 2)
    limited = choose(H200, key_width=128, value_width=128, lanes=32, length=8192, item=2, limited=True)
    assert (limited.gram_keys, limited.gram_warps, limited.gram_stages) == (16, 4, 1)
    for width, chunk in ((16, 32), (31, 32), (32, 64)):  # few keys: see FEW_KEYS
        assert choose(H200, key_width=width, value_width=64, lanes=32, length=8192, item=2).chunk == chunk
    for unverified in (replace(H200, triton=(3, 7)), replace(H200, capability=(10, 0))):
        assert choose(unverified, key_width=128, value_width=128, lanes=32, length=8192, item=2).gram_warps == 2
    assert step_columns(device, keys=128, values=128, lanes=1) == 16


def _call(**changes: object) -> Call:
    q = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    call = Call(q, q, q, None, None, None, scale=1.0, delta=True, gate="none")
    return replace(call, **changes)  # type: ignore[arg-type]


def test_what_is_declined() -> None:
    kernels = TritonKernels()
    if util.find_spec("triton") is None:
        assert kernels.declines(_call()) == "triton is not installed"
        return
    assert kernels.declines(_call()) is None
    wide = torch.zeros(1, 8, 1, 300, dtype=torch.bfloat16)
    assert kernels.declines(_call(v=wide)) == "K or V above 256"
    double = torch.zeros(1, 8, 1, 16, dtype=torch.float64)
    assert kernels.declines(_call(q=double)) == "no torch.float64 kernels"
    assert kernels.declines(_call(gate_fn="new")) == "no kernels with the gate function 'new'"


def test_a_generated_source_is_a_module_that_no_file_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Triton reads of it, and what runs, is the text; a file of its name in the working directory is not."""
    monkeypatch.chdir(tmp_path)
    text = "def answer():\n    return 42\n"
    module = load_source("probe", text)
    (tmp_path / str(module.__file__)).write_text("def answer():\n    return 43\n")
    linecache.checkcache()
    assert module.answer() == 42 and inspect.getsource(module.answer) == text
    assert load_source("probe", text) is module


@needs_triton
@no_interpreter
@pytest.mark.parametrize("parts", ["rows steps pools shapes", "preparations bounds limits gates"])
def test_numbers_in_the_interpreter(parts: str) -> None:
    passes("interpreted", *parts.split(), environment=INTERPRETED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_inverse_has_fp16_only_where_no_step_can_enlarge(dtype: torch.dtype) -> None:
    sigmoid = call_of(make_case())
    absent, given = replace(sigmoid, beta=None), replace(sigmoid, sigmoid_beta=False)
    assert [inverse_precision(call, dtype) for call in (sigmoid, absent, given)] == ["fp16", "fp16", "bf16x3"]
    assert inverse_precision(replace(sigmoid, qk_l2norm_eps=0.0), dtype) == "bf16x3"
