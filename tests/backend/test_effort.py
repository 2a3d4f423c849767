"""Loops that look like linear attention and are something else: they are not searched again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kdacompile
from kdacompile.bench.overhead import PROGRAMS
from kdacompile.capture import hook, lifting
from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.spec import Verdicts
from kdacompile.patterns.recurrence import first_tokens, looks
from kdacompile.patterns.recurrence import proof as region
from kdacompile.patterns.recurrence.cuts import Surroundings
from kdacompile.patterns.recurrence.spec import RECURRENCE
from kdacompile.search import matching
from tests.compare import worst_error

LOOPS = ("tanh on the state", "norm of the state", "tanh between chunks", "softmax block by block")


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """The calls of a module's function from here on."""
    calls: list[Any] = []
    usual: Callable[..., Any] = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return usual(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


@pytest.mark.parametrize("name", LOOPS)
def test_a_graph_is_read_once_for_each_state_it_is_searched_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, arguments = PROGRAMS[name]()
    reads = counting(monkeypatch, matching, "functional_graph")
    run = torch.compile(program, backend="kda", options={"kda.inner": "eager", "kda.lift": False})
    have = run(*arguments)
    assert worst_error(have, program(*arguments)) < 1e-5
    assert 0 < len(reads) <= 2  # as it is, and with what the loop does to every token alike taken out of it


def test_a_function_whose_chunks_are_recognised_one_by_one_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    program, arguments = PROGRAMS["tanh between chunks"]()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    tried = counting(monkeypatch, lifting, "capture")
    with torch.no_grad():
        run = torch.compile(program, backend="kda", options={"kda.inner": "eager"})
        assert worst_error(run(*arguments), program(*arguments)) < 1e-5
    assert 0 < len(tried) <= 3


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_tried_again_that_was_tried_already(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one graph: how often a function is captured is counted above, or read from the disk if it was before."""
    torch._dynamo.reset()  # or what another test has compiled would serve
    program, arguments = PROGRAMS[name]()
    monkeypatch.setattr(RECURRENCE, "verdicts", Verdicts(region.prove))
    cuts = counting(monkeypatch, Surroundings, "minimum_cut")
    recurrences = counting(monkeypatch, first_tokens, "token_recurrence")
    walks = counting(monkeypatch, looks, "_outside")
    with torch.no_grad():
        torch.compile(program, backend="kda", options={"kda.inner": "eager", "kda.lift": False})(*arguments)
    assert 0 < len(cuts) <= 150  # where sizes and readings do not matter, up to 540 were made
    assert len(recurrences) <= 800  # where no two readings share their first token, up to 3264
    assert len(walks) <= 120  # for each pair of results of a group, up to 1362


def test_what_is_tried_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    program, arguments = PROGRAMS["softmax block by block"]()
    report = kdacompile.explain(program)(*arguments)
    assert report.matches == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_no_graph_is_kept_once_it_is_compiled() -> None:
    """Verdicts are remembered by structure alone: what they are about holds the model's parameters."""

    def alive() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is Value and each.node is not None}

    torch._dynamo.reset()
    before = alive()
    inputs = [torch.randn(2, 7, 3, 5) for _ in range(3)]
    report = kdacompile.explain(without_a_gate, options={"kda.lift": False})(*inputs)
    assert report.matches
    del report
    torch._dynamo.reset()
    assert not alive() - before


def without_a_gate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bihd,bjhd->bhij", q, k).tril() @ v.transpose(1, 2)
