"""What this machine can run, and why not the rest: ``python -m kdacompile doctor``.

Nothing optional is imported to find out: torch_npu without CANN makes even ``import torch`` fail, so packages are
looked up with importlib and only torch itself is tried.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from packaging.version import Version

TORCH_RANGE = ("2.11", "2.14")  # first and last minor version tested; pyproject.toml requires the same
COMPILER_HINT = {
    "Darwin": "xcode-select --install",
    "Windows": "install Visual Studio's C++ build tools, and start from their command prompt",
}.get(platform.system(), "install g++ or clang++ (apt install g++), or set CXX")
UNQUOTED = "torch before 2.14 cannot link for a CPU from a folder with a space in its name"
UNQUOTED_HINT = "install torch into an environment whose path has none, or torch 2.14"
Status = Literal["ok", "note", "missing", "broken"]
_SIGNS: dict[Status, str] = {"ok": "[ok]     ", "note": "[note]   ", "missing": "[missing]", "broken": "[broken] "}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's findings. ``broken`` means the backend cannot work at all."""

    name: str
    status: Status
    detail: str
    hint: str = ""

    def __str__(self) -> str:
        advice = f"\n{'':<23}-> {self.hint}" if self.hint else ""
        return f"{_SIGNS[self.status]} {self.name:<13}{self.detail}{advice}"


def check_torch() -> Check:
    try:
        import torch
    except (ImportError, RuntimeError, OSError) as error:
        hint = "pip install torch"
        if util.find_spec("torch_npu"):
            hint = "torch_npu loads itself with torch and needs CANN; set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to do without"
        return Check("torch", "broken", f"import torch fails: {error}", hint)
    first, last = TORCH_RANGE
    found = Version(torch.__version__)
    if not Version(first) <= Version(f"{found.major}.{found.minor}") <= Version(last):
        return Check("torch", "broken", f"{found} is outside the tested range", f"install torch {first} to {last}")
    return Check("torch", "ok", f"{found}, Python {platform.python_version()}")


def check_entry_point() -> Check:
    names = {point.name for point in metadata.entry_points(group="torch_dynamo_backends")}
    if "kda" not in names:
        hint = "pip install -e . in the repository, or install the wheel"
        return Check("backend", "broken", 'torch does not know backend="kda"', hint)
    return Check("backend", "ok", 'registered: torch.compile(model, backend="kda") needs no import')


def is_unquoted() -> bool:
    """Whether Inductor's linker is told torch's folder without quotes that it needs. torch is imported already."""
    torch = sys.modules.get("torch")
    if torch is None or Version(torch.__version__) >= Version("2.14"):
        return False
    return platform.system() != "Windows" and any(map(str.isspace, str(torch.__file__)))


def check_cpu() -> Check:
    names = (os.environ.get("CXX"), "g++", "clang++", *(["cl"] if platform.system() == "Windows" else []))
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if not compiler:
        slow = "no C++ compiler: ops run through PyTorch operators, the rest of a model eagerly; right, but slower"
        return Check("CPU", "missing", slow, COMPILER_HINT)
    if is_unquoted():
        return Check("CPU", "missing", f"{UNQUOTED}: ops run, the rest of a model eagerly", UNQUOTED_HINT)
    return Check("CPU", "ok", f"{os.cpu_count()} cores; {compiler} for Inductor's kernels and our own")


def check_cuda() -> Check:
    torch = sys.modules.get("torch")  # check_torch has tried to import it
    if torch is None:
        return Check("CUDA", "missing", "unknown without torch")
    if not torch.cuda.is_available():
        why = "no CUDA device visible" if torch.version.cuda else "torch is built without CUDA"
        return Check("CUDA", "missing", why)
    devices = [
        f"{torch.cuda.get_device_name(i)} (sm_{major}{minor})"
        for i in range(torch.cuda.device_count())
        for major, minor in [torch.cuda.get_device_capability(i)]
    ]
    triton = version_of("triton")
    if triton is None:
        return Check("CUDA", "missing", ", ".join(devices) + ", but no triton", "pip install triton")
    return Check("CUDA", "ok", ", ".join(devices) + f", triton {triton}")


def check_npu() -> Check:
    if util.find_spec("torch_npu") is None:
        return Check(
            "Ascend NPU", "missing", "torch_npu is not installed", "pip install 'kdacompile[npu]' (needs CANN)"
        )
    if not os.environ.get("ASCEND_HOME_PATH"):
        hint = "source CANN's set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without it"
        return Check("Ascend NPU", "missing", f"torch_npu {version_of('torch_npu')}, but no CANN", hint)
    found = f"torch_npu {version_of('torch_npu')}, CANN at {os.environ['ASCEND_HOME_PATH']}"
    triton = version_of("triton-ascend")
    if triton is None:
        missing = f"{found}, but no triton-ascend: only bf16 gated delta rule operators, the rest runs op by op"
        return Check("Ascend NPU", "note", missing, "pip install 'kdacompile[npu]'")
    return Check("Ascend NPU", "ok", f"{found}, triton-ascend {triton}")


def check_transformers() -> Check:
    version = version_of("transformers")
    if version is None:
        hint = "pip install 'kdacompile[models]'"
        return Check("transformers", "missing", "not installed; only examples, tests and bench use it", hint)
    return Check("transformers", "ok", version)


def check_fla() -> Check:
    version = version_of("fla-core") or version_of("flash-linear-attention")
    if version is None:
        return Check("FLA", "ok", "not installed; transformers uses its PyTorch functions, which kdacompile matches")
    detail = f"flash-linear-attention {version}: transformers binds its functions, which torch.compile may not enter"
    return Check("FLA", "note", detail, "they are compared with kdacompile's ops once and then replaced (kda.lift)")


def check_mamba() -> Check:
    versions = {name: version_of(name) for name in ("mamba-ssm", "causal-conv1d")}
    found = " and ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not found:
        return Check("Mamba", "ok", "neither mamba-ssm nor causal-conv1d is installed; nothing of theirs cuts a graph")
    detail = f"{found}: transformers binds their functions, and torch.compile cuts the graph at some"
    return Check(
        "Mamba", "note", detail, "those are compared with kdacompile's replacements once and then replaced (kda.lift)"
    )


def check_caches() -> Check:
    user = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(user) if user else Path(tempfile.gettempdir())
    while not folder.exists():
        folder = folder.parent
    place = user or "Inductor's default under the temporary folder"
    try:  # permissions alone do not tell: root may write everywhere but in /proc, and a file is no folder
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        problem = f"{place}: nothing can be written there ({error.strerror})"
        return Check("caches", "broken", problem, "set TORCHINDUCTOR_CACHE_DIR to a writable folder")
    free = shutil.disk_usage(folder).free / 2**30
    return Check("caches", "ok" if free > 1 else "note", f"{place}, {free:.0f} GiB free")


CHECKS: tuple[Callable[[], Check], ...] = (
    check_torch,
    check_entry_point,
    check_cpu,
    check_cuda,
    check_npu,
    check_transformers,
    check_fla,
    check_mamba,
    check_caches,
)


def device_problem(name: str) -> str | None:
    """Why nothing can run on a device of torch's, such as ``cuda``; None where it can."""
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch built without it says so with an assertion
        return f"this machine cannot run on device {name!r} ({str(error).splitlines()[0]}); see `kdacompile doctor`"
    return None


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
