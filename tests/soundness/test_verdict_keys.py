"""Two functions that compute something else have two verdicts, however alike they are."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable

import pytest
import torch

from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import identify

TEXT = """
def helper(x, power={default}):
    return x ** power

def function(q, k, v, *, rate={keyword}):
    state = {literal}
    for t in range(q.shape[1]):
        try:
            state = state * TABLE[0] + helper(q[:, t]).to(DTYPE)
        except {handled}:
            state = {fallback}
    return (lambda x: x * {inner})(state)
"""
DEFAULT = {
    "default": "2", "keyword": "0.5", "literal": "0.0", "handled": "ValueError", "fallback": "q", "inner": "1.5",
}  # fmt: skip
GLOBALS = {"TABLE": (0.5, (1, 2.0)), "DTYPE": torch.float32}
CHANGES = {
    "default": ["2.0", "3", "True"],
    "keyword": ["0.25", "1", "None"],
    "literal": ["-0.0", "0", "1e-9", "False", "'0'"],
    "handled": ["IndexError"],
    "fallback": ["k"],
    "inner": ["1.25", "1.5000000000000002"],
}


def made(scope: dict[str, object], **parts: str) -> types.FunctionType:
    names = {**GLOBALS, **scope, "__name__": "somewhere"}
    exec(TEXT.format(**{**DEFAULT, **parts}), names)
    function = names["function"]
    assert isinstance(function, types.FunctionType)
    return function


def test_every_literal_table_and_dtype_counts() -> None:
    functions = [made({})]
    functions += [made({}, **{part: text}) for part, texts in CHANGES.items() for text in texts]
    functions += [made({"TABLE": (0.5, (1, 2.5))}), made({"TABLE": (0.5, (1, 2))}), made({"TABLE": (0.5, 1, 2.0)})]
    functions += [made({"DTYPE": torch.bfloat16})]
    digests = [identify(each).digest for each in functions]
    assert all(one != other for one, other in itertools.combinations(digests, 2))
    assert identify(made({})).digest == digests[0]


@pytest.mark.parametrize(
    "table", [[0.5], {"rate": 0.5}, torch.ones(2), (0.5,) * 40], ids=["list", "dict", "tensor", "long"]
)
def test_tables_that_may_change_or_are_long(table: object) -> None:
    with pytest.raises(Unliftable):
        identify(made({"TABLE": table}))


def test_a_closure_counts() -> None:
    def closed(rate: object) -> Callable[..., object]:
        return lambda q: q * rate

    digests = {identify(closed(rate)).digest for rate in (0.5, 0.25, 1, True, torch.float16)}  # type: ignore[arg-type]
    assert len(digests) == 5
