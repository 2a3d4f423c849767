"""The training suite: what a line says, who runs what, and what it says without a device; the figures need one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kdacompile.bench import charts, train
from kdacompile.errors import BenchError


def figures(device: float) -> train.Figures:
    return {
        "device_us": device, "backward_us": 0.7 * device, "floor_us": 200.0, "host_us": 50.0, "saved_bytes": 3 << 20,
        "workspace_bytes": 5 << 20, "errors": {"q": 3e-3, "g": 4e-3},
    }  # fmt: skip


def test_a_line_has_times_bytes_and_the_worst_error() -> None:
    text = train.line(figures(2000.0))
    assert "2000 us" in text and "backward    1400" in text and "workspace 5 MiB" in text and "4.0e-03 (dg)" in text
    assert train.line({"tokens_a_second": 120000.0, "peak_bytes": 2**30}) == "120,000 tokens/s, 1.0 GiB"
    assert train.line({"failure": "not ready"}) == "- not ready"


def test_fla_is_not_asked_for_what_it_refuses() -> None:
    assert train.contenders("gdn") == ("ours",)
    assert all("ours" in train.contenders(name) for name in (*train.ROWS, *train.MODELS))


def test_lengths_of_one_row_are_drawn_as_training() -> None:
    cases = [{"name": f"kda-t{n}", "length": n, "train": True, "results": {"ours": figures(n)}} for n in train.LENGTHS]
    assert [case["length"] for case in charts.panels(cases)["training"]] == list(train.LENGTHS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(BenchError, match="CUDA device"):
        train.main(None, Path("unused.json"), 1.0)
