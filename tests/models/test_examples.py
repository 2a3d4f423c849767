"""Every example runs to the end and passes its own checks; ``context_parallel`` does so in ``tests/distributed``."""

from __future__ import annotations

import importlib

import pytest
import torch

ALONE = ["quickstart", "own_model", "train_step", "absorbed_mla", "tensor_parallel"]
OF_TRANSFORMERS = ["kimi_linear", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("name", [*ALONE, *OF_TRANSFORMERS])
def test_example(name: str) -> None:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.compiler.reset()
    assert importlib.import_module(f"examples.{name}").main(["--quick"]) == 0
