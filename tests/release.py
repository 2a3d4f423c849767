"""``python -m tests.release``: build, check, and install the wheel into clean environments, as a user would.

For each pair of a Python and a torch that pip can install here: a new environment, the wheel, the README's example and
``kdacompile explain`` on it. Pythons are looked for as ``python3.X`` on the PATH; ``--pairs 3.12:2.14`` chooses pairs.
``--keep FOLDER`` keeps the environments, so that a second run installs nothing but the wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11", "2.12", "2.13", "2.14")
FUNCTION = "gated_delta_rule"


@dataclass(frozen=True)
class Outcome:
    """One pair: "ok", "skipped" or "FAILED", why, and what installing the wheel and running took."""

    pair: str
    status: str
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.pair:<12}{self.status:<9}{self.seconds:6.1f} s  {self.detail}"


def build(out: Path) -> Path:
    """The wheel and the source distribution, checked; returns the wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    made = sorted(map(str, out.iterdir()))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    return next(out.glob("*.whl"))


def example() -> str:
    """The README's example."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if f"def {FUNCTION}" in block)


def interpreter(version: str) -> str | None:
    """A ``python3.X`` that runs."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    asked = subprocess.run(
        [found, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def check(python: str, torch: str, wheel: Path, keep: Path) -> Outcome:
    """Install into an environment of its own and run what a reader of the README would."""
    pair = f"{python}:{torch}"
    base = interpreter(python)
    if base is None:
        return Outcome(pair, "skipped", f"no python{python} here")
    folder = keep / f"{python}-{torch}"
    bin_folder = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(bin_folder / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    if not folder.exists():
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
        installed = subprocess.run([*pip, f"torch=={torch}.*"], capture_output=True, text=True, check=False)
        if installed.returncode:
            shutil.rmtree(folder)
            return Outcome(pair, "skipped", _last_line(installed.stderr))
    with tempfile.TemporaryDirectory() as place:
        Path(place, "example.py").write_text(example())
        tensors = [f"--tensor={name}=1x64x4x32" for name in "qkv"] + [
            f"--tensor={name}=1x64x4" for name in ("g", "beta")
        ]
        start = time.monotonic()
        for command in (
            [*pip, "--force-reinstall", "--no-deps", str(wheel)],
            [*pip, str(wheel)],  # what it depends on
            [str(bin_folder / "kdacompile"), "doctor"],
            [str(bin_folder / "python"), "example.py"],
            [str(bin_folder / "kdacompile"), "explain", f"example.py:{FUNCTION}", *tensors, "--html", "report.html"],
        ):
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(place, "caches"))}
            run = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
            if run.returncode:
                return Outcome(pair, "FAILED", f"{Path(command[0]).name} {command[-1]}: {_last_line(run.stderr)}")
            if "Warning" in run.stderr:
                return Outcome(pair, "FAILED", f"{Path(command[0]).name} warns: {_last_line(run.stderr)}")
        if f"1 x {FUNCTION}" not in run.stdout:
            return Outcome(pair, "FAILED", f"explain found: {run.stdout.splitlines()[1:2]}")
        return Outcome(pair, "ok", f"{FUNCTION} matched", time.monotonic() - start)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", metavar="PYTHON:TORCH", help="such as 3.12:2.14; all unless told")
    parser.add_argument("--keep", type=Path, help="keep the environments in this folder")
    parser.add_argument("--wheel", type=Path, help="check this one, and build none")
    arguments = parser.parse_args(argv)
    pairs = arguments.pairs or [f"{python}:{torch}" for python in PYTHONS for torch in TORCHES]
    with tempfile.TemporaryDirectory() as temporary:
        wheel = arguments.wheel or build(Path(temporary, "dist"))
        keep = arguments.keep or Path(temporary)
        outcomes: list[Outcome] = []
        for pair in pairs:
            python, _, torch = pair.partition(":")
            outcomes.append(check(python, torch, wheel.resolve(), keep.resolve()))
            print(outcomes[-1], flush=True)
    return 1 if any(outcome.status == "FAILED" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
