"""Where the field is silent: types and probes alone take every spelling, and none of what is nearly one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from kdacompile.patterns.engine.field import Silent
from kdacompile.patterns.recurrence import exact
from kdacompile.patterns.recurrence.spec import RECURRENCE
from tests.compare import copies, worst_error
from tests.soundness.programs import BOUND, explained, tokens
from tests.soundness.test_far_terms import CARRIES, SEEN, attention, chunks
from tests.soundness.test_small_terms import MASKS, READS, STEPS, loop, parallel, read, write
from tests.spellings import SPELLINGS
from tests.spellings.registry import Spelling


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The field has no word for anything."""

    def say(self: exact.Check) -> bool:
        raise Silent("a test")

    monkeypatch.setattr(exact.Check, "__call__", say)
    monkeypatch.setattr(RECURRENCE.verdicts, "known", {})
    yield


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if s.lengths[0] > 2], ids=lambda s: s.name)
def test_every_spelling_types(spelling: Spelling) -> None:
    inputs = spelling.make_inputs(T=spelling.lengths[0], dtype=spelling.dtypes[0], seed=1)
    report = explained(spelling.fn, inputs, **{"kda.inner": "eager"})
    assert [match.pattern for match in report.matches] == [spelling.pattern], str(report)
    assert all("a test stood in the way" in match.checked for match in report.matches), str(report)


def nothing_wrong(program: Callable[..., Any], inputs: tuple[Tensor, ...], *, whole: bool = True) -> None:
    """Not matched as a whole, and right."""
    own, theirs = copies(inputs), copies(inputs)
    expected = program(*theirs)
    report = explained(program, own, **{"kda.inner": "eager"})
    assert not whole or not [match for match in report.matches if match.mode == "sequence"], str(report)
    assert worst_error((report.result, own), (expected, theirs)) <= BOUND, str(report)


DEGREES = ("add alpha", "addcmul value", "lerp to its square", "an error cubed")


@pytest.mark.parametrize("name", DEGREES)
def test_no_product_of_what_is_linear(name: str) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g", "beta"))
    nothing_wrong(lambda *x: loop(*x, step=STEPS[name], read=read), given)


@pytest.mark.parametrize("name", READS)
def test_no_power_of_what_is_read(name: str) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g", "beta"))
    nothing_wrong(lambda *x: loop(*x, step=write, read=READS[name]), given, whole=False)


@pytest.mark.parametrize("start", [1e-9, -1e-30])
def test_no_state_that_starts_at_a_number(start: float) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g", "beta"))
    nothing_wrong(lambda *x: loop(*x, start=start, step=write, read=read), given)


@pytest.mark.parametrize("name", MASKS)
def test_no_number_in_an_exponent(name: str) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g"))
    nothing_wrong(lambda q, k, v, g: parallel(q, k, v, g, MASKS[name]), given)


@pytest.mark.parametrize("name", SEEN)
def test_probes_that_see_far(name: str) -> None:
    given = tuple(tokens(200, gate=-0.002)[x] for x in ("q", "k", "v", "g"))
    nothing_wrong(lambda q, k, v, g: attention(q, k, v, g, SEEN[name]), given)


@pytest.mark.parametrize("name", CARRIES)
def test_probes_that_see_carries(name: str) -> None:
    given = tuple(tokens(192, gate=-0.4)[x] for x in ("q", "k", "v", "g", "state"))
    nothing_wrong(lambda q, k, v, g, s: chunks(q, k, v, g, s, 64, CARRIES[name]), given, whole=False)


LINEAR: dict[str, Callable[..., Tensor]] = {
    "a key of its own": STEPS["a key of its own"],
    "a state that leaks": STEPS["a state that leaks"],
    "a state that leaks once": lambda s, k, e, v: s + (1 + 5e-11) * k @ e,
    "an error of its own": lambda s, k, e, v: s + k @ e * (1 - 1e-11 * k.square().sum(-2, keepdim=True)),
    "a row of another": lambda s, k, e, v: s + (k + 1e-10 * k.roll(1, -2)) @ e,
}


@pytest.mark.parametrize("name", LINEAR)
def test_probes_that_see_what_is_linear(name: str) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g", "beta"))
    nothing_wrong(lambda *x: loop(*x, step=LINEAR[name], read=read), given)


QUERIES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself, cubed": lambda q: q + 1e-12 * q * q * q,
    "a number": lambda q: q + 1e-10,
    "its size": lambda q: q * (1 + 1e-12 * q.square().sum(-1, keepdim=True)),
    "its inverse": lambda q: q + 1e-12 / (3.0 + q * q),
}


@pytest.mark.parametrize("name", QUERIES)
def test_no_query_but_itself(name: str) -> None:
    given = tuple(tokens(12)[x] for x in ("q", "k", "v", "g", "beta"))
    reads = QUERIES[name]
    nothing_wrong(lambda *x: loop(*x, step=write, read=lambda s, q, v: reads(q) @ s), given, whole=False)
