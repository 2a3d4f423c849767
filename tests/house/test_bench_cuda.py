"""The CUDA suite's table and plot, and what it says without a device; the figures need one."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.bench import cuda
from kdacompile.errors import BenchError

CASE = cuda.Case("kda-t8192", "kda", 1, 8192, goal=330)


def figures(device: float) -> dict[str, Any]:
    return {
        "device_us": device, "floor_us": 80.0, "eager_us": device + 5, "first_call_seconds": 3.0,
        "peak_bytes": 2**20, "error_output": 4e-3, "error_state": 3e-3,
    }  # fmt: skip


RESULTS = {CASE.name: {"ours": figures(400.0), "portable": figures(800.0), "fla": {"failure": "no module named fla"}}}


def test_the_table_has_ratios_the_goal_and_failures() -> None:
    text = cuda.table([CASE], RESULTS)
    ours, portable, fla, floor = text.splitlines()[2:]
    assert "400.0 us" in ours and "20%" in ours and "1.00x" in ours
    assert "2.00x" in portable and "10%" in portable
    assert "no module named fla" in fla
    assert "80 us" in floor and "goal 330 us" in floor


def test_the_plot_is_svg_with_a_bar_for_each_measured_contender() -> None:
    drawing = ET.fromstring(cuda.plot([CASE], RESULTS))
    bars = [element for element in drawing if element.tag.endswith("rect")]
    assert [float(bar.attrib["width"]) for bar in bars] == [240.0, 480.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(BenchError, match="CUDA device"):
        cuda.main(None, Path("unused.json"), 1.0)
