"""Checks that need a process of their own: how kernels run is decided when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1"}


def passes(module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Run ``python -m tests.lowering.MODULE ARGUMENTS``; an assertion shows what it said if it fails."""
    command = [sys.executable, "-m", f"tests.lowering.{module}", *arguments]
    around = os.environ | (environment or {})
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
