"""The search ends once nothing was found for as long as ``kda.deadline`` allows."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from kdacompile.errors import OptionTypeError, OptionValueError
from kdacompile.explainer import explain
from kdacompile.patterns.engine import deadline
from kdacompile.settings import parse
from tests.backend.layers import delta_arguments, gated_linear_parallel


def test_the_option_is_a_number_of_seconds() -> None:
    assert parse(None, {"kda.deadline": 5}).deadline == 5.0
    with pytest.raises(OptionTypeError):
        parse(None, {"kda.deadline": "soon"})
    with pytest.raises(OptionValueError):
        parse(None, {"kda.deadline": 0})


def test_a_search_that_finds_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is ten seconds later than the one before."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr(deadline.time, "thread_time", lambda: float(next(clock)))
    args = delta_arguments()[:4]
    report = explain(gated_linear_parallel, options={"kda.deadline": 7})(*args)
    (told,) = report.rejections
    assert told.code == "deadline"
    assert "gave up after 7 s of processor time without a match (kda.deadline)" in told.reason
    assert torch.equal(report.result, gated_linear_parallel(*args))


def test_cycles_are_not_looked_for_meanwhile() -> None:
    assert gc.isenabled()
    with deadline.within(10.0):
        assert not gc.isenabled()
        with deadline.within(1.0):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with deadline.within(10.0):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_time_begins_anew_with_every_match(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(deadline.time, "thread_time", lambda: now)
    with deadline.within(10.0), deadline.within(1.0):  # the outer one counts
        now = 9.0
        deadline.check()
        deadline.restart()
        now = 18.0
        deadline.check()
        now = 20.0
        with pytest.raises(deadline.OutOfTime, match="10 s"):
            deadline.check()
    deadline.check()  # no search, no deadline
