"""A few programs of one seed, and that the fuzzer sees what it is there to see."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.rewrite import linear_attention
from tests.fuzz import bases, scripts
from tests.fuzz.judge import Judge
from tests.fuzz.mutations import Mutation, edited, numbered
from tests.fuzz.recipes import Call, Recipe, recipe
from tests.fuzz.shrink import shrunk
from tests.fuzz.yardstick import Shaken, apart

SEED, PROGRAMS = 15, 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch", "kdacompile")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_programs_of_one_seed(tmp_path: Path) -> None:
    judge, verdicts = Judge(tmp_path), {}
    for number in range(PROGRAMS):
        made = recipe(SEED, number)
        if made is not None:
            verdicts[number] = judge(made)
    assert not {number: verdict for number, verdict in verdicts.items() if verdict.failed}
    kinds = [verdict.kind for verdict in verdicts.values()]
    assert "matched" in kinds and "declined" in kinds, kinds


PLAIN = Recipe("parallel:1000000000", (Call(24), Call(24, "small", seed=1)))


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewrite forgets the gate."""
    own: Callable[..., Any] = linear_attention.LinearAttentionSplice.gate

    def gate(splice: Any, *args: Any) -> Any:
        return splice.method(own(splice, *args), "mul", 0.0)

    monkeypatch.setattr(linear_attention.LinearAttentionSplice, "gate", gate)


def test_plain_programs_match(tmp_path: Path) -> None:
    verdict = Judge(tmp_path)(PLAIN)
    assert (verdict.kind, verdict.patterns) == ("matched", ("simple_gla",)), verdict


@pytest.mark.usefixtures("blind")
def test_wrong_numbers_are_seen_made_smaller_and_written_out(tmp_path: Path) -> None:
    judge = Judge(tmp_path)
    text = bases.base(PLAIN.base).text
    site = next(node for node in _walk(text) if type(node).__name__ == "Return")
    large = replace(PLAIN, mutations=(Mutation("bend", site.value.number, "x * 2", "plain"),), gradients=True)
    assert judge(large).kind == "wrong"
    small = shrunk(large, lambda candidate: judge(candidate).kind == "wrong")
    assert not small.mutations and len(small.calls) == 1 and not small.gradients
    assert small.calls[0].length < 24
    path = tmp_path / "script.py"
    scripts.write(small, judge(small), path)
    ran = subprocess.run([sys.executable, str(path)], text=True, capture_output=True, check=False)
    assert ran.returncode == 0 and "relative error" in ran.stdout and "simple_gla" in ran.stdout, ran.stderr


@pytest.mark.parametrize(("inductors", "kind"), [(True, "torch"), (False, "wrong")])
def test_strides_that_inductor_alone_gives_too(
    inductors: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results in another order of memory: with this backend, and with Inductor alone or not."""
    own = Judge._compiled

    def compiled(judge: Judge, made: Recipe, program: Any, backend: str, options: dict[str, Any]) -> Any:
        given, error = own(judge, made, program, "eager" if backend == "inductor" else backend, options)
        if backend == "kda" or (backend == "inductor" and inductors):
            for outcome in given:
                outcome.values[0] = outcome.values[0].mT.contiguous().mT
        return given, error

    monkeypatch.setattr(Judge, "_compiled", compiled)
    verdict = Judge(tmp_path)(PLAIN)
    assert verdict.kind == kind and "strides" in verdict.detail, verdict


def test_other_roundings_move_what_is_badly_conditioned() -> None:
    x = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def moved(fn: Callable[[torch.Tensor], torch.Tensor]) -> float:
        with Shaken(torch.float64, 0):
            found = fn(x)
        return apart([found], [fn(x)])

    assert 1e-17 < moved(lambda x: x * 3 + 1) < 1e-15
    assert moved(lambda x: (x + 1e12) - 1e12) > 1e-6
    assert moved(lambda x: torch.arange(64).double().clamp(max=1)) == 0.0, "a mask stays one"


def test_gradients_of_a_softmax_that_cancel_are_rounding() -> None:
    scores = torch.tensor([[0.3, 900.7]], dtype=torch.float64)
    grad, seen = torch.tensor([[0.1, 0.7]], dtype=torch.float64), scores.softmax(-1)
    backward = torch.ops.aten._softmax_backward_data
    with Shaken(torch.float64, 0):
        found = backward(grad * 1.5, seen, -1, torch.float64)
    assert backward(grad * 1.5, seen, -1, torch.float64).abs().max() == 0 and 0 < found.abs().max() < 1e-15


def _walk(text: str) -> Iterator[Any]:
    return ast.walk(numbered(text))


def test_a_recipe_is_the_same_everywhere() -> None:
    assert recipe(SEED, 3) == recipe(SEED, 3)
    made = next(found for number in range(20) if (found := recipe(SEED, number)) is not None and found.mutations)
    text = bases.base(made.base).text
    assert edited(text, made.mutations) != edited(text, ()) == text
