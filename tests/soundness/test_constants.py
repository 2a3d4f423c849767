"""Constants are what the model computes: positions, masks and decays in bfloat16 or int8 are not those in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.soundness.programs import explained, matched, refused, tokens

T = 400
HALF = torch.bfloat16

CAUSAL: dict[str, Callable[[int], Tensor]] = {
    "arange in bfloat16": lambda n: torch.arange(n, dtype=HALF)[:, None] >= torch.arange(n, dtype=HALF),
    "cast to bfloat16": lambda n: torch.arange(n).to(HALF)[:, None] > torch.arange(n).to(HALF) - 1,
    "a cumsum in bfloat16": lambda n: (
        torch.ones(n, dtype=HALF).cumsum(0)[:, None] >= torch.ones(n, dtype=HALF).cumsum(0)
    ),
    "positions in int8": lambda n: torch.arange(n).to(torch.int8)[:, None] >= torch.arange(n).to(torch.int8),
    "positions in uint8": lambda n: torch.arange(n).to(torch.uint8)[:, None] >= torch.arange(n).to(torch.uint8),
    "a linspace in bfloat16": lambda n: (
        torch.linspace(0, 30.0, n, dtype=HALF)[:, None] >= torch.linspace(0, 30.0, n, dtype=HALF)
    ),
    "a difference in bfloat16": lambda n: (torch.arange(n)[:, None] - torch.arange(n) + 1000).to(HALF) >= 1000,
}


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.mT).masked_fill(~mask, 0.0) @ v).transpose(1, 2)


def given() -> tuple[Tensor, Tensor, Tensor]:
    found = tokens(T)
    return found["q"], found["k"], found["v"]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_that_round(name: str) -> None:
    refused(lambda q, k, v: masked(q, k, v, CAUSAL[name](T)), given())


def test_a_causal_mask_that_does_not() -> None:
    matched(lambda q, k, v: masked(q, k, v, torch.arange(T)[:, None] >= torch.arange(T)), given(), "linear_attention")


def decayed(q: Tensor, k: Tensor, v: Tensor, total: Tensor) -> Tensor:
    """One decay for all heads, from summed log decays ``[T]``."""
    gap = (total[:, None] - total).tril().exp().tril().to(q.dtype)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.mT * gap) @ v).transpose(1, 2)


def slopes(q: Tensor, k: Tensor, v: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Decays of heads as RetNet's code has them for language models, between two tensors."""
    H, n = q.shape[2], torch.arange(q.shape[1])
    slope = (1 - torch.linspace(least.log(), most.log(), H).exp()).log2()
    table = torch.exp2((n[:, None] - n).tril() * slope[:, None, None]).tril()
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.mT * table) @ v).transpose(1, 2)


def test_decays_between_tensors() -> None:
    ends = torch.tensor([1 / 32, 1 / 512])
    q, k, v = (x[:, :40] for x in given())
    matched(lambda q, k, v: slopes(q, k, v, torch.tensor(1 / 32), torch.tensor(1 / 512)), (q, k, v), "retention")
    compiled = torch.compile(slopes, backend="kda", options={"kda.inner": "eager"})
    for least, most in (ends, ends * 2):  # arguments are no constants
        actual, expected = compiled(q, k, v, least, most), slopes(q, k, v, least, most)
        assert relative_error(actual, expected) < 1e-5


SUMS: dict[str, Callable[[int], Tensor]] = {
    "summed in bfloat16": lambda n: torch.full((n,), -0.05, dtype=HALF).cumsum(0),
    "positions in bfloat16": lambda n: -0.05 * torch.arange(n, dtype=HALF),
    "positions cast": lambda n: -0.05 * torch.arange(n).to(HALF).float(),
    "summed in float16": lambda n: torch.full((n,), -0.3, dtype=torch.float16).cumsum(0),
    "positions in int8": lambda n: -0.05 * torch.arange(n).to(torch.int8).float(),
    "rounded positions": lambda n: -0.05 * (torch.arange(n) / 3.0).to(HALF).float() * 3.0,
}


