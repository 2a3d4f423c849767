"""The environment of the Ascend tools: ``python -m tests.ascend.environment FOLDER PYTHON``.

A virtual environment of its own, made by the interpreter PYTHON, with triton-ascend (which installs itself as triton),
the compiler, and beside them the files of torch_npu, which nothing imports: it needs CANN. The wheels exist for some
platforms and Python versions only. Where they do not, the reason is written to FOLDER/missing.txt, and the tests are
skipped with it; any other failure is an error.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11", "numpy", "ml_dtypes")
TORCH_NPU = "torch_npu==2.14.0"
NO_WHEEL = "No matching distribution found"


def install(folder: Path, python: str) -> str:
    """Make the environment unless it is there already; returns why it cannot be made, or an empty string."""
    done, wanted = folder / "installed.txt", "\n".join((*TOOLS, TORCH_NPU))
    if done.exists() and done.read_text() == wanted:
        return ""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--only-binary", ":all:"]
    for arguments in (TOOLS, ("--no-deps", "--target", str(folder / "torch_npu"), TORCH_NPU)):
        run = subprocess.run([*pip, *arguments], stderr=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            sys.stderr.write(run.stderr)
            missing = [line for line in run.stderr.splitlines() if NO_WHEEL in line]
            if not missing:
                raise SystemExit(run.returncode)
            return f"{missing[0].removeprefix('ERROR: ')} ({sys.platform}, {python})"
    done.write_text(wanted)
    return ""


def main() -> None:
    folder, python = Path(sys.argv[1]), sys.argv[2]
    reason = install(folder, python)
    missing = folder / "missing.txt"
    missing.unlink(missing_ok=True)
    if reason:
        missing.write_text(reason)
        print(f"Ascend tests will be skipped: {reason}")


if __name__ == "__main__":
    main()
