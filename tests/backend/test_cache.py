"""Compile caches on disk: hits where nothing changed, and never an old result after a change. Each run is a process."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

# Torch-private: how users write passes for Inductor, and its options.
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from kdacompile import backend
from kdacompile.report import on_disk
from kdacompile.report.collect import collecting
from kdacompile.report.findings import GraphReport
from kdacompile.settings import Settings
from tests.backend.layers import compiled, delta_arguments, gated_delta_loop, patterns

ROOT = Path(__file__).parents[2]
REWRITES = Settings(cost_model=False)
"""However small a loop is."""
LATE_PASSES = not torch.__version__.startswith("2.11.")  # later versions ask the cache first


def run(variant: str, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    command = [sys.executable, "-m", "tests.backend.cached_run", variant]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that one process has filled."""
    cache = tmp_path_factory.mktemp("inductor")
    first = run("plain", cache)
    assert (first["hits"], first["misses"]) == (0, 1)
    assert first["matches"] == ["gated_delta_rule"]
    assert first["from_cache"] == [False]
    assert (first["ratio"], first["gradient_ratio"]) == (1.0, 1.0)
    return cache


def test_unchanged_code_hits_the_cache_and_keeps_its_report(warm: Path) -> None:
    again = run("plain", warm)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert (again["ratio"], again["gradient_ratio"]) == (1.0, 1.0)
    assert again["matches"] == ["gated_delta_rule"]
    assert again["from_cache"] == [LATE_PASSES]


def test_changed_code_misses_the_cache(warm: Path) -> None:
    changed = run("changed", warm)
    assert (changed["hits"], changed["misses"]) == (0, 1)
    assert (changed["ratio"], changed["gradient_ratio"]) == (2.0, 2.0)


def test_settings_that_change_the_result_are_in_the_identity() -> None:
    settings = (Settings(), Settings(precision="fp32"), Settings(disable=("kda",)), Settings(strict=True))
    assert len({backend.KdaPass(each).identity() for each in settings}) == len(settings)


def test_the_fingerprint_is_what_prevents_a_stale_result(warm: Path) -> None:
    """The control: the same change with the old fingerprint is served the old code (or, where the pass runs before the
    cache is asked, a miss)."""
    stale = run("stale", warm)
    assert stale["ratio"] == (1.0 if stale["hits"] else 2.0)


def test_every_source_file_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kdacompile.patterns

    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(kdacompile.patterns, "__file__", str(tmp_path / "__init__.py"))
    fingerprints: set[str] = set()
    for text in ("", "x = 1", "x = 2"):
        (tmp_path / "rule.py").write_text(text)
        (tmp_path / "__pycache__").mkdir(exist_ok=True)
        (tmp_path / "__pycache__" / "rule.pyc").write_text(str(len(fingerprints)))
        fingerprints.add(backend.source_fingerprint.__wrapped__())
    assert len(fingerprints) == 3
    assert backend.source_fingerprint.__wrapped__() in fingerprints


# -- the pass beside other passes -----------------------------------------------------------------------------------


class AddOne(CustomGraphPass):
    """Adds one to what the graph returns."""

    def __init__(self, name: str = "one") -> None:
        self.name = name

    def __call__(self, graph: fx.Graph) -> None:
        add_one(graph)

    def uuid(self) -> str:
        return self.name


