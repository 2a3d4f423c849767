"""Tensor parallel and sharded data parallel over several gloo processes: equal to one process, every layer matched.

The cases are in ``parallel.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import together

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)


def run(case: str, world: int, folder: Path) -> None:
    given = [str(world), str(folder / "store"), case, str(folder / "model")]
    printed = together("tests.models.parallel", lambda rank: [str(rank), *given], world)
    assert all("equal" in output for output in printed)


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
