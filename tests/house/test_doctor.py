from __future__ import annotations

import builtins
import io
import sys
from importlib import metadata, util
from typing import Any

import pytest
import torch

from kdacompile import doctor
from kdacompile.__main__ import main
from kdacompile.commands.doctor import main as show


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let these packages look as if they were not installed."""
    find_spec, version = util.find_spec, metadata.version

    def no_spec(name: str, package: str | None = None) -> Any:
        return None if name in packages else find_spec(name, package)

    def no_version(name: str) -> str:
        if name in packages:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(util, "find_spec", no_spec)
    monkeypatch.setattr(metadata, "version", no_version)


def having(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    """Let a package look as if it were installed."""
    real = metadata.version
    spec = util.spec_from_loader(package, loader=None)
    find_spec = util.find_spec
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else real(name))
    monkeypatch.setattr(util, "find_spec", lambda name: spec if name == package.replace("-", "_") else find_spec(name))


def test_this_machine_can_run_the_backend() -> None:
    out = io.StringIO()
    assert show(out) == 0
    text = out.getvalue()
    assert torch.__version__ in text
    for name in ("backend", "CPU", "CUDA", "Ascend NPU", "transformers", "FLA", "Mamba", "caches"):
        assert name in text


def test_missing_packages_are_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    without(
        monkeypatch, "transformers", "torch_npu", "fla-core", "flash-linear-attention", "mamba-ssm", "causal-conv1d"
    )
    assert doctor.check_transformers().status == "missing"
    assert "kdacompile[models]" in doctor.check_transformers().hint
    assert doctor.check_npu().status == "missing"
    assert doctor.check_fla().status == "ok"
    assert doctor.check_mamba().status == "ok"


def test_fla_installed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, "fla-core", "0.6.0")
    finding = doctor.check_fla()
    assert finding.status == "note"
    assert "0.6.0" in finding.detail
    assert "kda.lift" in finding.hint


@pytest.mark.parametrize("package", ["mamba-ssm", "causal-conv1d"])
def test_mamba_packages_installed_are_noted(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    having(monkeypatch, package, "9.9.1")
    finding = doctor.check_mamba()
    assert finding.status == "note"
    assert f"{package} 9.9.1" in finding.detail
    assert "kda.lift" in finding.hint


def test_an_npu_package_without_cann_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, "torch_npu", "2.11.0")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert "no CANN" in doctor.check_npu().detail
    monkeypatch.setenv("ASCEND_HOME_PATH", "somewhere")
    assert doctor.check_npu().status == "note" and "no triton-ascend" in doctor.check_npu().detail
    monkeypatch.setattr(doctor, "version_of", {"torch_npu": "2.14.0", "triton-ascend": "3.2.0"}.get)
    assert doctor.check_npu().status == "ok"
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0+cpu", "3.0"])
def test_a_torch_out_of_range_is_broken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_torch().status == "broken"


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.13.0a0+gitabc"])
def test_a_torch_in_range_is_fine(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_torch().status == "ok"


def test_a_torch_that_does_not_import_is_broken_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def failing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise RuntimeError("Failed to load the backend extension: torch_npu")
        return real_import(name, *args, **kwargs)

    having(monkeypatch, "torch_npu", "2.11.0")
    monkeypatch.setattr(builtins, "__import__", failing)
    finding = doctor.check_torch()
    assert finding.status == "broken"
    assert "torch_npu" in finding.detail
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding.hint


def test_a_missing_entry_point_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_entry_point,))
    out = io.StringIO()
    assert show(out) == 1
    assert "pip install -e ." in out.getvalue()


def test_no_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.check_cpu().status == "missing"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    assert "gated_delta_rule" in capsys.readouterr().out
    assert main(["bench", "--suite", "nope"]) == 2
    assert "there are cpu" in capsys.readouterr().err
