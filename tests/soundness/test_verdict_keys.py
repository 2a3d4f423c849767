"""Two functions that compute something else have two verdicts, however alike they are."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import identify
from tests.soundness.programs import matched, refused, tokens

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


def decayed(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.mT * table.to(q.dtype)) @ v).transpose(1, 2)


def powers(rate: float = 0.75, dtype: torch.dtype = torch.float64) -> Tensor:
    place = torch.arange(16)
    return (rate ** (place[:, None] - place).to(dtype)).tril()


CAUSAL = torch.ones(16, 16, dtype=torch.bool).tril()
TABLES: dict[str, Callable[[], Tensor]] = {
    "one entry": lambda: powers() * (1 - 1e-3 * torch.eye(16)),
    "one entry, a little": lambda: powers() * torch.where((torch.arange(256) == 48).view(16, 16), 1 + 1e-6, 1.0),
    "the dtype of exponents": lambda: 0.75 ** (torch.arange(16)[:, None] - torch.arange(16)).to(torch.int8).tril(),
    "two diagonals": lambda: powers().tril(-2),
    "one diagonal more": lambda: powers() + 0.1 * torch.eye(16).roll(1, 1).triu(1),
    "a literal": lambda: powers() * (torch.arange(16)[:, None] - torch.arange(16) < 15),
    "both ways": lambda: powers() + powers().mT.triu(1),
    "later rows": lambda: powers() * torch.where(torch.arange(16) > 12, 0.5, 1.0)[:, None],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_region_like_one_that_was_shown(name: str) -> None:
    """Verdicts are remembered by structure: what differs in a table, a literal or a dtype has one of its own."""
    found = tokens(16)
    inputs = found["q"], found["k"], found["v"]
    matched(lambda q, k, v: decayed(q, k, v, powers()), inputs, "retention")
    refused(lambda q, k, v: decayed(q, k, v, TABLES[name]()), inputs)
    matched(lambda q, k, v: decayed(q, k, v, powers(0.5)), inputs, "retention")


LITERALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a factor": lambda w, s: (w * 1.0000001).tril() + 1e-7 * s,
    "a diagonal": lambda w, s: w.tril(1),
    "both halves": lambda w, s: w.tril() + w.triu(1),
    "a sign": lambda w, s: w.tril() - 2 * w.tril(-9),
    "a term": lambda w, s: torch.add(w.tril(), w.tril(-1), alpha=1e-9),
    "another number in its place": lambda w, s: w.masked_fill(~CAUSAL, 1e-7),
}


@pytest.mark.parametrize("name", LITERALS)
def test_a_literal_of_a_region_like_one_that_was_shown(name: str) -> None:
    found = tokens(16)
    inputs = found["q"], found["k"], found["v"]

    def program(q: Tensor, k: Tensor, v: Tensor, bend: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        weights = q.transpose(1, 2) @ k.transpose(1, 2).mT
        return (bend(weights, weights * weights) @ v.transpose(1, 2)).transpose(1, 2)

    matched(lambda q, k, v: program(q, k, v, lambda w, s: w.tril()), inputs, "linear_attention")
    refused(lambda q, k, v: program(q, k, v, LITERALS[name]), inputs)
    matched(lambda q, k, v: program(q, k, v, lambda w, s: w.masked_fill(~CAUSAL, 0.0)), inputs, "linear_attention")
