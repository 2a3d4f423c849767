from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.bench import harness, measure, table
from kdacompile.bench.suites import SUITES, Case, Goal, Suite
from kdacompile.bench.worker import Inputs, contender_call
from kdacompile.errors import BenchError, MissingDependencyError

CASE = Case(
    "tiny", "tests.house.naive", "naive_delta_rule", "channel", 5, Goal(first_call=10, run=3), key_dim=8, value_dim=4
)
OURS = {
    "first_call_seconds": 2.0,
    "run_seconds": 0.001,
    "peak_tensor_bytes": 2**20,
    "first_call_resident_bytes": 2**21,
    "error_output": 1e-7,
    "error_state": 1e-7,
    "matches": ["kda"],
}
THEIRS = OURS | {"first_call_seconds": 50.0, "run_seconds": 0.002, "matches": []}
FAILED = {"failure": "exit status 1", "stderr": ["RuntimeError: no compiler"]}
PAIR = Suite("cpu", 1, (CASE,), contenders=("kda", "inductor"), packages=())


def test_ratios_are_marked_against_their_goals() -> None:
    text = table.render([CASE], PAIR, {"tiny": {"kda": OURS, "inductor": THEIRS}})
    assert "first call 25.0x better (goal 10x: reached)" in text
    assert "run 2.0x better (goal 3x: MISSED)" in text
    assert "tensor memory 1.0x better" in text
    assert "NOTHING MATCHED" not in text


def test_a_case_where_nothing_matched_says_so() -> None:
    text = table.render([CASE], PAIR, {"tiny": {"kda": OURS | {"matches": []}, "inductor": THEIRS}})
    assert "NOTHING MATCHED" in text


def test_a_failed_contender_is_shown_and_compares_to_nothing() -> None:
    found = {"kda": OURS, "inductor": FAILED}
    assert table.ratios(found) == {}
    text = table.render([CASE], PAIR, {"tiny": found})
    assert "cannot be compared" in text
    assert "no compiler" in text
    assert "FAILED" in table.one_line(FAILED)


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def call() -> torch.Tensor:
        first = torch.ones(1 << 16)  # 256 KiB
        second = first + 1  # and another at the same time
        del first
        return second + 1  # never three

    size = 4 << 16
    assert 2 * size <= measure.peak_tensor_bytes(call) < 2.1 * size  # scalars are tensors too


def test_the_op_and_the_function_agree_with_the_oracle() -> None:
    inputs = Inputs.random(CASE, "cpu")
    for contender in ("eager", "op"):
        for result, reference in zip(contender_call(contender, CASE, inputs)(), inputs.oracle(), strict=True):
            assert measure.relative_error(result, reference) < 1e-5


def test_a_suite_runs_each_contender_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_one(suite: str, case: Case, contender: str, timeout: float, label: str) -> dict[str, Any]:
        assert (suite, case, timeout) == ("tiny", CASE, 5.0)
        assert contender in label
        return dict(OURS if contender == "kda" else THEIRS)

    monkeypatch.setitem(SUITES, "tiny", PAIR)
    monkeypatch.setattr(harness, "_run_one", run_one)
    path = tmp_path / "bench.json"
    assert harness.main("tiny", None, path, 5.0) == 0
    record = json.loads(path.read_text())
    assert record["cases"][0]["ratios"]["first_call"] == 25.0
    assert record["versions"]["torch"]
    assert "25.0x" in capsys.readouterr().out


def test_a_worker_that_fails_is_reported_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "import sys; sys.exit('last words')"
    monkeypatch.setattr(harness, "_command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setitem(SUITES, "tiny", PAIR)
    path = tmp_path / "bench.json"
    assert harness.main("tiny", None, path, 60.0) == 1
    failure = json.loads(path.read_text())["cases"][0]["results"]["kda"]
    assert failure == {"failure": "exit status 1", "stderr": ["last words"]}


def test_a_worker_starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler caches are in an empty folder of its own, and gone afterwards."""
    program = (
        "import json, os, pathlib, sys; folder = os.environ['TORCHINDUCTOR_CACHE_DIR'];"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'folder': folder, 'there': os.path.exists(folder)}))"
    )
    monkeypatch.setattr(harness, "_command", lambda *arguments: [sys.executable, "-c", program, str(arguments[-1])])
    first, second = (harness._run_one("tiny", CASE, "kda", 60.0, "label") for _ in range(2))
    assert not first["there"]
    assert first["folder"] != second["folder"]
    assert not Path(first["folder"]).parent.exists()


def test_a_worker_past_its_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_TICK", 0.01)
    figures = harness._run_one("cpu", SUITES["cpu"].cases[0], "eager", 0.05, "label")
    assert "not finished" in figures["failure"]


def test_what_is_missing_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="there are cpu"):
        harness.main("gpu", None, tmp_path / "x", 1.0)
    with pytest.raises(BenchError, match="kda-chunk"):
        harness.main("cpu", ["nothing like it"], tmp_path / "x", 1.0)
    find_spec = util.find_spec
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(MissingDependencyError, match="transformers"):
        harness.main("cpu", None, tmp_path / "x", 1.0)
