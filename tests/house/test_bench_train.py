"""The training suite: what a line says, who runs what, and what it says without a device; the figures need one."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
import torch

from kdacompile.bench import charts, record, train
from kdacompile.errors import BenchError


def figures(device: float) -> train.Figures:
    return {
        "device_us": device, "backward_us": 0.7 * device, "forward_us": 0.2 * device, "floor_us": 200.0,
        "host_us": 50.0, "saved_bytes": 3 << 20, "workspace_bytes": 5 << 20, "errors": {"q": 3e-3, "g": 4e-3},
    }  # fmt: skip


def test_a_line_has_times_bytes_and_the_worst_error() -> None:
    text = train.line(figures(2000.0))
    assert "2000 us" in text and "backward    1400" in text and "workspace 5 MiB" in text and "4.0e-03 (dg)" in text
    assert train.line({"tokens_a_second": 120000.0, "peak_bytes": 2**30}) == "120,000 tokens/s, 1.0 GiB"
    assert train.line({"failure": "not ready"}) == "- not ready"


def test_a_peer_s_backward_alone_has_a_line() -> None:
    text = train.line({"backward_us": 1286.0, "workspace_bytes": 802 << 20, "errors": {"g": 1.3e-2}})
    assert text == "backward    1286, workspace 802 MiB, worst error 1.3e-02 (dg)"


def test_nobody_is_asked_for_what_he_refuses() -> None:
    assert train.contenders("gdn") == ("ours",) and train.contenders("qwen3_next") == ("ours", "eager")
    assert train.contenders("outside-h16") == ("ours", "cudnn")
    assert all("ours" in train.contenders(name) for name in (*train.ROWS, *train.MODELS))


def test_few_workers_are_on_the_device_at_once_and_models_alone() -> None:
    waves = train.waves([*train.ROWS, *train.MODELS])
    assert max(map(len, waves)) == train.AT_ONCE
    assert [{job.group for job in wave} for wave in waves[-len(train.MODELS) :]] == [{name} for name in train.MODELS]
    assert all(wave == train.waves([name])[0] for wave, name in zip(waves[-3:], train.MODELS, strict=True))


def test_every_contender_measures_every_row_it_is_asked_for_in_one_process_for_all_that_share_kernels() -> None:
    jobs = [job for wave in train.waves([*train.ROWS, *train.MODELS]) for job in wave]
    asked = [(name, job.contender) for job in jobs for name in train._asked(job.group, job.contender)[1]]
    expected = [(name, who) for name in (*train.ROWS, *train.MODELS) for who in train.contenders(name)]
    assert sorted(asked) == sorted(expected) and len({job.name for job in jobs}) == len(jobs)
    [kda] = [job for job in jobs if job.name == "kda, ours"]
    assert {"kda", "kda-h1", "kda-packed", "kda-state"} <= set(kda.group.split(",")) < {"gdn", *train.ROWS}
    assert train._asked(kda.group, "inductor-256") == ("inductor", {"kda": (256,)})
    assert train._asked(kda.group, "fla")[1] == {"kda": train.LENGTHS}
    assert train._asked("deepseek_v3", "eager") == ("eager", {"deepseek_v3": (8192,)})


def test_forward_and_training_of_one_row_are_drawn_from_one_run() -> None:
    cases: dict[str, train.Figures] = {}
    for length in train.LENGTHS:
        for contender in train.contenders("kda"):
            who, asked = train._asked("kda", contender)
            if length in asked["kda"]:
                train.put(cases, "kda", length, who, figures(1e3 * length))
    train.put(cases, "kda", 1024, "fla", {"failure": "no memory"})
    assert charts._missing(cases) == ["Without a time: flash-linear-attention, kda-t1024 (no memory)."]
    panels = charts.panels(list(cases.values()))
    assert {kind: [case["length"] for case in found] for kind, found in panels.items()} == {
        "forward": list(train.LENGTHS), "training": list(train.LENGTHS),
    }  # fmt: skip
    everyone = ("ours", "portable", "eager", "inductor", "fla")
    assert charts.times(panels["forward"][0]) == pytest.approx(dict.fromkeys(everyone, 0.0512))
    assert [case["length"] for case in panels["training"] if "inductor" in case["results"]] == [256, 512]
    assert charts.times(panels["training"][2]) == pytest.approx({"ours": 1.024, "portable": 1.024, "eager": 1.024})


def test_a_record_says_when_and_of_which_commit(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    record.write(path, "train", [], device="a GPU", title="KDA")
    written = json.loads(path.read_text())
    assert date.fromisoformat(written["date"]) and written["commit"] == record._commit()
    assert written["date"] in charts.source_of(written) and charts.title_of(written).startswith("KDA\na GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(BenchError, match="CUDA device"):
        train.main(None, Path("unused.json"), 1.0)
