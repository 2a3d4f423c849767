"""A sample of ``python -m tests.faults``: one boundary of each stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

# Torch-private: switches Inductor's caches on disk off.
from torch._inductor import config as inductor_config

from kdacompile import containment
from tests.faults.__main__ import outcome
from tests.faults.inject import Fault, boundaries, injected
from tests.faults.models import MODELS, Case

STAGES = {
    "layers": ("kdacompile/capture/", "kdacompile/search/", "patterns/recurrence/", "lowering/cpu/recurrence.py"),
    "latent": ("kdacompile/graph/", "patterns/engine/", "patterns/mla/"),
    "cached": ("kdacompile/capture/tables.py", "patterns/canonical/", "kdacompile/rewrite/splice.py"),
}

MATCHES = {
    "layers": ["gated_delta_rule sequence", "simple_gla sequence"],
    "latent": ["mla sequence"],
    "cached": ["retention sequence", "retention step"],
}
"""What a model gives where nothing is raised."""


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(containment.RAISE, raising=False)
    logger = logging.getLogger("kdacompile")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    with inductor_config.patch(force_disable_caches=True):
        yield
    logger.setLevel(before)
    torch._dynamo.reset()


def chosen(faults: list[Fault], stages: tuple[str, ...]) -> list[Fault]:
    """One fault of each stage: the exit of the function in the middle, by name."""
    found: list[Fault] = []
    for stage in stages:
        exits = [fault for fault in faults if fault.place.file.startswith(stage) and fault.moment == "exit"]
        found += exits[len(exits) // 2 :][:1]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_an_error_anywhere_leaves_the_results_of_torch(name: str) -> None:
    case = Case(name, "aot_eager")
    _, report = case.compile()
    assert sorted(f"{match.pattern} {match.mode}" for match in report.matches) == MATCHES[name], str(report)
    faults = chosen(boundaries(case.compile), STAGES[name])
    assert len(faults) == len(STAGES[name])
    found: dict[str, str] = {}
    for fault in faults:
        with injected(fault) as raised:
            found[str(fault)] = outcome(case)
        assert raised
    assert set(found.values()) <= {"contained", "survived"}, found
    assert "contained" in found.values(), found
