"""Canonical rules on gates and normalisers: log gates in a sum, activations of chunks, factors within an einsum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.explainer import explain
from tests.backend.test_hoist import explained
from tests.compare import worst_error

CHUNK = 2


def decays(gate: Tensor) -> Tensor:
    """Log decays between tokens, ``[B, H, T, T]``; -inf above the diagonal."""
    total = F.logsigmoid(gate).transpose(1, 2).cumsum(-1)
    lower = torch.ones(gate.shape[1], gate.shape[1], dtype=torch.bool).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf"))


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def log_sigmoid_in_the_sum(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q, k, v)
    weights = (decays(gate) + F.logsigmoid(logit).transpose(1, 2)[:, :, None, :]).exp()
    return ((q @ k.mT) * weights @ v).transpose(1, 2)


def softplus_in_the_sum(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q, k, v)
    weights = torch.exp(-F.softplus(-logit).transpose(1, 2).unsqueeze(2) + decays(gate))
    return ((q @ k.mT) * weights @ v).transpose(1, 2)


def softplus_that_is_subtracted(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q, k, v)
    weights = torch.exp(decays(gate) - F.softplus(-logit).transpose(1, 2).unsqueeze(2))
    return ((q @ k.mT) * weights @ v).transpose(1, 2)


def log_sigmoid_below_the_mask(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return masked(q, k, v, total_gates(gate) + F.logsigmoid(logit).transpose(1, 2)[:, :, None, :])


def log_sigmoid_below_two_masks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    weights = F.logsigmoid(logit).transpose(1, 2)[:, :, None, :] + total_gates(gate)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return masked(q, k, v, torch.where(future, -torch.inf, weights))


def total_gates(gate: Tensor) -> Tensor:
    total = F.logsigmoid(gate).transpose(1, 2).cumsum(-1)
    return total[..., :, None] - total[..., None, :]


def masked(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    q, k, v = heads_first(q, k, v)
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return ((q @ k.mT) * weights.masked_fill(~lower, -torch.inf).exp() @ v).transpose(1, 2)


def gate_of_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The write gate is split into chunks and biased before its activation."""
    q, k, v = heads_first(q, k, v)
    chunks = logit.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)
    write = F.softplus(chunks + torch.linspace(0.0, 1.0, logit.shape[2])[:, None, None])
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    v = v * write.unsqueeze(-1)
    kv = k.mT @ v
    before = F.pad(kv.cumsum(2), (0, 0, 0, 0, 1, -1))
    return (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3).transpose(1, 2)


def normaliser_in_the_einsum(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k = q.exp(), k.exp()
    states = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
    inverse = 1.0 / torch.einsum("...d,...d->...", q, k.cumsum(1) + 1e-6)
    return torch.einsum("...de,...d,...->...e", states, q, inverse)


MATCHES = {
    log_sigmoid_in_the_sum: "simple_gla",
    softplus_in_the_sum: "simple_gla",
    softplus_that_is_subtracted: "simple_gla",
    log_sigmoid_below_the_mask: "simple_gla",
    log_sigmoid_below_two_masks: "simple_gla",
    gate_of_chunks: "linear_attention",
    normaliser_in_the_einsum: "linear_attention",
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", MATCHES)
def test_written_another_way_it_matches(fn: Callable[..., Tensor], grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == [MATCHES[fn]], str(report)


def gate_of_the_query(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The gate that is added belongs to the token that reads."""
    q, k, v = heads_first(q, k, v)
    weights = (decays(gate) + F.logsigmoid(logit).transpose(1, 2)[..., None]).exp()
    return ((q @ k.mT) * weights @ v).transpose(1, 2)


def unbounded_gate(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Taken out of the exponential, this one could overflow."""
    q, k, v = heads_first(q, k, v)
    weights = (decays(gate) + 30 * logit.transpose(1, 2)[:, :, None, :]).exp()
    return ((q @ k.mT) * weights @ v).transpose(1, 2)


def another_tokens_gate_below_the_mask(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return masked(q, k, v, total_gates(gate) + F.logsigmoid(logit).transpose(1, 2)[..., None])


def masked_by_a_number(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """What is masked is not nothing, and has no gate."""
    weights = total_gates(gate) + F.logsigmoid(logit).transpose(1, 2)[:, :, None, :]
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    q, k, v = heads_first(q, k, v)
    return ((q @ k.mT) * weights.masked_fill(future, -5.0).exp() @ v).transpose(1, 2)


def cut_below_the_mask(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return masked(q, k, v, (total_gates(gate) + F.logsigmoid(logit).transpose(1, 2)[:, :, None, :]).detach_())


def a_gate_that_is_cut(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    return masked(q, k, v, total_gates(gate) + F.logsigmoid(logit).detach_().transpose(1, 2)[:, :, None, :])


NEAR = [
    gate_of_the_query,
    unbounded_gate,
    another_tokens_gate_below_the_mask,
    masked_by_a_number,
    cut_below_the_mask,
    a_gate_that_is_cut,
]


def divided_by_what_is_summed(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Each channel of a key has a divisor of its own, below the sum."""
    states = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
    inverse = 1.0 / (k.exp().cumsum(1) + 1e-6)
    return torch.einsum("bthde,bthd,bthd->bthe", states, q, inverse)


def chunks_in_another_order(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The gate is split the other way round: its tokens are shuffled."""
    q, k, v = heads_first(q, k, v)
    shuffled = F.softplus(logit.unflatten(1, (CHUNK, -1)).permute(0, 3, 2, 1)).flatten(2)
    return ((q @ k.mT).tril() @ (v * shuffled[..., None])).transpose(1, 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [*NEAR, divided_by_what_is_summed, chunks_in_another_order])
def test_near_misses_equal_eager(fn: Callable[..., Tensor], grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5, str(report)


def divided_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """torchscale: what is written and what is kept are divided by a running scale."""
    after = scale * decay + 1
    kept = (scale.sqrt() * decay / after.sqrt()).view(-1, 1, 1)
    state = state * kept + k[..., None] * v[..., None, :] / after.sqrt().view(-1, 1, 1)
    return (q[..., None] * state).sum(-2), state


def divided_after_the_write(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Each entry of what is written has a divisor of its own."""
    state = state * decay.view(-1, 1, 1) + k[..., None] * v[..., None, :] / (scale.view(-1, 1, 1) + state.square())
    return (q[..., None] * state).sum(-2), state


def gradients(results: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(torch.cat([x.sin().flatten() for x in results]).sum(), inputs)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("fn", "matched"), [(divided_step, ["simple_gla"]), (divided_after_the_write, [])])
def test_quotients_of_steps(fn: Callable[..., tuple[Tensor, Tensor]], matched: list[str], grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 6), (2, 3, 6), (2, 3, 5), (3,), (2, 3, 6, 5), (3,)]
    inputs = [torch.rand(size, generator=generator).requires_grad_(grad) for size in sizes]
    report = explain(fn)(*inputs)
    expected = fn(*inputs)
    assert worst_error(report.result, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == matched, str(report)
    if grad:
        assert worst_error(gradients(report.result, inputs), gradients(expected, inputs)) <= 1e-5
