from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.bench import harness, measure, rows, table
from kdacompile.bench.suites import SUITES, Case, Goal, Suite
from kdacompile.bench.worker import arguments, contender_call
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


def worker(arguments: tuple[Any, ...], figures: dict[str, Any], each_round: str = "pass") -> list[str]:
    """A worker's command line, in the place of the harness's own: it answers at once."""
    program = f"""
import json, os, pathlib, sys
print('ready', flush=True)
for _ in sys.stdin:
    {each_round}
    print('ready', flush=True)
pathlib.Path(sys.argv[1]).write_text(json.dumps({figures!r}))
"""
    return [sys.executable, "-c", program, str(arguments[-1])]


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
    given = arguments(CASE, "cpu")
    for contender in ("eager", "op"):
        for result, reference in zip(contender_call(contender, CASE, given)(), rows.oracle(given), strict=True):
            assert result is not None and measure.relative_error(result, reference) < 1e-5


def test_a_suite_runs_each_contender_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"kda": OURS, "inductor": THEIRS}
    monkeypatch.setattr(harness, "_command", lambda *arguments: worker(arguments, figures[arguments[2]]))
    monkeypatch.setitem(SUITES, "tiny", PAIR)
    path = tmp_path / "bench.json"
    assert harness.main("tiny", None, path, 60.0) == 0
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


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def command(*arguments: Any) -> list[str]:
        return worker(arguments, OURS, f"open({str(log)!r}, 'a').write('{arguments[2]} ')")

    monkeypatch.setattr(harness, "_command", command)
    monkeypatch.setitem(SUITES, "tiny", PAIR)
    assert harness.main("tiny", None, tmp_path / "bench.json", 60.0) == 0
    assert log.read_text().split() == ["kda", "inductor"] * harness.ROUNDS


def test_a_worker_starts_cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its compiler caches are in an empty folder of its own, and gone afterwards."""
    log = tmp_path / "log"
    note = "folder = os.environ['TORCHINDUCTOR_CACHE_DIR']; assert not os.path.exists(folder)"
    each_round = f"{note}; open({str(log)!r}, 'a').write(folder + ' ')"
    monkeypatch.setattr(harness, "_command", lambda *arguments: worker(arguments, OURS, each_round))
    monkeypatch.setattr(harness, "ROUNDS", 1)
    assert harness._run_case("tiny", PAIR, CASE, 60.0, "")["kda"] == OURS
    first, second = log.read_text().split()
    assert first != second
    assert not Path(first).parent.exists()


def test_a_worker_past_its_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    figures = harness._run_case("tiny", PAIR, CASE, 0.05, "")["kda"]
    assert "not finished" in figures["failure"]


def test_what_was_measured_is_kept_when_somebody_stops_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = (CASE, replace(CASE, name="second"))
    run_case = harness._run_case

    def stopped(suite_name: str, suite: Suite, case: Case, timeout: float, place: str) -> dict[str, Any]:
        if case.name == "second":
            raise KeyboardInterrupt
        return run_case(suite_name, suite, case, timeout, place)

    monkeypatch.setattr(harness, "_command", lambda *arguments: worker(arguments, OURS))
    monkeypatch.setattr(harness, "_run_case", stopped)
    monkeypatch.setitem(SUITES, "tiny", replace(PAIR, cases=cases))
    path = tmp_path / "bench.json"
    assert harness.main("tiny", None, path, 60.0) == 130
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == ["tiny"]
    assert "stopped after 1 of 2 cases" in capsys.readouterr().err


def test_timings_have_quartiles_and_speedups_their_bounds() -> None:
    timing = measure.Timing.of([3.0, 1.0, 2.0, 4.0])
    assert timing.low < timing.median == 2.5 < timing.high
    fast = measure.Timing(1.0, 0.9, 1.1)
    assert str(measure.Speedup.of(measure.Timing(4.0, 3.3, 4.5), fast)) == "4.0 times faster (3.0 to 5.0)"
    assert str(measure.Speedup.of(fast, measure.Timing(4.0, 3.3, 4.5))) == "4.0 times slower (3.0 to 5.0)"
    assert "cannot be told" in str(measure.Speedup.of(measure.Timing(1.2, 0.8, 3.0), fast))
    slow, once = measure.Timing.of([8.0]), measure.Timing.of([2.0])
    assert str(once) == f"{measure.in_unit(2.0)} (called once)"
    assert str(measure.Speedup.of(slow, once)) == "4.0 times faster, by one call of each"


def test_both_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in ("a", "b")}
    found = measure.timings(calls, seconds=2e-6, rounds=2)
    assert found.keys() == calls.keys()
    assert called.index("b") < len(called) - 1 - called[::-1].index("a")  # a came again after b
    monkeypatch.setattr(measure, "LONGEST", 0.0)
    called.clear()
    measure.timings(calls, seconds=0.0)
    assert called == ["a", "b"]  # calls that take longer than that are made once each, and for one round
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert "99.0 processes" in measure.load()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert measure.load() == ""


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
