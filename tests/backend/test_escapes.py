"""Values of a region that something outside it reads: the op takes over the rest, if that is most of the work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.backend.layers import compiled, patterns
from tests.compare import copies, worst_error

BATCH, HEADS, CHUNK, CHUNKS, KEY, VALUE = 2, 3, 4, 3, 12, 10


def arguments(tokens: int = CHUNK * CHUNKS, key: int = KEY, value: int = VALUE) -> tuple[Tensor, ...]:
    """q, k ``[B, H, T, K]``, v ``[B, H, T, V]``, beta and a log gate ``[B, H, T]``."""
    torch.manual_seed(0)
    q, k = (torch.randn(BATCH, HEADS, tokens, key) for _ in range(2))
    v, beta = torch.randn(BATCH, HEADS, tokens, value), torch.rand(BATCH, HEADS, tokens)
    return q, k / k.norm(dim=-1, keepdim=True), v, beta, -torch.rand_like(beta)


def inverse(lower: Tensor) -> Tensor:
    """(I - L)^-1 of a strictly lower L, which is overwritten row by row."""
    for i in range(1, lower.shape[-1]):
        lower[..., i, :i] = lower[..., i, :i].clone() + (
            lower[..., i, :i, None].clone() * lower[..., :i, :i].clone()
        ).sum(-2)
    return lower + torch.eye(lower.shape[-1])


def chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gated delta rule in chunks: outputs, w, u, and the state after each chunk."""
    q, k, v = (x.unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, total = beta.unflatten(2, (-1, chunk))[..., None], gate.unflatten(2, (-1, chunk)).cumsum(-1)
    upper = torch.ones(chunk, chunk, dtype=torch.bool).triu()
    decay = (total[..., :, None] - total[..., None, :]).exp()
    u = inverse(-((k * beta) @ k.mT * decay).masked_fill(upper, 0)) @ (v * beta)
    w = inverse(-((k * beta) @ k.mT).masked_fill(upper, 0)) @ (k * beta)
    state, out = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), torch.zeros_like(v)
    states: list[Tensor] = []
    for i in range(k.shape[2]):
        scores = (q[:, :, i] @ k[:, :, i].mT * decay[:, :, i]).masked_fill_(upper.triu(1), 0)
        new = u[:, :, i] - (w[:, :, i] * total[:, :, i, :, None].exp()) @ state
        out[:, :, i] = (q[:, :, i] * total[:, :, i, :, None].exp()) @ state + scores @ new
        last = total[:, :, i, -1:]
        state = state * last.exp()[..., None] + (k[:, :, i] * (last - total[:, :, i]).exp()[..., None]).mT @ new
        states.append(state)
    return out.flatten(2, 3), w.flatten(2, 3), u.flatten(2, 3), states


def with_transforms(*inputs: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """What a test of kernels wants: the transformed keys and values of all chunks, too."""
    out, w, u, _ = chunks(*inputs, chunk=chunk)
    return out, w, u


def with_states(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    out, _, _, states = chunks(*inputs, chunk=CHUNK)
    return out, torch.stack(states, 2)


def loss(results: Iterable[Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in results]).sum()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_what_is_computed_before_the_scan_is_returned(inner: str) -> None:
    inputs = arguments()
    with torch.no_grad(), collecting() as report:
        results = compiled(with_transforms, inner)(*inputs)
        assert worst_error(results, with_transforms(*inputs)) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]


@torch.no_grad()
def test_of_as_many_channels_the_transforms_are_not_taken_for_states() -> None:
    """w and u have the sizes of a state then, where K could be the number of tokens, in many ways."""
    run, inputs = partial(with_transforms, chunk=16), arguments(48, 32, 32)
    with collecting() as report:
        results = compiled(run)(*inputs)
    assert worst_error(results, run(*inputs)) < 1e-5
    assert patterns(report) == ["gated_delta_rule"], str(report)


def test_gradients_go_both_ways() -> None:
    """Through the op, and through what the graph still computes."""
    inputs = [x.requires_grad_() for x in arguments()]
    ours, theirs = copies(inputs), copies(inputs)
    with collecting() as report:
        loss(compiled(with_transforms)(*ours)).backward()
    loss(with_transforms(*theirs)).backward()
    assert worst_error([x.grad for x in ours], [x.grad for x in theirs]) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]


def test_states_of_all_chunks_are_most_of_the_work() -> None:
    inputs = arguments()
    with torch.no_grad(), collecting() as report:
        results = compiled(with_states)(*inputs)
        assert worst_error(results, with_states(*inputs)) < 1e-5
    assert not report.matches
    assert {rejection.code for rejection in report.rejections} == {"escape"}