@pytest.mark.parametrize("name", SUMS)
def test_decays_that_round(name: str) -> None:
    refused(lambda q, k, v: decayed(q, k, v, SUMS[name](T)), given())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_within_their_rounding(dtype: torch.dtype) -> None:
    matched(lambda q, k, v: decayed(q, k, v, -0.05 * torch.arange(T, dtype=dtype)), given(), "retention")


@pytest.mark.parametrize("name", SUMS)
def test_decays_that_round_among_tensors_that_do(name: str) -> None:
    """A table in as few bits as q, k and v is a power of a decay up to its own rounding, or none."""
    q, k, v = (x.to(HALF) for x in given())
    refused(lambda q, k, v: decayed(q, k, v, SUMS[name](T)), (q, k, v), bound=0.02)


Table = Callable[[int, torch.dtype], Tensor]


def distance(n: int) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)


def gamma() -> Tensor:
    return torch.tensor([0.9, 0.97])


POWERS: dict[str, Table] = {
    "of what is rounded": lambda n, d: (gamma().to(d)[:, None, None] ** distance(n)).tril(),
    "of one that is": lambda n, d: (torch.tensor(0.95, dtype=d) ** distance(n)).tril(),
    "of a number": lambda n, d: torch.where(distance(n) >= 0, 0.95 ** distance(n).clamp_min(0).to(d), 0.0),
    "of its logarithm": lambda n, d: (distance(n) * gamma().log().to(d)[:, None, None]).exp().tril(),
    "of a logarithm of it": lambda n, d: (distance(n).to(d) * gamma().to(d).log()[:, None, None]).exp().tril(),
    "rounded themselves": lambda n, d: (gamma()[:, None, None] ** distance(n)).tril().to(d),
}


