"""The matrix command: what it accepts, and that it neither loses nor repeats measurements."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.matrix.__main__ import Pool, Worker, parse, units, wanted
from tests.matrix.cells import Cell, Row, judge
from tests.matrix.record import Record, how_shown, line, markdown

CELL = Cell("mamba2", 100, "fp32", "prefill", "eager")
GOOD = Row(CELL, matched=2, breaks_added=0, error=1e-7, ratio=None, seconds=1.0, checked=("exactly",) * 2)
BF16 = replace(GOOD, cell=replace(CELL, numbers="bf16"), error=1e-2, ratio=1.1)
UPCAST = replace(BF16, cell=replace(CELL, numbers="bf16-up"))


@pytest.mark.parametrize(
    ("row", "matches", "problem"),
    [
        (GOOD, 2, ""),
        (BF16, 2, ""),
        (replace(GOOD, error=2e-5), 2, "above"),
        (replace(GOOD, error=float("nan")), 2, "above"),
        (replace(GOOD, matched=1), 1, "matched 1 of 2"),
        (GOOD, 3, "1 matches of another"),
        (replace(GOOD, breaks_added=1), 2, "graph breaks"),
        (replace(BF16, ratio=1.6), 2, "allowed"),
        (replace(UPCAST, ratio=1.04), 2, ""),
        (UPCAST, 2, "allowed"),
    ],
)
def test_verdicts(row: Row, matches: int, problem: str) -> None:
    problems = list(judge(row, matches))
    assert len(problems) == bool(problem)
    assert all(problem in found for found in problems)


def test_a_record_gives_back_what_was_added_with_the_same_code(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows")
    assert record.rows() == {}
    record.add(replace(GOOD, error=1.0, problems=("wrong",)))
    record.add(GOOD)
    record.add(BF16)
    assert Record(record.path).rows() == {CELL: GOOD, BF16.cell: BF16}
    changed = Record(record.path)
    changed.code += "x"
    assert changed.rows() == {}


def test_matches_are_counted_by_how_they_were_shown() -> None:
    probed = replace(GOOD, checked=("exactly", "by probes (aten.erf)"))
    assert how_shown([GOOD, probed]) == "3 of 4 matches shown exactly; 1 by probes (aten.erf)"


def test_a_process_that_dies_costs_one_cell(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows")
    unit = [CELL, BF16.cell, UPCAST.cell]
    record.start(CELL)
    record.add(GOOD)
    record.start(BF16.cell)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    pool = Pool(record, jobs=1, timeout=60)
    assert pool.rest(Worker(unit, process, 0, time.monotonic())) == [UPCAST.cell]
    assert record.rows()[BF16.cell].problems == ("the process ended with status 3",)


def test_a_unit_is_a_model_at_a_length_and_the_longest_comes_first() -> None:
    cells = wanted(parse(["--models", "mamba2,bamba", "--lengths", "17,64", "--numbers", "fp32"]))
    assert [(unit[0].model, unit[0].length, len(unit)) for unit in units(cells)] == [
        ("mamba2", 64, 2),
        ("bamba", 64, 2),
        ("mamba2", 17, 2),
        ("bamba", 17, 2),
    ]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--models", "mamba3"])
    assert "unknown: mamba3" in capsys.readouterr().err


def test_tables() -> None:
    assert line(GOOD).split()[:5] == ["mamba2", "100", "fp32", "prefill", "2/2"]
    assert line(replace(GOOD, problems=("wrong",))).endswith("FAIL wrong")
    rows = [GOOD, replace(GOOD, cell=replace(CELL, length=17), error=3e-7), BF16, replace(UPCAST, problems=("wrong",))]
    assert markdown(rows).splitlines()[-1] == (
        "| mamba2 | simple_gla | prefill | 17 100 | 3 of 4 | 3.0e-07 | 1.10 | 1.10 |"
    )
