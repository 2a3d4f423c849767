"""Tensor parallel and sharded data parallel over several gloo processes: equal to one process, every layer matched.

The cases are in ``parallel.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def run(case: str, world: int, folder: Path) -> None:
    command = [sys.executable, "-m", "tests.models.parallel"]
    given = [str(world), str(folder / "store"), case, str(folder / "model")]
    started = [
        subprocess.Popen(
            [*command, str(rank), *given],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=500)
            assert process.returncode == 0 and "equal" in output, output[-3000:]
    finally:
        for process in started:  # one that waits for another that failed
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("case", "world"), [("tp", 2), ("fsdp", 2), ("fsdp_tp", 4)])
def test_latent_attention_in_the_style_of_torchtitan(case: str, world: int, tmp_path: Path) -> None:
    run(case, world, tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers shards a model only with accelerate installed",
)
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear", "qwen3_next"])
def test_transformers_own_plan(name: str, tmp_path: Path) -> None:
    run(name, 2, tmp_path)
