"""The path from ``torch.compile`` to the launched kernels on a device of type "npu": tests/ascend/npu/cases.py.

In a process of its own: one has one out-of-tree backend, and other tests want to be where there is none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]


def test_on_a_device(environment: Path) -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no out-of-tree backends in Python")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "tests/ascend/npu/cases.py"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
