"""Charts of what the benches wrote: lines against lengths, bars of everything else, and what cannot be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdacompile.bench import charts, deepseek, overhead


def case(name: str, length: int | None = None, *, train: bool = False, **seconds: float) -> dict[str, Any]:
    results = {contender: {"run_seconds": time} for contender, time in seconds.items()}
    return {"name": name, "length": length, "train": train, "results": results}


LENGTHS = [
    case("long", 512, kda=2e-3, eager=9e-3),
    case("short", 64, kda=1e-3),
    case("train", 64, train=True, kda=4e-3),
]


def test_cases_of_many_lengths_are_lines_and_others_bars() -> None:
    found = charts.panels(LENGTHS)
    assert {kind: [item["name"] for item in cases] for kind, cases in found.items()} == {"forward": ["short", "long"]}
    assert charts.panels([case("a", 64, kda=1.0), case("b", 64, kda=1.0)]) == {}
    assert charts.panels([case("a", kda=1.0), case("b", kda=1.0)]) == {}


def test_times_are_read_in_the_unit_of_each_suite() -> None:
    figures = {"a": {"device_us": 5.0}, "b": {"decode_ms": 2.0}, "c": {"failure": "no memory"}, "d": {"run_seconds": 3}}
    assert charts.times({"results": figures}) == pytest.approx({"a": 5e-6, "b": 2e-3, "d": 3.0})


@pytest.mark.parametrize("cases", [LENGTHS, [case("cpu", kda=1.0, other=2.0)]], ids=["lines", "bars"])
def test_a_chart_is_drawn_for_light_and_dark_and_always_the_same(cases: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = charts.draw(cases, tmp_path / "new" / "chart", "title")
    assert [path.name for path in paths] == ["chart-light.svg", "chart-dark.svg"]
    first = [path.read_text() for path in paths]
    assert first[0] != first[1]
    assert [path.read_text() for path in charts.draw(cases, tmp_path / "new" / "chart", "title")] == first


def test_the_command_merges_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.json" for name in "abc"]
    for path, suite, found in zip(files, ("one", "one", "two"), ([LENGTHS[0]], LENGTHS[1:], []), strict=True):
        path.write_text(json.dumps({"suite": suite, "date": "today", "cases": found}))
    both, page = tmp_path / "merged.json", tmp_path / "page.md"
    assert charts.main([*map(str, files[:2]), "--merge", str(both), "--page", str(page)]) == 0
    assert [item["name"] for item in json.loads(both.read_text())["cases"]] == ["long", "short", "train"]
    assert (
        "| forward, 512 tokens | 2 ms | 9 ms |" in page.read_text() and 'src="./merged-light.svg"' in page.read_text()
    )
    assert charts.main([*map(str, files), "--merge", str(both), "--title", "Two suites"]) == 0
    merged = json.loads(both.read_text())
    assert merged["title"] == "Two suites" and "date" not in merged
    assert merged["source"] == "`kdacompile bench --suite one` (today); `kdacompile bench --suite two` (today)"
    capsys.readouterr()
    assert charts.main([*map(str, files), "--merge", str(both)]) == 2
    assert "of different suites" in capsys.readouterr().err
    files[0].write_text(json.dumps({"suite": "one", "device": "another", "cases": []}))
    assert charts.main([*map(str, files), "--merge", str(both), "--title", "Two suites"]) == 2
    assert "different devices" in capsys.readouterr().err
    files[0].write_text("[]")
    for path in (*files[::2], tmp_path / "missing.json"):
        assert charts.main([str(path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_text_beside_a_chart_says_what_is_drawn() -> None:
    lines = {"suite": "one", "title": "Lengths", "cases": LENGTHS[:2]}
    bars = {"suite": "two", "title": "Cases", "cases": [case("cpu", kda=1.0, other=2.0)]}
    made = charts.page({"a": lines, "b": bars}, "charts")
    assert 'alt="Lengths: time against length"' in made and 'alt="Cases: bars, time a call"' in made


def test_what_overhead_and_the_decode_step_write_has_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"ms": 3.0, "error": 4e-3, "compile_s": 12.0, "peak_gib": 0.5}
    monkeypatch.setattr(overhead, "measure", lambda *_: overhead.Figures(3, 2.0, 0.02, True))
    monkeypatch.setattr(deepseek, "run_all", lambda _: {"kda default": step, "inductor default": {"failure": "x"}})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "none")
    files = [tmp_path / "overhead.json", tmp_path / "deepseek.json"]
    assert overhead.main("pointwise", files[0]) == 0 and deepseek.main(["--json", str(files[1])]) == 1
    (first,), (second,) = (charts.load(path)["cases"] for path in files)
    assert charts.times(first) == {"first call": 2.0, "kda": 0.02} and charts.times(second) == {"kda default": 3e-3}
