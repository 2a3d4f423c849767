"""The MLA suite's table, and what it says without a device; the figures need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.bench import harness, mla
from kdacompile.errors import BenchError


def figures(device: float) -> dict[str, Any]:
    return {"device_us": device, "error": 2e-3, "bytes": 600_000_000, "operations": 18_000_000_000}


def test_the_table_has_rates_the_goal_and_failures() -> None:
    results = {
        "b128-s4096-h16": {"ours": figures(150.0), "portable": figures(160.0), "inductor": {"failure": "no room"}}
    }
    ours, portable, inductor = mla.table(results).splitlines()[2:]
    assert "150.0 us" in ours and "155 us met" in ours and "4.00" in ours and "120" in ours and "2.0e-03" in ours
    assert "met" not in portable and "160.0 us" in portable
    assert "no room" in inductor
    assert "155 us MISSED" in mla.table({"b128-s4096-h16": {"ours": figures(156.0)}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(BenchError, match="CUDA device"):
        harness.main("mla", None, Path("unused.json"), 1.0)