@pytest.mark.parametrize("length", [7, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POWERS)
def test_tables_in_16_bits(name: str, dtype: torch.dtype, length: int) -> None:
    """What is rounded to them may be another decay than in more bits: the one the table holds is the op's."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return times(q, k, v, POWERS[name](q.shape[1], q.dtype))

    q, k, v = (tokens(length)[name].to(dtype) for name in "qkv")
    report = explained(program, (q, k, v))
    assert [match.pattern for match in report.matches] == ["retention"], str(report)
    want = times(q.double(), k.double(), v.double(), POWERS[name](length, dtype).double())
    assert relative_error(report.result, want) <= 2 * relative_error(program(q, k, v), want)


def times(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.mT * table) @ v).transpose(1, 2)


NO_POWERS: dict[str, Table] = {
    "two decays": lambda n, d: (0.5 * 0.95 ** distance(n) + 0.5 * 0.8 ** distance(n)).tril().to(d),
    "one more than itself": lambda n, d: (
        (1.001 * torch.tensor(0.9, dtype=d) ** distance(n)).tril(-1) + torch.eye(n, dtype=d) / 2
    ),
    "of squares": lambda n, d: (torch.tensor(0.99, dtype=d) ** distance(n).square()).tril(),
    "in a window": lambda n, d: (torch.tensor(0.9, dtype=d) ** distance(n)).tril().triu(-5),
    "the other way round for a head": lambda n, d: (
        torch.tensor([0.9, -0.9], dtype=d)[:, None, None] ** distance(n)
    ).tril(),
    "of another token": lambda n, d: (torch.tensor(0.9, dtype=d) ** (distance(n) + (distance(n) == 3).long())).tril(),
    "from a token on": lambda n, d: (
        torch.where(torch.arange(n) > 7, torch.tensor(0.9, dtype=d), torch.tensor(0.95, dtype=d))
        .expand(n, n)
        .tril(-1)
        .flip(-1)
        .cumprod(-1)
        .flip(-1)
        .tril()
    ),
    "of what is between": lambda n, d: (torch.tensor(0.9, dtype=d) ** (distance(n) // 2)).tril(),
}


@pytest.mark.parametrize("name", NO_POWERS)
def test_tables_in_16_bits_that_are_none(name: str) -> None:
    q, k, v = (tokens(40)[name].to(HALF) for name in "qkv")
    refused(lambda q, k, v: times(q, k, v, NO_POWERS[name](q.shape[1], HALF)), (q, k, v), bound=0.02)


def test_a_reason_names_the_dtype() -> None:
    q, k, v = (x.to(HALF) for x in given())
    ours = explained(lambda q, k, v: decayed(q, k, v, SUMS["positions in bfloat16"](T)), (q, k, v))
    assert "what rounding to bfloat16 makes of a constant are other numbers" in str(ours)


TENTH = 0.1
LEFT: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a decay next to one": lambda s, t: s * torch.full((), 1 + 0.5e-7) * 1e7 - s * 1e7,
    "a tenth and a quotient": lambda s, t: (
        s * 0.9 + s * s * s * torch.full((), TENTH) - s * s * s * torch.ones(()) / 10
    ),
    "a running sum and a product": lambda s, t: (
        s + s * s * torch.full((T,), TENTH).cumsum(0)[t] - s * s * (torch.arange(1, T + 1) * TENTH)[t]
    ),
    "two digits of one number": lambda s, t: s * 0.9 + s * s * 0.3 - s * s * 0.3000000000000003,
}
"""The state before each token; what two roundings of one number leave is part of it, as large as the state's square."""


@pytest.mark.parametrize("name", LEFT)
def test_what_rounding_leaves_of_a_difference(name: str) -> None:
    """It is nothing in exact numbers, where it was matched: 100 % wrong with values of 1000, or of 10^15."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, outputs = torch.zeros(1, q.shape[2], q.shape[3], v.shape[3], dtype=v.dtype), list[Tensor]()
        for t in range(q.shape[1]):
            state = LEFT[name](state, t) + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(outputs, 1)

    found = tokens(8)
    refused(program, (found["q"].double(), found["k"].double(), found["v"].double()))


def retained(q: Tensor, k: Tensor, v: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    place = torch.arange(q.shape[1])
    decay = (rate ** (place[:, None] - place).to(dtype)).tril()
    return (((q.transpose(1, 2) @ k.transpose(1, 2).mT) * decay) @ v.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_rate_that_is_an_argument(dtype: torch.dtype) -> None:
    """``0.9 ** n`` of whole n is a table in float32, whatever q is: the op has the power itself, in q's float64, and of
    each call's own rate.
    """
    torch._dynamo.reset()
    compiled = torch.compile(retained, backend="kda", options={"kda.inner": "eager"})
    found = tokens(20)
    q, k, v = (found[name].double() for name in ("q", "k", "v"))
    with collecting() as report:
        for rate in (0.9, 0.5, 0.7, 1.0, 0.9, 0.0):
            result = compiled(q, k, v, rate, dtype)
            assert relative_error(result, retained(q, k, v, rate, torch.float64)) < 1e-14, rate
            assert relative_error(result, retained(q, k, v, rate, dtype)) < 1e-6, rate
    assert {match.checked for match in report.matches} == {"exactly"}, str(report)
    assert [match.pattern for match in report.matches][:3] == ["retention"] * 3, str(report)


def cast(dtype: torch.dtype, more: float = 0.0) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Retention by a table in another dtype than q, k and v have, to whose second diagonal ``more`` is added."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gap = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        table = torch.where(gap >= 0, torch.full((), 0.9, dtype=dtype) ** gap, 0.0)
        scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT) * (table + more * (gap == 2)).to(q.dtype)
        return (scores @ v.transpose(1, 2)).transpose(1, 2)

    return program


def test_a_table_that_is_cast_to_float64() -> None:
    """From float32 it is the power, as where q's dtype widens it; bfloat16's own numbers are too far from that."""
    q, k, v = (tokens(20)[name].double() for name in ("q", "k", "v"))
    matched(cast(torch.float32), (q, k, v), "retention", 1e-6)
    refused(cast(torch.bfloat16), (q, k, v), 1e-12)
    refused(cast(torch.float32, 1e-4), (q, k, v), 1e-12)
