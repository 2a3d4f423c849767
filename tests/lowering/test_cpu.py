"""The C kernel of the recurrence: its numbers, its memory, and what happens where it cannot be compiled."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import run_linear_attention
from kdacompile.lowering.calls import Call
from kdacompile.lowering.cpu import compiler, recurrence, runs_recurrence
from tests.lowering.verify import Case, make_inputs, verify

ROWS = [(gate, delta) for gate in ("none", "head", "token", "channel") for delta in (True, False)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang", "g++", "clang++")), reason="no C compiler"
)


@pytest.fixture(autouse=True)
def _nan_where_nothing_is_written() -> Iterator[None]:
    """Deterministic algorithms fill what torch.empty returns."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def kernel(call: Call, scratch: object) -> tuple[Tensor, Tensor]:
    """The kernel in the form ``verify`` calls; the entry point may not fall back to the executor."""
    assert runs_recurrence(call.q)
    return run_linear_attention(call)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_every_row_and_length(gate: str, delta: bool, length: int, dtype: torch.dtype) -> None:
    case = Case(gate, delta, length, dtype=dtype, value_heads=4)
    verify(kernel, case, tolerance=TOLERANCE[dtype])
    verify(kernel, replace(case, beta=False, initial_state=False), tolerance=1e-4 if dtype is torch.float32 else 1e-12)


@needs_compiler
@pytest.mark.parametrize("lengths", [(5, 0, 64, 33), (0, 0, 7), (1, 1, 1), (0, 0)])
@pytest.mark.parametrize("gate", ["head", "token", "channel"])
def test_packed_sequences(gate: str, lengths: tuple[int, ...]) -> None:
    verify(kernel, Case(gate, True, lengths=lengths, strength="strong"), tolerance=2e-6)


@needs_compiler
@pytest.mark.parametrize("gate_form", ["log", "factor"])
@pytest.mark.parametrize("strength", ["strong", "reset"])
@pytest.mark.parametrize("gate", ["head", "token", "channel"])
def test_gates_of_any_strength(gate: str, strength: str, gate_form: str) -> None:
    verify(kernel, Case(gate, True, 150, gate_form=gate_form, strength=strength), tolerance=2e-6)


@needs_compiler
@pytest.mark.parametrize("value_width", [1, 5, 16, 31, 32, 33, 64, 100, 256])
@pytest.mark.parametrize("key_width", [4, 36, 512])
def test_widths(key_width: int, value_width: int) -> None:
    """Whole strips, part of one, and both."""
    case = Case("channel", True, 9, heads=1, value_heads=3, key_width=key_width, value_width=value_width)
    verify(kernel, case, tolerance=2e-6)


@needs_compiler
def test_threads_share_the_strips() -> None:
    case = Case("channel", True, 300, heads=4, value_heads=4, key_width=64, value_width=128)
    inputs = make_inputs(case)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        results.append(run_linear_attention(inputs))
    torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("key_width", [3, 516])
def test_other_widths_are_left_to_the_executor(key_width: int) -> None:
    case = Case("channel", True, 40, key_width=key_width)
    inputs = make_inputs(case)
    assert not runs_recurrence(inputs.q)
    o, _ = run_linear_attention(inputs)
    assert o.isfinite().all()


# ---- compiling


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has compiled nothing, with an empty cache folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_ready", set())
    caches = (compiler.library, recurrence._kernel_of)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)


@needs_compiler
@pytest.mark.usefixtures("_fresh")
def test_a_proof_compiles_nothing_and_uses_what_is_there(tmp_path: Path) -> None:
    q = torch.zeros(1, 1, 1, 8)
    with compiler.left_uncompiled():
        assert not runs_recurrence(q)
        assert not list(tmp_path.iterdir())
    assert runs_recurrence(q)
    with compiler.left_uncompiled():
        assert runs_recurrence(q)


@needs_compiler
@pytest.mark.usefixtures("_fresh")
def test_a_second_process_finds_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert runs_recurrence(q)
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in made) == [".sha256", ".so"]
    compiler.library.cache_clear()
    recurrence._kernel_of.cache_clear()
    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert runs_recurrence(q)


@pytest.mark.usefixtures("_fresh")
def test_without_a_compiler_the_executor_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_compiler(monkeypatch)
    case = Case("channel", True, 50)
    inputs = make_inputs(case)
    compiler.say_slow.cache_clear()
    assert not runs_recurrence(inputs.q) and not runs_recurrence(inputs.q.double())
    assert [record.message.count("install a C compiler") for record in caplog.records] == [1]  # once, for both dtypes
    o, _ = run_linear_attention(inputs)
    assert o.isfinite().all()
    with pytest.raises(compiler.CannotCompile, match="no C compiler"):
        compiler.library(("recurrence.c",), "float")


@needs_compiler
@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("reason", ["failed", "cannot be made or loaded"])
def test_a_compiler_that_fails_is_no_error(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\n" + ("echo no >&2; exit 1\n" if reason == "failed" else 'echo no > "${@: -1}"\n'))
    broken.write_text(broken.read_text().replace("/bin/sh", shutil.which("bash") or "/bin/sh"))
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert not runs_recurrence(torch.zeros(1, 1, 1, 8))
    with pytest.raises(compiler.CannotCompile, match=reason):
        compiler.library(("recurrence.c",), "float")


@needs_compiler
@pytest.mark.usefixtures("_fresh")
def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(file))
    assert not runs_recurrence(torch.zeros(1, 1, 1, 8))
