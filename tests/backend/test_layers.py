"""Several layers that only sums and products join: each is found, whatever else its group holds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from tests.compare import worst_error

BATCH, LENGTH, HEADS, SIZE, VALUES = 1, 4, 3, 6, 5


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT).tril() @ v).transpose(1, 2)


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    s = k.new_zeros(BATCH, HEADS, SIZE, VALUES)
    outs: list[Tensor] = []
    for t in range(LENGTH):
        s = s * g[:, t].exp()[..., None, None]
        fresh = (v[:, t] - (s * k[:, t][..., None]).sum(-2)) * beta[:, t][..., None]
        s = s + k[:, t][..., None] * fresh[..., None, :]
        outs.append((s * q[:, t][..., None]).sum(-2))
    return torch.stack(outs, 1), s


def in_a_row(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    x = linear(q, k, v)
    return linear(q, k, 0.5 * x + v) + x


def with_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    x, first = delta(q, k, v, g, beta)
    y, second = delta(k, q, x + v, g, beta)
    return y, first, second


def joined_by_a_sum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    x, _ = delta(q, k, v, g, beta)
    return delta(q + x.sum(-1, keepdim=True), k, v, g, beta)[0]


def side_by_side(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return 2 * linear(q, k, v) + delta(q, k, v, g, beta)[0]


def one_reads_the_other_twice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    x = linear(q, k, v)
    return linear(q, 2 * k, x + v) * linear(q, k, x * v)


@pytest.mark.parametrize(
    ("fn", "patterns"),
    [
        (in_a_row, ["linear_attention"] * 2),
        (with_states, ["gated_delta_rule"] * 2),
        (joined_by_a_sum, ["gated_delta_rule"] * 2),
        (side_by_side, ["gated_delta_rule", "linear_attention"]),
        (one_reads_the_other_twice, ["linear_attention"] * 3),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_every_layer_is_found(fn: Callable[..., Any], patterns: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.5 * torch.randn(BATCH, LENGTH, HEADS, size, generator=generator) for size in (SIZE, SIZE, VALUES))
    gates = torch.rand(2, BATCH, LENGTH, HEADS, generator=generator)
    arguments = (q, k, v, -gates[0], gates[1])
    torch._dynamo.reset()
    report = kdacompile.explain(fn)(*arguments)
    assert sorted(match.pattern for match in report.matches) == patterns, str(report)
    assert not report.rejections, str(report)
    assert worst_error(report.result, fn(*arguments)) < 1e-5


BOUNDS = (0, 3, 3, 9)
"""Of a packed batch, with an empty sequence."""


def each_sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, into: str) -> Tensor | tuple[Tensor, Tensor]:
    """One loop per sequence; the results are put beside each other."""
    outs: list[Tensor] = []
    states: list[Tensor] = []
    for start, end in pairwise(BOUNDS):
        s = k.new_zeros(BATCH, HEADS, SIZE, VALUES)
        own = [x[:, start:end] for x in (q, k, v, g)]
        rows: list[Tensor] = []
        for t in range(end - start):
            qt, kt, vt, gt = (x[:, t] for x in own)
            s = s * gt.exp()[..., None, None] + kt[..., None] * vt[..., None, :]
            rows.append(torch.einsum("bhk,bhkv->bhv", qt, s))
        outs += [torch.stack(rows, 1)] if rows else []
        states.append(s)
    if into == "cat":
        return torch.cat(outs, 1)
    if into == "states":
        return torch.cat(outs, 1), torch.stack(states)
    out = torch.empty_like(v)
    for start, end in pairwise(BOUNDS):
        if end > start:
            out[:, start:end] = outs.pop(0)
    return out


@pytest.mark.parametrize("into", ["cat", "states", "buffer"])
def test_packed_sequences(into: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = (BATCH, BOUNDS[-1], HEADS)
    q, k, v = (0.5 * torch.randn(*tokens, size, generator=generator) for size in (SIZE, SIZE, VALUES))
    arguments = (q, k, v, -torch.rand(tokens, generator=generator), into)
    torch._dynamo.reset()
    report = kdacompile.explain(each_sequence, options={"kda.lift": False})(*arguments)
    long = sum(end - start > 1 for start, end in pairwise(BOUNDS))
    assert [match.pattern for match in report.matches] == ["simple_gla"] * long, str(report)
    assert worst_error(report.result, each_sequence(*arguments)) < 1e-5


def test_a_chunk_s_share_is_no_layer() -> None:
    """What one chunk adds to its own tokens is a linear attention too, but the chunk's keys are read elsewhere."""

    def odd_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        s = k.new_zeros(BATCH, HEADS, SIZE, VALUES)
        outs: list[Tensor] = []
        for i in range(0, 9, 3):
            qc, kc, vc = (x[:, :, i : i + 3] for x in (q, k, v))
            outs.append((qc @ kc.mT).tril() @ vc + qc @ s)
            s = s * s + kc.mT @ vc
        return torch.cat(outs, 2)

    torch.manual_seed(0)
    arguments = [torch.randn(BATCH, 9, HEADS, size) for size in (SIZE, SIZE, VALUES)]
    torch._dynamo.reset()
    report = kdacompile.explain(odd_chunks, options={"kda.lift": False})(*arguments)
    assert not report.matches, str(report)
    assert worst_error(report.result, odd_chunks(*arguments)) < 1e-6


def channel_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    s = k.new_zeros(BATCH, HEADS, SIZE, VALUES)
    outs: list[Tensor] = []
    for t in range(LENGTH):
        s = s * g[:, t].exp()[..., None] + k[:, t][..., None] * v[:, t][..., None, :]
        outs.append((s * q[:, t][..., None]).sum(-2))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("uniform_first", [True, False])
def test_layers_with_the_same_region_may_have_another_gate(uniform_first: bool) -> None:
    """One gate is expanded along the channels before its activation, the other differs in each: one text, two roles."""
    tokens = (BATCH, LENGTH, HEADS)
    torch.manual_seed(0)
    q, k, v, wide = (torch.randn(*tokens, size) for size in (SIZE, SIZE, VALUES, SIZE))
    narrow = torch.randn(*tokens, 1)

    def both(q: Tensor, k: Tensor, v: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        gates = [-torch.nn.functional.softplus(x.expand(*tokens, SIZE)) for x in (narrow, wide)]
        one, other = gates if uniform_first else gates[::-1]
        return channel_gated(q, k, v, one), channel_gated(q.sin(), k.sin(), v.sin(), other)

    torch._dynamo.reset()
    report = kdacompile.explain(both, options={"kda.lift": False})(q, k, v, narrow, wide)
    assert worst_error(report.result, both(q, k, v, narrow, wide)) <= 1e-6
    assert {match.pattern for match in report.matches} == {"simple_gla", "gla"}, str(report)


def streams(x: Tensor, mix: Tensor, post: Tensor, weight: Tensor) -> Tensor:
    """Hyper-connections: a token's streams are mixed, and what a layer gives is spread over them, twice."""
    for _ in range(2):
        hidden = torch.tanh((x * post[..., None]).sum(2) @ weight)
        x = post[..., None] * hidden[..., None, :] + mix.mT @ x
    return x


@pytest.mark.parametrize("tokens", [1, 7])
def test_streams_of_one_token_are_nobody_s_near_miss(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, tokens, 3, 8), (2, tokens, 3, 3), (2, tokens, 3), (8, 8))
    arguments = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    torch._dynamo.reset()
    report = kdacompile.explain(streams)(*arguments)
    assert not report.matches and not report.rejections, str(report)
