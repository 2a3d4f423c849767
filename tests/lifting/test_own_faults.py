"""Faults of ours while a function is compared: no length is dropped for them, and no gradient left out."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kdacompile.capture import hook, lifting, store, verify
from kdacompile.capture.concolic import Concolic
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import identify
from kdacompile.capture.store import Verdict
from kdacompile.report import refusals
from kdacompile.report.collect import collecting
from kdacompile.settings import Settings
from tests.lifting.functions import recurrent_gla
from tests.lifting.test_host import call_on

REFUSED = 17


def by_eights(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    if q.shape[1] % 8:
        raise ValueError("whole chunks only")
    return recurrent_gla(q, k, v, g)


def proven(fn: Any) -> Verdict:
    assert isinstance(fn, types.FunctionType)
    return lifting.prove(fn, identify(fn), call_on("cpu"), Settings())


def test_lengths_that_the_function_refuses_are_not_taken() -> None:
    taken = proven(by_eights).lengths
    assert taken
    assert not any(length % 8 for length in taken)


@pytest.mark.parametrize("error", [LookupError, AttributeError, RuntimeError])
def test_a_length_at_which_following_fails_is_not_dropped(error: type[Exception]) -> None:
    assert REFUSED in proven(recurrent_gla).lengths
    real, struck = Concolic.read, list[int]()

    def read(self: Concolic, value: int, what: Any) -> Any:
        if self.now.point[1] == REFUSED:
            struck.append(value)
            raise error("a mistake of ours")
        return real(self, value, what)

    with patch.object(Concolic, "read", read), pytest.raises(Unliftable, match=r"at 17 tokens: .*a mistake of ours"):
        proven(recurrent_gla)
    assert struck


@pytest.mark.parametrize("where", ["the function", "what it was captured as", "gradients"])
def test_memory_that_runs_out_is_a_reason_and_no_trait_of_the_function(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No length is dropped for it, the user's program runs, and nobody finds it on disk."""
    struck = list[str]()

    def full(*args: Any, **kwargs: Any) -> Any:
        struck.append(where)
        raise torch.OutOfMemoryError("no memory")

    if where == "the function":
        monkeypatch.setattr(Concolic, "run", full)
    elif where == "gradients":
        monkeypatch.setattr(torch.autograd, "grad", full)
    else:
        usual = lifting.load
        monkeypatch.setattr(
            lifting, "load", lambda *given: replace(usual(*given), run=full) if given[0] == "draft" else usual(*given)
        )
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    kept = list[str]()
    monkeypatch.setattr(store, "load", lambda key: None)
    monkeypatch.setattr(store, "save", lambda key, verdict: kept.append(key))
    given = [torch.randn(2, 40, 2, 4) for _ in range(3)] + [-torch.rand(2, 40, 2, 4)]
    torch._dynamo.reset()
    with torch.no_grad(), collecting() as report:
        compiled = torch.compile(
            lambda q, k, v, g: recurrent_gla(q, k, v, g), backend="kda", options={"kda.inner": "eager"}
        )
        torch.testing.assert_close(compiled(*given), recurrent_gla(*given))
    refusals.forget(recurrent_gla)  # other tests compile it
    assert struck
    assert not kept
    assert "memory runs out while it is compared" in str(report), str(report)


def test_gradients_are_not_left_uncompared() -> None:
    """What is done with the results is not the function's."""
    real = verify.compare_gradients

    def broken(tree: Any) -> Any:
        raise TypeError("a mistake of ours")

    def compare(*args: Any) -> None:
        with patch.object(verify, "tree_leaves", broken):
            real(*args)

    with patch.object(verify, "compare_gradients", compare), pytest.raises(TypeError, match="a mistake of ours"):
        proven(recurrent_gla)