def add_one(graph: fx.Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    for value in output.all_input_nodes:
        with graph.inserting_before(output):
            more = graph.call_function(torch.add, (value, 1))
        more.meta = dict(value.meta)
        output.replace_input_with(value, more)


@pytest.mark.parametrize("theirs", [AddOne(), add_one])
def test_the_users_own_pass_runs_too(theirs: Any) -> None:
    with torch.no_grad(), collecting() as report:
        run = compiled(gated_delta_loop, "inductor", options={"pre_grad_custom_pass": theirs})
        out = run(*delta_arguments())
    assert patterns(report) == ["gated_delta_rule"]
    assert torch.allclose(out, gated_delta_loop(*delta_arguments()) + 1, atol=1e-5)


def test_the_users_pass_from_the_global_configuration_runs_too() -> None:
    with torch.no_grad(), collecting() as report, inductor_config.patch(pre_grad_custom_pass=AddOne()):
        out = compiled(gated_delta_loop, "inductor")(*delta_arguments())
    assert patterns(report) == ["gated_delta_rule"]
    assert torch.allclose(out, gated_delta_loop(*delta_arguments()) + 1, atol=1e-5)


def test_the_identity_includes_the_users_pass() -> None:
    identities = {backend.KdaPass(Settings(), earlier).uuid() for earlier in (None, AddOne("a"), AddOne("b"), add_one)}
    assert len(identities) == 4
    assert None in identities  # add_one has no identity, so nothing may be cached


def test_pickling_is_identity() -> None:
    first, second = backend.KdaPass(Settings()), backend.KdaPass(Settings())
    second.reports.append(GraphReport(seconds={"functional": 1.0}))
    assert pickle.dumps(first) == pickle.dumps(second)
    assert pickle.dumps(first) != pickle.dumps(backend.KdaPass(Settings(strict=True)))
    assert pickle.loads(pickle.dumps(first)).uuid() == first.uuid()


# -- remembered reports -----------------------------------------------------------------------------------------------


def graph_of(fn: Any, *arguments: Tensor) -> fx.GraphModule:
    held: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        held.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, dynamic=False)(*arguments)
    return held[0]


def test_a_report_is_kept_and_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    gm = graph_of(gated_delta_loop, *delta_arguments())
    memory = on_disk.KeptReport(gm, "v1")
    with collecting() as report:
        kept = backend.compiler_pass.run(gm, REWRITES)
    with inductor_config.patch(force_disable_caches=False):
        memory.keep([kept])
    assert memory.recall() == [kept]
    with collecting() as recalled:
        memory.emit()
    assert [graph.from_cache for graph in recalled.graphs] == [True]
    assert patterns(recalled) == patterns(report)
    assert "from cache" in str(recalled)


def test_a_report_is_only_for_its_own_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    short, long = (graph_of(gated_delta_loop, *delta_arguments(length=length)) for length in (3, 4))
    paths = [on_disk.KeptReport(gm, name).path for gm, name in ((short, "v1"), (long, "v1"), (short, "v2"))]
    assert len(set(paths)) == 3


@pytest.mark.parametrize("broken", [b"{", b"\xff\xfe", b""])
def test_a_lost_or_broken_report_is_no_error(broken: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    memory = on_disk.KeptReport(graph_of(gated_delta_loop, *delta_arguments()), "v1")
    assert memory.recall() == []
    assert memory.path is not None
    memory.path.parent.mkdir(parents=True)
    memory.path.write_bytes(broken)
    with collecting() as report:
        memory.emit()
    assert [(graph.from_cache, graph.matches) for graph in report.graphs] == [(True, ())]
    assert report.graphs[0].nodes > 10


TEXT = """
import torch

def attention(q, k, v, g):
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1)
"""


def imported_from(path: Path, text: str) -> Any:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention


def test_a_recalled_report_names_the_lines_of_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's text is the same in another checkout, and after an edit above it; files and lines are not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    arguments = delta_arguments()[:4]
    one = graph_of(imported_from(tmp_path / "one" / "model.py", TEXT), *arguments)
    memory = on_disk.KeptReport(one, "v1")
    with inductor_config.patch(force_disable_caches=False):
        memory.keep([backend.compiler_pass.run(one, REWRITES)])
    other = graph_of(imported_from(tmp_path / "other" / "model.py", "# edited" + 6 * "\n" + TEXT), *arguments)
    (before,), (after,) = memory.recall(), on_disk.KeptReport(other, "v1").recall()
    with collecting() as told:
        on_disk.KeptReport(other, "v1").emit()
    assert before.matches[0].source.startswith(str(tmp_path / "one"))
    file, line = after.matches[0].source.split(":")
    assert file == str(tmp_path / "other" / "model.py")
    assert int(line) == int(before.matches[0].source.split(":")[1]) + 6
    assert told.matches[0].loop == f"{file}:{TEXT[: TEXT.index('for t')].count(chr(10)) + 1 + 6}"
    assert str(tmp_path / "one") not in str(told)
