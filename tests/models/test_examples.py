"""Every example runs to the end and passes its own checks."""

from __future__ import annotations

import importlib

import pytest
import torch


@pytest.mark.parametrize(
    "name", ["quickstart", "own_model", "train_step", "kimi_linear", "qwen3_next", "deepseek_v3", "absorbed_mla"]
)
def test_example(name: str) -> None:
    if name in {"kimi_linear", "qwen3_next", "deepseek_v3"}:
        pytest.importorskip("transformers")
    torch.compiler.reset()
    assert importlib.import_module(f"examples.{name}").main(["--quick"]) == 0
