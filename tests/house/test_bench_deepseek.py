"""The table of DeepSeek-V3's decode step, and what the benchmark says without a device; the figures need one."""

from __future__ import annotations

import argparse

import pytest
import torch

from kdacompile.bench import deepseek
from kdacompile.errors import BenchError

SIZES = argparse.Namespace(cache=8192, batch=16, layers=4, heads=128)


def figures(ms: float) -> deepseek.Figures:
    return {"ms": ms, "error": 4e-3, "compile_s": 12.0, "peak_gib": 0.5}


def test_the_table_compares_within_a_mode() -> None:
    results = {
        "inductor default": figures(90.0),
        "kda default": figures(3.0),
        "inductor reduce-overhead": figures(80.0),
        "kda reduce-overhead": figures(10.0),
    }
    text = deepseek.table(results, SIZES)
    assert "8192 cached, batch 16, 4 layers of 128 heads" in text
    assert "default: 30.0 times faster than Inductor alone, goal 10: met" in text
    assert "reduce-overhead: 8.0 times faster than Inductor alone, goal 10: MISSED" in text


def test_a_failure_is_told_and_nothing_is_compared_with_it() -> None:
    text = deepseek.table({"inductor default": {"failure": "out of memory"}, "kda default": figures(3.0)}, SIZES)
    assert "out of memory" in text and "times faster" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_refuses_without_a_device() -> None:
    with pytest.raises(BenchError, match="CUDA"):
        deepseek.main([])
