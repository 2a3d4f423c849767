"""Machines that lack something: no compiler, no triton, another torch. Clear, slower, and right."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from examples import quickstart
from kdacompile import doctor
from kdacompile.compat import accepted
from kdacompile.lowering.cpu import compiler

BARE = """
import sys
for name in ("triton", "numpy"):
    sys.modules[name] = None  # as if it were not installed
import torch

def gla(q, k, v, g):
    state, out = 0, []
    for t in range(q.shape[1]):
        state = state * g[:, t].sigmoid()[..., None] + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1).tanh()

torch.manual_seed(0)
q, k, v, g = (torch.randn(1, 70, 2, 4).requires_grad_() for _ in range(4))
compiled = torch.compile(gla, backend="kda", options={"kda.expect": {"gla": 1}})
expected, found = gla(q, k, v, g), compiled(q, k, v, g)
torch.testing.assert_close(found, expected)
grads = [torch.autograd.grad(o.square().sum(), (q, k, v, g)) for o in (expected, found)]
torch.testing.assert_close(*grads)
compiled(q, k, v, g)
"""


WINDOWS = """
import filelock, os, platform, signal, sys, torch  # filelock for torch, which has another one there
platform.system = lambda: "Windows"
for module, names in ((os, ("getuid", "getloadavg", "fork", "sched_getaffinity", "killpg")), (signal, ("SIGALRM",))):
    for name in names:
        delattr(module, name)
for name in ("fcntl", "resource", "pwd"):
    sys.modules[name] = None
"""


@pytest.mark.parametrize(
    ("system", "reason", "remedy"),
    [("", "no C compiler", "name it in CC"), (WINDOWS, "the kernels are not made on Windows", "Linux subsystem")],
    ids=["bare", "windows"],
)
def test_without_compilers_and_triton_the_model_runs_and_says_so_once(
    tmp_path: Path, system: str, reason: str, remedy: str
) -> None:
    """macOS and Windows as they come: PATH leads to no compiler; and without what Windows' Python lacks."""
    hidden = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environment = {**hidden, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    command = [sys.executable, "-c", system + BARE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("no C++ compiler was found") == 1
    assert run.stderr.count(f"right but slower ({reason})") == 1 and remedy in run.stderr
    assert "Traceback" not in run.stderr


def test_torch_in_a_folder_with_a_space_in_its_name(tmp_path: Path) -> None:
    """Before 2.14 Inductor names that folder to the linker without quotes, and fails under every backend."""
    packages = tmp_path / "site packages"
    packages.symlink_to(Path(torch.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": str(packages), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    run = subprocess.run(
        [sys.executable, "-c", BARE], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    unquoted = Version(torch.__version__) < Version("2.14")
    assert run.stderr.count(f"{doctor.UNQUOTED}, so what kdacompile does not rewrite runs eagerly") == unquoted


def test_windows_takes_no_compiler_for_the_c_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, cl, reads no GNU C; one that is found there would make what Windows' torch cannot call."""
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(compiler.CannotCompile, match="not made on Windows"):
        compiler.compiler_path()


def test_cl_in_the_place_of_a_c_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cl = tmp_path / "cl.exe"
    cl.write_text("#!/bin/sh\necho 'cl : unknown option -std=gnu11' >&2\nexit 2\n")
    cl.chmod(0o700)
    monkeypatch.setenv("CC", str(cl))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    with pytest.raises(compiler.CannotCompile, match=r"cl\.exe failed: cl : unknown option"):
        compiler.built(b"int one(void) { return 1; }", (), "one")


def test_importing_the_package_says_nothing(tmp_path: Path) -> None:
    """torch warns of a numpy that is missing as it is imported: that is all that may be said."""
    code = "import warnings; warnings.simplefilter('error'); import kdacompile, kdacompile.backend, kdacompile.ops"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0"])
def test_another_torch_is_said_when_the_backend_is_loaded(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("torch.__version__", version)
    with pytest.warns(RuntimeWarning, match=rf"{version} is outside the tested range; install torch 2.11 to 2.14"):
        importlib.reload(accepted)


@pytest.mark.parametrize(
    ("system", "remedy"), [("Darwin", "xcode-select"), ("Windows", "build tools"), ("Linux", "g++")]
)
def test_the_doctor_has_the_remedy_of_each_system(monkeypatch: pytest.MonkeyPatch, system: str, remedy: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    try:
        assert remedy in importlib.reload(doctor).COMPILER_HINT
    finally:
        monkeypatch.undo()
        importlib.reload(doctor)


def test_the_doctor_tries_to_write_where_the_caches_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "later" / "caches"))
    assert doctor.check_caches().status != "broken"
    (tmp_path / "later").write_text("a file")
    found = doctor.check_caches()
    assert found.status == "broken" and "nothing can be written there" in found.detail
    assert "set TORCHINDUCTOR_CACHE_DIR" in found.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_example_says_that_a_device_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(["--quick", "--device", "cuda"])
    assert "cannot run on device 'cuda'" in capsys.readouterr().err
