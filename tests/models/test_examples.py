"""Every example runs to the end and passes its own checks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ALONE = ["quickstart", "own_model", "train_step", "absorbed_mla", "tensor_parallel"]
OF_TRANSFORMERS = ["kimi_linear", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("name", [*ALONE, *OF_TRANSFORMERS])
def test_example(name: str) -> None:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.compiler.reset()
    assert importlib.import_module(f"examples.{name}").main(["--quick"]) == 0


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_context_parallel() -> None:
    """In processes of its own: two ranks over gloo, or the GPUs that are here."""
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / "context_parallel.py"), "--quick"]
    assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode == 0
