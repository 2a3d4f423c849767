"""Regions with an open length: what holds at the captured length only is left alone, and right at every length."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kdacompile.graph.crossings import Line, beyond_crossings, line_of
from kdacompile.graph.positions import Edge
from kdacompile.search.matching import FIXED_GRAPHS
from tests.backend.layers import delta_arguments, patterns
from tests.backend.test_dynamic import at_each, every

Mask = Callable[[Tensor, Tensor], Tensor]

SHORT, LONG = 48, 400
EIGHT = 8


def attention(mask: Mask, dtype: torch.dtype = torch.int64) -> Callable[..., Tensor]:
    """Linear attention over [B, T, H, D], where ``mask(i, j)`` weighs token j for token i."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        place = torch.arange(q.shape[2], dtype=dtype)
        weights = mask(place[:, None], place[None, :]).to(q.dtype)
        return ((q @ k.transpose(-1, -2) * weights.tril()) @ v).transpose(1, 2)

    return fn


def blocks(i: Tensor, size: int) -> Tensor:
    return torch.arange(i.numel() // size).repeat_interleave(size)


def split_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token counts, and those past 160 twice."""
    many = EIGHT * 20
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    v = torch.cat([v[:, :, :many], v[:, :, many:] * 2], 2)
    return ((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2)


def scaled_past(many: int) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q * (1 + q.shape[2] // (many * 2)) @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2)

    return fn


def window_of_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of 16 tokens see the four before them."""
    place = torch.arange(q.shape[1]).view(-1, 16)
    block = (place[:, :1].expand(-1, 16).reshape(-1)).to(torch.float32) / 16
    return attention(lambda i, j: block[:, None] - block[None, :] < 4)(q, k, v)


def documents(positions: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Documents packed one after the other, found where positions do not go on: what transformers' masks do."""

    def mask(i: Tensor, j: Tensor) -> Tensor:
        place = positions(i[:, 0])
        number = (torch.diff(place, prepend=place[:1] - 1, dim=-1) != 1).cumsum(-1)
        return (number[i] == number[j]) & (place[i] >= place[j])

    return attention(mask)


DECLINED: dict[str, Callable[..., Tensor]] = {
    "a document ends far on": documents(lambda i: torch.cat([i[: EIGHT * 20], i[EIGHT * 20 :] + 1])),
    "a document begins far on": documents(lambda i: torch.where(i < EIGHT * 20, i, i - EIGHT * 20)),
    "positions from the end": attention(lambda i, j: i[:, 0][i - EIGHT * 3] >= i[:, 0][j - EIGHT * 3]),
    "positions with a gap": attention(
        lambda i, j: torch.cat([i[:20], i[20:] + EIGHT * 10]) - torch.cat([j[:, :20], j[:, 20:]], 1) < EIGHT * 20
    ),
    "one number past a length": attention(lambda i, j: (i - i + i.shape[0] < EIGHT * 20) | (i - j < EIGHT)),
    "shift": attention(lambda i, j: (i >> 8) == (j >> 8)),
    "divided twice": attention(lambda i, j: i // 16 // 16 == j // 16 // 16),
    "fraction": attention(lambda i, j: (i - j) * 0.004 < 1),
    "root": attention(lambda i, j: (i - j).clamp(min=0).sqrt() < 16),
    "int8": attention(lambda i, j: i >= j, torch.int8),
    "window of blocks": window_of_blocks,
    "bfloat16": attention(lambda i, j: i > j - 1, torch.bfloat16),
    "square": attention(lambda i, j: (i - j) * (i - j) < EIGHT**5),
    "remainder": attention(lambda i, j: i % (EIGHT * 20) >= j % (EIGHT * 20)),
    "window made of numbers": attention(lambda i, j: i - j < sum([EIGHT] * 20)),
    "first tokens": attention(lambda i, j: j < EIGHT * 20),
    "power": attention(lambda i, j: torch.exp(-(((i - j) / 300.0) ** 8))),
    "bits": attention(lambda i, j: (i & 256) == (j & 256)),
    "sum of masks": attention(lambda i, j: (i >= j).to(torch.int64).cumsum(-1) < EIGHT * 20),
    "logarithm": attention(lambda i, j: torch.log(i - j + 1.0).clamp(min=5) < 5.1),
    "rounded": attention(lambda i, j: torch.round((i - j) / 500.0) < 0.5),
    "table": attention(lambda i, j: torch.where(i - j < EIGHT * 20, 1.0, 0.5)),
    "tokens put together": split_tokens,
    "a factor from the length": scaled_past(EIGHT * 10),
    "sigmoid": attention(lambda i, j: torch.sigmoid((EIGHT * 20 - (i - j)) * 50.0)),
    "triangle": attention(lambda i, j: torch.ones(i.numel(), i.numel()).triu(-EIGHT * 20)),
    "int16": attention(lambda i, j: (i * 300).to(torch.int16) >= (j * 300).to(torch.int16)),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_not_known_at_other_lengths(name: str) -> None:
    fn = DECLINED[name]
    calls = [delta_arguments(1, length)[:3] for length in (SHORT, LONG)]
    agreed, report = at_each(fn, calls, every(3, 1))
    assert all(agreed), [str(match) for match in report.matches]


TOGETHER: dict[str, Callable[..., Tensor]] = {
    "slopes of one": attention(lambda i, j: (i - j <= 150) | (j <= 100)),
    "two, through the first token": attention(lambda i, j: (i < 2 * j) | (j <= 100)),
    "three": attention(lambda i, j: (i - 3 * j <= 10) | (j <= 60)),
    "three halves": attention(lambda i, j: (2 * i - 3 * j <= 0) | (j <= 100)),
    "a half of one": attention(lambda i, j: (i * 0.5 - j <= 50) | (j <= 100)),
    "five": attention(lambda i, j: (i - 5 * j <= 10) | (j <= 60)),
}
"""Masks of two comparisons. Each comes out both ways at some 150 tokens; both are false for one pair of positions from
203, 252 or 320 tokens on."""


@pytest.mark.parametrize("length", [9, 200])
@pytest.mark.parametrize("name", TOGETHER)
def test_comparisons_that_turn_together_later_than_each(name: str, length: int) -> None:
    calls = [delta_arguments(1, length)[:3] for length in (length, 400)]
    agreed, report = at_each(TOGETHER[name], calls, dynamic=True)
    assert all(agreed), [str(match) for match in report.matches]


def twice_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tokens see what tokens 100 places before them have seen 100 places before."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    place = torch.arange(q.shape[2])
    gap, scores = place[:, None] - place[None, :], q @ k.transpose(-1, -2)
    far = scores * (gap > 100).to(q.dtype)
    return (scores * (gap >= 0).to(q.dtype) @ v + far @ (far @ v)).transpose(1, 2)


def thrice_shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def later(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[2])
        return x[:, :, (place - 60).clamp(min=0)] * (place >= 60)[:, None]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(-1, -2)).tril()
    seen = weights @ v
    return (seen + weights @ later(later(later(seen)))).transpose(1, 2)


def inverse_of_squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The delta rule with the inverse of a triangle as a product of its squares, right up to 64 tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    power, unit = -(k @ k.transpose(-1, -2)).tril(-1), torch.eye(q.shape[2], dtype=q.dtype)
    inverse = unit + power
    for _ in range(5):
        power = power @ power
        inverse = inverse @ (unit + power)
    return ((q @ k.transpose(-1, -2)).tril() @ (inverse @ v)).transpose(1, 2)


@pytest.mark.parametrize("fn", [twice_far, thrice_shifted, inverse_of_squares])
@pytest.mark.parametrize("length", [9, 48])
def test_comparisons_that_follow_each_other(fn: Callable[..., Tensor], length: int) -> None:
    """Nothing of it is seen before 203, 181 and 65 tokens."""
    calls = [[x.double() for x in delta_arguments(1, length)[:3]] for length in (length, 220)]
    agreed, report = at_each(fn, calls, dynamic=True)
    assert all(agreed), [str(match) for match in report.matches]


def line(steps: tuple[int, ...], offset: float, size: int = 64) -> Line:
    rank = len(steps)
    one, other = (Edge("ge", 0.0, 0.0, offset, tuple(map(Fraction, steps)), (n,) * rank) for n in (size, size + 3))
    found = line_of(one, other, {"T": size}, {"T": size + 3})
    assert found is not None
    return found


def test_how_far_out_lines_cross() -> None:
    window, sink, steep = line((1, -1), -150.0), line((1,), -100.0), line((2, -10), 20.0)
    assert beyond_crossings([window, sink]) == 150 + 100 + 4
    assert beyond_crossings([window, line((-2, 2), 40.0)]) == 0  # parallel
    assert beyond_crossings([window, line((1,), -1.0)]) == 0  # where the first tokens are
    assert steep.steps == ((-2, 1), (-1, -5)) and steep.offset == 10.0
    assert beyond_crossings([steep, sink]) == 10 + 5 * 100 + 2 * 6
    assert beyond_crossings([steep]) == 2 * 10 * 5 + 20  # with the same one, transposed


STEPWISE: dict[str, Callable[[Tensor], Tensor | float]] = {
    "the smaller of two": lambda x: min(x.shape[2], 64) / 64,
    "whole parts": lambda x: x.shape[2] // 64,
    "a power": lambda x: 2.0 ** (min(x.shape[2], 64) - 64),
    "a tensor of one number": lambda x: torch.tensor(x.shape[2] // 64, dtype=x.dtype),
    "filled": lambda x: torch.full((1, 1, 1, 1), x.shape[2] // 64, dtype=x.dtype),
    "counted ones": lambda x: torch.ones(x.shape[2] // 64).sum(),
    "a mean of some": lambda x: torch.ones(64)[: min(x.shape[2], 64)].sum() / 64,
    "a mask": lambda x: torch.arange(x.shape[2])[:, None] < (x.shape[2] // 64) * 10**6,
    "the last position": lambda x: torch.arange(64)[: min(x.shape[2], 64)][-1] / 63,
}
"""Factors that are 1 at 75 tokens and at every length near it."""


@pytest.mark.parametrize("name", STEPWISE)
def test_a_factor_that_changes_in_steps(name: str) -> None:
    factor = STEPWISE[name]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        past = (q @ k.transpose(-1, -2)).tril(-1) @ (v * factor(v))
        return (past + (q * k).sum(-1, keepdim=True) * v).transpose(1, 2)

    calls = [delta_arguments(1, length)[:3] for length in (75, 8, 200)]
    agreed, report = at_each(fn, calls, every(3, 1))
    assert all(agreed), [str(match) for match in report.matches]


OPEN: dict[str, Callable[..., Tensor]] = {
    "causal": attention(lambda i, j: i >= j),
    "causal in halves": attention(lambda i, j: i + 0.5 > j),
    "turned around": attention(lambda i, j: (j - i) <= 0),
    "where": attention(lambda i, j: torch.where(i >= j, 1.0, 0.0)),
    "counted": attention(lambda i, j: torch.ones_like(i).cumsum(0) >= torch.ones_like(j).cumsum(1)),
    "float32": attention(lambda i, j: i >= j, torch.float32),
    "one document": documents(lambda i: i),
    "one document that begins later": documents(lambda i: i + 5),
    "looked up": attention(lambda i, j: i[:, 0][i] >= i[:, 0][j]),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_is_affine_in_positions_stays_open(name: str) -> None:
    fn = OPEN[name]
    calls = [delta_arguments(1, length)[:3] for length in (SHORT, LONG)]
    agreed, report = at_each(fn, calls, every(3, 1))
    assert all(agreed)
    assert len(patterns(report)) == 1, str(report)  # one graph for both


FIXED = ("window made of numbers", "fraction", "table")


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", FIXED)
def test_what_is_not_known_elsewhere_has_graphs_of_its_own(name: str, dynamic: bool | None) -> None:
    """As many as are allowed, each guarded; then one for all sizes, which is Inductor's."""
    calls = [delta_arguments(1, length)[:3] for length in (48, 32, 96, 17, 21, 33, 57, 400)]
    agreed, report = at_each(DECLINED[name], calls, dynamic=dynamic)
    assert all(agreed)
    alone = [match for match in report.matches if match.checked.endswith(", for these sizes alone")]
    first = 0 if dynamic else 1  # captured before any size was open
    assert len(alone) == FIXED_GRAPHS - first and len(report.matches) == FIXED_GRAPHS, str(report)
    assert report.graph_count == FIXED_GRAPHS + 1


def test_sizes_that_the_caller_has_left_open_stay_open() -> None:
    torch._dynamo.reset()
    run = torch.compile(DECLINED["table"], backend="kda", options={"kda.inner": "eager"})
    for length in (48, 32, 400):
        inputs = delta_arguments(1, length)[:3]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        assert torch.allclose(run(*inputs), DECLINED["table"](*inputs), atol=1e-4)


def test_an_op_that_is_there_keeps_its_open_sizes() -> None:
    """One graph for all, though another region of it would rather have one for each."""
    other = DECLINED["table"]

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return OPEN["causal"](q, k, v), other(k, q, v)

    calls = [delta_arguments(1, length)[:3] for length in (48, 32, 96, 400)]
    agreed, report = at_each(both, calls, dynamic=True)
    assert all(agreed)
    assert report.graph_count == 1 and len(report.matches) == 1, str(report)
