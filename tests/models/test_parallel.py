"""Tensor parallel and sharded data parallel over several gloo processes: equal to one process, every layer matched."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.processes import in_processes, torchrun

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

RECIPES = ("kimi_linear", "qwen3_next", "deepseek_v3")


def checks(*names: str) -> list[str]:
    return [f"tests.models.parallel:{name}" for name in names]


def test_two_ranks(tmp_path: Path) -> None:
    """Latent attention in the style of torchtitan."""
    in_processes(checks("tensor_parallel", "recurrences", "sequence_parallel", "sharded_data_parallel"), 2, tmp_path)


def test_four_ranks(tmp_path: Path) -> None:
    """What two ranks do not have: a mesh of two dimensions."""
    in_processes(checks("both", "checkpoints"), 4, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_models_of_transformers(tmp_path: Path) -> None:
    """By their own plan of tensor parallelism, and under context parallelism."""
    in_processes(checks("deepseek_v3", "kimi_linear", "qwen3_next", "context_parallel_model"), 2, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        (2, ("kimi_linear", "--tp", "2")),
        (2, ("qwen3_next", "--tp", "2", "--checkpoint")),
        (4, ("deepseek_v3", "--tp", "2", "--checkpoint")),
    ],
    ids=["tensor parallel", "with checkpoints", "both"],
)
def test_recipes(world: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Losses, gradients and matches are compared by ``examples/recipes.py`` itself."""
    printed = torchrun(world, tmp_path, "examples/recipes.py", "--quick", *arguments)
    assert all(f"{name}: loss" in printed for name in arguments if name in RECIPES), printed
