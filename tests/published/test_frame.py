"""The frame of ``python -m tests.published``, on a repository made for the test."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.published.__main__ import by_repository, collect, measure, summary
from tests.published.draw import bhtd
from tests.published.registry import Case, Program
from tests.published.sources import Absent, Library, MissingSource, Repository

FILES = {
    "lib/attention.py": """
import not_installed
from not_installed.kernels import fast
from .mask import causal
from lib.scaling import scaled

@not_installed.jit
def attention(q, k, v):
    return causal(scaled(q) @ k.mT) @ v

class Layer(not_installed.Module):
    pass
""",
    "lib/mask.py": "def causal(x):\n    return x.tril()\n",
    "lib/scaling.py": "def scaled(x):\n    return x * x.shape[-1] ** -0.5\n",
    "lib/needs.py": "import einops_that_is_not_here\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    place = tmp_path / "owner/name"
    for path, text in FILES.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)

    def git(*command: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test"]
        run = subprocess.run(["git", "-C", str(place), *identity, *command], check=True, capture_output=True, text=True)
        return run.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "files")
    return Repository("owner/name", git("rev-parse", "HEAD"))


def attention(module: Any) -> Program:
    assert issubclass(module.Layer, object)
    return module.attention, bhtd(8)


def case(repository: Repository, path: str = "lib/attention.py") -> Case:
    return Case(repository, path, "attention", attention, ("linear_attention",))


def test_a_file_runs_with_what_it_imports(repository: Repository, tmp_path: Path) -> None:
    row = measure(case(repository), Library(tmp_path))
    assert row.complete and not row.wrong, row
    assert row.matched == ("linear_attention",)
    assert f"| owner/name | {repository.commit[:8]} | 1 | 1 | 0 |" in by_repository([row])


def test_what_is_missing_is_told(repository: Repository, tmp_path: Path) -> None:
    other = Repository("owner/other", "0" * 40)
    rows = [measure(case(other), Library(tmp_path)), measure(case(repository, "lib/none.py"), Library(tmp_path))]
    assert rows[0].reason == "git clone https://github.com/owner/other DIR/owner/other"
    assert rows[1].reason == f"git -C DIR/owner/name fetch origin {repository.commit}"
    assert not any(row.complete or row.wrong for row in rows)
    nothing = "0 cases of 0 repositories, 2 skipped, 0 broken; 0 of 0 of the family matched, 0 of them left by cost; "
    assert summary(rows) == nothing + "0 wrong"


def test_a_wrong_result_and_a_miss_are_seen(repository: Repository, tmp_path: Path) -> None:
    library = Library(tmp_path)
    calls = 0

    def changes(module: Any) -> Program:
        def fn(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            return module.attention(*inputs) * calls

        return fn, bhtd(8)

    row = measure(Case(repository, "lib/attention.py", "changes", changes, ("kda",)), library)
    assert row.wrong and not row.complete


def test_what_raises_is_wrong(repository: Repository, tmp_path: Path) -> None:
    calls = 0

    def raises(module: Any) -> Program:
        def fn(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError("not under compilation")
            return module.attention(*inputs)

        return fn, bhtd(8)

    row = measure(Case(repository, "lib/attention.py", "raises", raises, ("linear_attention",)), Library(tmp_path))
    assert row.wrong and "not under compilation" in row.reason


def test_what_cannot_be_built_is_a_row(repository: Repository, tmp_path: Path) -> None:
    def unbuilt(module: Any) -> Program:
        return module.Missing(3), ()

    def fails(module: Any) -> Program:
        return lambda x: x.not_there, (torch.zeros(2),)

    cases = (Case(repository, "lib/attention.py", make.__name__, make, ("kda",)) for make in (unbuilt, fails))
    rows = [measure(each, Library(tmp_path)) for each in cases]
    assert all(row.broken and not row.wrong and row.reason.startswith("cannot be built: Attr") for row in rows), rows
    assert summary(rows).startswith("0 cases of 0 repositories, 0 skipped, 2 broken; 0 of 0")
    assert "owner/name" not in by_repository(rows)


def test_libraries_that_a_case_calls_are_not_replaced(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.published.sources.NEEDED", ("einops_that_is_not_here",))
    with pytest.raises(MissingSource, match="pip install einops_that_is_not_here"):
        Library(tmp_path).load(repository, "lib/needs.py")


def test_absent_names_are_quiet() -> None:
    absent = Absent("triton")
    assert absent.jit(len) is len
    assert list(absent.shapes) == []
    assert absent.autotune(configs=[absent.Config({})], key=["N"])(len) is len


def test_cases_are_registered_once() -> None:
    names = [str(each) for each in collect()]
    assert names and len(names) == len(set(names))
    assert all(len(each.repository.commit) == 40 for each in collect())
