"""``python -m tests.published --times``: what a row says, not how long it takes. Processes are as in a real run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kdacompile.bench.relay import Steps
from tests.published import __main__ as command
from tests.published import times
from tests.published.draw import bhtd
from tests.published.registry import Case, Program
from tests.published.sources import Library, Repository

NAME, PATH = "owner/name", "attention.py"
ROUNDS = 2
SOURCE = "def attention(q, k, v):\n    return (q @ k.mT).tril() @ v\n"


def attention(module: Any) -> Program:
    return module.attention, bhtd(8)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test"]
    run = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def case(folder: Path) -> Case:
    commit = git(folder / NAME, "rev-parse", "HEAD")
    return Case(Repository(NAME, commit), PATH, "attention", attention, ("linear_attention",))


def measured(group: str, contender: str) -> Steps:
    """In a worker: the case of this file instead of the published ones, which are not even imported."""
    times.CASES[:] = [case(Path(json.loads(group)[0]))]
    command.collect = lambda: times.CASES
    times.ROUNDS, times.ROUND_SECONDS = ROUNDS, 0.01
    yield from times.measured(group, contender)


@pytest.fixture
def clones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / NAME
    place.mkdir(parents=True)
    (place / PATH).write_text(SOURCE)
    git(place, "init", "-q")
    git(place, "add", ".")
    git(place, "commit", "-qm", "files")
    monkeypatch.setattr(times, "__name__", __name__)  # workers ask this file
    monkeypatch.setattr(times, "ROUNDS", ROUNDS)
    return tmp_path


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


HEADINGS = cells(times.HEADER.splitlines()[0])


def test_a_row_has_all_first_calls_and_both_compilers_in_turn(clones: Path) -> None:
    row, _ = times.timed(case(clones), Library(clones))
    found = dict(zip(HEADINGS, cells(row), strict=True))
    assert (found["repository"], found["case"]) == (NAME, "attention")
    for name in HEADINGS[2:6]:
        assert float(found[name].removesuffix(" s")) >= 0, row
    assert all("quartiles" in found[name] for name in ("Inductor", "kda")), row
    assert "times" in found["kda is"], row


FIGURES: dict[str, dict[str, Any]] = {
    "eager": {"first": 1.0, "samples": []},
    "ours": {"first": 2.0, "samples": []},
    "inductor": {"first": 3.0, "samples": [2e-3, 2e-3]},
    "kda": {"first": 4.0, "samples": [1e-3, 1e-3]},
}


def test_first_calls_are_held_against_eager_and_a_budget() -> None:
    some = Case(Repository(NAME, "0" * 40), PATH, "attention", attention)
    row, within = times.row(some, FIGURES)
    assert within and cells(row)[2:6] == ["1.00 s", "2.00 s", "3.00 s", "4.00 s"]
    assert "2.0 times faster" in row
    late = FIGURES | {"ours": {"first": 1.0 + times.BUDGET + 0.01}}
    assert not times.row(some, late)[1]


def test_a_contender_that_fails_is_a_row_and_not_within() -> None:
    some = Case(Repository(NAME, "0" * 40), PATH, "attention", attention)
    row, within = times.row(some, FIGURES | {"kda": {"first": 1.0, "failure": "it fell over"}})
    assert not within and "kda: it fell over" in row


def test_what_is_missing_is_a_row_and_nothing_timed_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Case(Repository("owner/other", "0" * 40), PATH, "attention", attention, ("linear_attention",))
    assert command.print_times([missing], Library(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "git clone https://github.com/owner/other DIR/owner/other" in said
    assert "0 of 0 first calls" in said
