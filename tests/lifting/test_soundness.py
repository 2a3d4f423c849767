"""Attempts to get a wrong number out of a lift: hidden decisions, state of the process, things exchanged in place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.capture import hook, lifting
from kdacompile.capture.branches import to_visit
from kdacompile.capture.concolic import Concolic
from kdacompile.capture.identity import identify
from tests.compare import relative_error
from tests.lifting.test_lift import arguments

EIGHT, NINE = 8, 9
grow = torch.exp


def retention(q: Tensor, k: Tensor, v: Tensor, rate: float = 0.5) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def operands(length: int, batch: int = 1) -> list[Tensor]:
    return arguments(length, batch)[:3]


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda *args: fn(*args), backend="kda", options={"kda.inner": "eager"})


def lifted() -> set[str]:
    return {found.verdict.function for found in hook.lifts.known.values() if isinstance(found, lifting.Lifted)}


def agrees(run: Callable[..., Any], fn: Callable[..., Any], args: list[Tensor]) -> bool:
    return relative_error(run(*args), fn(*args)) < 1e-5


# -- what it decides --------------------------------------------------------------------------------------------------


def one_batch_is_special(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = retention(q, k, v)
    for _ in range(1):
        out = out * 2 if q.shape[0] == 4 else out
    return out


def far_lengths_are_special(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = retention(q, k, v)
    for _ in range(1):
        out = out * 2 if q.size(1) > EIGHT * NINE + 30 else out
    return out


def very_far_lengths_are_special(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = retention(q, k, v)
    for _ in range(1):
        out = out * 2 if q.size(1) > EIGHT**5 else out
    return out


def the_process_decides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(1):
        v = v * 3 if torch.are_deterministic_algorithms_enabled() else v
    return retention(q, k, v)


def hides_a_detach(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(1):
        k = getattr(k, "detach")()  # noqa: B009
    return retention(q, k, v)


def takes_the_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(1):
        k = k.data
    return retention(q, k, v)


REFUSED = {
    one_batch_is_special: ("length", operands(18, 4)),
    far_lengths_are_special: ("length", operands(103)),
    very_far_lengths_are_special: ("more than can be tried", operands(18)),
    the_process_decides: ("are_deterministic_algorithms_enabled", operands(18)),
    hides_a_detach: ("detach", operands(18)),
    takes_the_data: ("uses data", operands(18)),
}


@pytest.mark.parametrize("fn", list(REFUSED), ids=lambda fn: fn.__name__)
def test_not_lifted(fn: Any, caplog: pytest.LogCaptureFixture) -> None:
    reason, args = REFUSED[fn]
    caplog.set_level(logging.INFO, "kdacompile.capture")
    with torch.no_grad():  # the verdict of an inference is one for training, too
        assert agrees(compiled(fn), fn, args)
    assert fn.__name__ not in lifted()
    told = [line for line in caplog.messages if line.startswith(f"not lifted: {fn.__name__}")]
    assert any(reason in line or "differ" in line for line in told)


def decides(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.shape[1] // 2 > 20


def test_where_a_decision_turns_is_visited() -> None:
    concolic = Concolic(decides, identify(decides))  # type: ignore[arg-type]
    run = lambda length: concolic.run(concolic.fn, operands(length), 1, length)  # noqa: E731
    assert [run(5), run(9)] == [False, False]
    assert to_visit(concolic.runs, 1, 5) == {(1, length) for length in (2, 3, 41, 42, 43)}


# -- what is exchanged ------------------------------------------------------------------------------------------------


def test_defaults_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run, args = compiled(retention), operands(18)
    assert agrees(run, retention, args)
    assert lifted() == {"retention"}
    monkeypatch.setattr(retention, "__defaults__", (0.25,))
    assert agrees(run, retention, args)


def normalizes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(1):
        v = F.normalize(v, dim=-1)
    return retention(q, k, v)


def test_a_library_function_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    run, args = compiled(normalizes), operands(18)
    assert agrees(run, normalizes, args)
    assert lifted() == {"normalizes"}

    def twice(x: Tensor, dim: int) -> Tensor:
        return x * 2

    monkeypatch.setattr(F, "normalize", twice)
    assert agrees(run, normalizes, args)
    assert agrees(run, normalizes, operands(40))


def reads_a_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(1):
        v = v * 3 if torch.backends.cudnn.deterministic else v
    return retention(q, k, v)


def test_a_flag_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    run, args = compiled(reads_a_flag), operands(18)
    assert agrees(run, reads_a_flag, args)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert agrees(run, reads_a_flag, args)
    torch._dynamo.reset()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())  # another process, with the same verdicts on disk
    assert agrees(compiled(reads_a_flag), reads_a_flag, args)


def grows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return grow(q) + k + v


def test_another_function_under_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``from torch import exp as grow`` became ``from torch import exp2 as grow``."""
    before = identify(grows).digest  # type: ignore[arg-type]
    monkeypatch.setitem(globals(), "grow", torch.exp2)
    assert identify(grows).digest != before  # type: ignore[arg-type]


# -- what the caller may do with the result ---------------------------------------------------------------------------


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, V], and whole in memory like that."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * 0.5 + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 2)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, H, V] over the same memory."""
    out = v
    for _ in range(1):
        out = heads_first(q, k, v).transpose(1, 2)
    return out


@pytest.mark.parametrize("fn", [heads_first, turned], ids=lambda fn: fn.__name__)
def test_results_are_laid_out_as_the_function_does(fn: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fn(q, k, v)
        out = out if fn is heads_first else out.transpose(1, 2)
        return out.view(out.shape[0], out.shape[1] * out.shape[2], -1)

    run = torch.compile(model, backend="kda", options={"kda.inner": "eager"})
    with torch.no_grad():
        for length in (18, 30):
            args = operands(length)
            assert agrees(run, model, args)
    assert fn.__name__ in lifted()
