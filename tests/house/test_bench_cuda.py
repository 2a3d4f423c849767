"""The CUDA suite's tables, and what it says without a device; the figures need one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.bench import cuda, cuda_table
from kdacompile.bench.cuda_cases import CASES, MODELS, contenders
from kdacompile.bench.relay import Job, Outcome, Relay, Worker
from kdacompile.errors import BenchError

WORKER = "tests.house.relay_worker"
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(BenchError, match="CUDA device"):
        cuda.main(None, Path("unused.json"), 1.0)


def test_models_have_a_table_of_their_own_and_markdown_has_the_same_cells() -> None:
    model = cuda.Case("kimi-linear", "kimi_linear", 1, 4096)
    ours = {"decode_ms": 1.5, "decode_device_us": 349.4, "first_call_seconds": 9.0}
    ours |= {"prefill_tokens_a_second": 98765.0, "error": 2e-3, "graphs": 2, "matches": 6}
    found = {"ours": ours, "inductor": {"decode_ms": 2.5, "decode_device_us": 396.0, "first_call_seconds": 30.0}}
    results = RESULTS | {model.name: found}
    text = cuda.table([CASE, model], results)
    assert "98,765 tokens/s" in text and "2.50 ms/token" in text and "349 us" in text
    lines = cuda_table.markdown([CASE, model], results).splitlines()
    assert "| kda-t8192 | ours | 400.0 us | 20% | 1.00x | 405.0 us | 3.00 s | 1 MiB | 4.0e-03 | 3.0e-03 |" in lines
    assert any(line.startswith("| kimi-linear | ours | 98,765 tokens/s |") for line in lines)


def test_ours_runs_in_every_case() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all("ours" in contenders(case) for case in CASES)
    assert {case.kind for case in CASES} >= set(MODELS)


def test_workers_are_timed_alone_and_failures_have_reasons(tmp_path: Path) -> None:
    out = tmp_path / "times"
    outcomes: dict[str, Outcome] = {}
    arguments = {"a": ("0.1", "0"), "b": ("0.3", "0"), "broken": ("0", "3"), "late": ("60", "0")}
    *jobs, late = [Job(name, WORKER, f"{delay} {status} {out}", name) for name, (delay, status) in arguments.items()]
    Relay(60.0, 20.0).run([jobs], lambda job, outcome: outcomes.update({job.name: outcome}))
    Relay(2.0, 20.0).run([[late]], lambda job, outcome: outcomes.update({job.name: outcome}))
    assert outcomes["a"].failure is None and outcomes["b"].failure is None
    assert outcomes["a"].found == {"a": {"hidden": True}} and outcomes["broken"].found == {}
    assert outcomes["late"].failure == "not ready after 2 s"
    assert outcomes["broken"].failure == "exit status 3"
    assert list(outcomes["broken"].stderr) == ["broken on purpose"]
    assert outcomes["broken"].reason == "broken on purpose" and outcomes["late"].reason == "not ready after 2 s"
    turns = [tuple(map(float, line.split()[:2])) for line in out.read_text().splitlines()]
    (_, first_end), (second_start, _) = sorted(turns)
    assert first_end <= second_start


@pytest.mark.skipif(sys.platform == "win32", reason="signals one thread")
def test_what_was_found_before_an_interruption_is_handed_on(tmp_path: Path) -> None:
    found: dict[str, Outcome] = {}

    def interrupt() -> None:
        while not (tmp_path / "times.found").exists():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    job = Job("endless", WORKER, f"0 0 {tmp_path / 'times'}", "endless")
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            Relay(300.0, 60.0).run([[job]], lambda job, outcome: found.update({job.name: outcome}))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert found["endless"].found == {"endless": {"hidden": True}} and found["endless"].failure is not None


def test_a_worker_that_ends_is_not_waited_for_where_what_it_started_lives_on() -> None:
    left = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(25)']); sys.exit(4)"
    )
    with Worker([sys.executable, "-c", left]) as worker:
        worker.until_ready(20.0)
        assert worker.failure == "exit status 4"


def test_caches_are_a_job_s_own_unless_it_shares_one(tmp_path: Path) -> None:
    outs = [tmp_path / name for name in ("a", "b", "c", "d")]
    shares = ("", "fla", "fla", "")
    jobs = [Job(out.name, WORKER, f"0 0 {out}", "fla", name) for out, name in zip(outs, shares, strict=True)]
    found: list[Outcome] = []
    Relay(60.0, 20.0).run([jobs[:2], jobs[2:]], lambda job, outcome: found.append(outcome))
    assert [outcome.found for outcome in found] == [{"fla": {"hidden": False}}] * 4
    own, first, second, other = (out.read_text().split()[2] for out in outs)
    assert first == second and len({own, first, other}) == 3


def test_fla_comes_after_the_others_and_tunes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    kinds = {(case.kind, contender) for case in CASES for contender in contenders(case)}
    jobs = [Job(f"{kind} 1x1, {who}", WORKER, "", who, "fla" if who.endswith("fla") else "") for kind, who in kinds]
    waves = cuda._waves(jobs)
    sharing = [wave for wave in waves if wave[0].shares]
    assert waves[-2:] == sharing
    assert not any(job.shares for wave in waves[:-2] for job in wave)
    tuning, tuned = sharing
    assert {job.name.split()[0] for job in tuning} == {"kda", "gdn", "step"}
    assert all(job.shares for job in tuned)
    assert sorted(job.name for wave in waves for job in wave) == sorted(job.name for job in jobs)
