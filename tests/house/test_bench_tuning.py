"""What a peer's autotuner is about to try is compiled first; it tries and chooses what it would have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kdacompile.bench.tuning import compile_side_by_side

pytest.importorskip("triton.runtime.autotuner")


def test_a_tuner_compiles_all_configurations_before_it_times_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import Config
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)  # the tests after this one keep theirs
    calls: list[tuple[int, bool]] = []

    def run(*args: object, **given: Any) -> None:
        assert [*args, given.get("x")] in ([7], [7, None])  # by name ahead, by place later
        calls.append((given["BLOCK"], given["warmup"]))

    def timed(call: Any, quantiles: object) -> list[float]:
        call()
        return [float(calls[-1][0] != 32)] * 3

    kernel = SimpleNamespace(fn=lambda x: x, run=run)
    configurations = [Config({"BLOCK": block}) for block in (16, 32, 64)]
    tuner = Autotuner(kernel, ["x"], configurations, ["x"], None, None, do_bench=timed)
    compile_side_by_side()
    tuner.run(7, grid=(1,), warmup=False)
    ahead = [(block, True) for block in (16, 32, 64)]
    assert calls == [*ahead, *((block, False) for block in (16, 32, 64)), (32, False)]
    tuner.run(7, grid=(1,), warmup=False)
    assert calls[7:] == [(32, False)]  # chosen: nothing is compiled ahead
