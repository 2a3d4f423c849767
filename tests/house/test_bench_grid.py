"""The grid of the CUDA suite: its cells, their operands, the table and the heat map."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kdacompile import ops
from kdacompile.bench import cuda_grid, rows
from kdacompile.bench.cuda_grid import Cell, Timing
from kdacompile.bench.relay import Job, Outcome


def test_every_row_has_every_gate_it_can_have() -> None:
    made = cuda_grid.cells()
    assert len(made) == len(set(made)) == (2 * 3 + 2 * 4 + 3 + 4) * 5 * 4
    assert {cell.norm for cell in made if cell.row in ("kda", "gdn")} == {"inside", "outside"}
    assert not any(cell.gate == "none" for cell in made if cell.row in ("kda", "gla"))


@pytest.mark.parametrize("cell", cuda_grid.cells(heads=(2,), lengths=(3,)), ids=str)
def test_the_op_takes_the_operands(cell: Cell) -> None:
    given = cuda_grid.arguments(cell, "cpu")
    o, state = ops.linear_attention(**given)
    assert o.shape == (1, 3, 2, 128) and o.isfinite().all()
    assert state is not None and state.shape == (1, 2, 128, 128)
    norms = given["k"].float().norm(dim=-1)
    assert torch.allclose(norms, torch.ones(()), atol=2e-2) == (cell.norm == "outside")
    # bf16 q, k, v and o, a state in fp32, and what the gate and beta take.
    least = 4 * 3 * 2 * 128 * 2 + 2 * 128 * 128 * 4
    assert least <= rows.unavoidable_bytes(given) <= least + 3 * 2 * (128 * 4 + 2) + 2 * 129 * 4


def test_fla_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, function: str) -> object:
            return lambda *args, **options: asked.append(function)  # pyright: ignore[reportUnknownLambdaType]

    monkeypatch.setattr(importlib, "import_module", Module)
    for row, norm, gate in (
        ("kda", "outside", "softplus"), ("gdn", "inside", "log"), ("gdn", "inside", "none"), ("gla", "none", "log"),
        ("ssd", "none", "log"), ("ssd", "none", "none"), ("gdn", "inside", "sigmoid"),
    ):  # fmt: skip
        cell = Cell(row, norm, gate, 2, 3)
        call = rows.fla(cuda_grid.arguments(cell, "cpu"))
        if call is not None:
            call()
    assert asked == ["chunk_kda", "chunk_gated_delta_rule", "chunk_delta_rule", "chunk_gla", "chunk_simple_gla"]


def test_table_and_heat_map() -> None:
    timings = [
        Timing(Cell("kda", "inside", "log", 32, 8192), 430.0, 86.0, 1000.0, 860.0),
        Timing(Cell("kda", "inside", "log", 32, 2048), 110.0, 22.0),
        Timing(Cell("ssd", "none", "none", 4, 8192), 30.0, 10.0),
    ]
    header, _, kda, ssd = cuda_grid.markdown(timings).splitlines()
    assert "T = 2048 | T = 8192 | FLA / ours | cudnn / ours" in header
    assert kda == "| kda | inside | log | 32 | 110 us, 5.0x | 430 us, 5.0x | 2.33x | 2.00x |"
    assert ssd == "| ssd | none | none | 4 |  | 30 us, 3.0x |  |  |"
    drawn = ET.fromstring(cuda_grid.heat_map(timings))
    assert sum(child.tag.endswith("rect") for child in drawn) == len(timings)


class Relayed:
    """In place of the relay: each process has measured its cells when it ends, the last of all jobs broke at once."""

    def __init__(self, ready_seconds: float, timed_seconds: float) -> None:
        self.timings: list[Timing] = []

    def run(self, waves: Sequence[Sequence[Job]], done: Callable[[Job, Outcome], None]) -> None:
        (jobs,) = waves
        for job in jobs[::-1]:
            own = [cell for cell in cuda_grid.cells() if f"{cell.row} {cell.norm} {cell.gate}" == job.group]
            assert job.module == cuda_grid.__name__ and len(own) == len(cuda_grid.HEADS) * len(cuda_grid.LENGTHS)
            broken = job is jobs[-1]
            found = {} if broken else {str(n): asdict(Timing(cell, 2.0, 1.0)) for n, cell in enumerate(own)}
            done(job, Outcome("exit status 1" if broken else None, (), found))


def test_the_whole_grid_is_a_part_of_the_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_grid, "Relay", Relayed)
    assert cuda_grid.run(tmp_path / "bench.json", 1.0) == 1
    found = [Cell(**one["cell"]) for one in json.loads((tmp_path / "bench-grid.json").read_text())]
    assert found == cuda_grid.cells()[: len(found)] and 0 < len(found) < len(cuda_grid.cells())
    assert len((tmp_path / "bench-grid.md").read_text().splitlines()) == 2 + len(found) // len(cuda_grid.LENGTHS)
    assert (tmp_path / "bench-grid.svg").read_text().count("<rect") == len(found)
