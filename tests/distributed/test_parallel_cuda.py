"""Context, tensor and data parallelism on two GPUs, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import in_processes

pytestmark = pytest.mark.skipif(
    not dist.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


@pytest.mark.parametrize(
    "check",
    ["kda", "gdn", "gla", "narrow", "latents", "convolution", "dtensors", "compiled_models", "layers"],
)
def test_two_gpus(check: str, tmp_path: Path) -> None:
    in_processes([f"tests.distributed.gpu:{check}"], 2, tmp_path)
