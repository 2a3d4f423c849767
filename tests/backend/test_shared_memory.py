"""Results that share memory with something the caller writes to, and sizes that leave the roles of dimensions open.

The function around the recurrence reads, writes and returns what the recurrence gave it, through views and copies:
results and overwritten arguments must be eager's whether the recurrence was replaced or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backend.layers import HEADS, KEY, VALUE, delta_arguments, patterns, run_both
from tests.compare import worst_error

Results = tuple[Tensor, Tensor]
Caller = Callable[..., Any]
CALLERS: list[Caller] = []


def caller(fn: Caller) -> Caller:
    CALLERS.append(fn)
    return fn


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Results:
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = (state * k[:, t].unsqueeze(-1)).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * ((v[:, t] - old) * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1), state


@caller
def state_scaled_through_a_view(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    turned = s.transpose(-1, -2)
    turned.mul_(2.0)
    return o, s, turned


@caller
def state_scaled_under_a_view(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    turned = s.transpose(-1, -2)
    s.mul_(2.0)
    return o, s, turned


@caller
def output_cut_through_a_view(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    o.transpose(1, 2)[:, :, 0].zero_()
    return o, s


@caller
def cache_scaled_after_the_state_is_stored(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    cache.copy_(s)
    cache.mul_(2)
    return o, s, cache * 1


@caller
def state_scaled_after_it_is_stored(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    cache.copy_(s)
    s.mul_(0.5)
    return o, s, cache * 1


@caller
def cache_filled_anew(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    cache.copy_(s)
    kept = cache + 1
    cache.fill_(3)
    return o, kept, cache - 1


@caller
def cache_emptied_before_the_state_is_stored(o: Tensor, s: Tensor, cache: Tensor) -> Any:
    turned = o.transpose(1, 2)
    cache.zero_()
    turned.mul_(0.7)
    cache.copy_(s)
    return o, cache, turned


@pytest.mark.parametrize("after", CALLERS, ids=lambda fn: fn.__name__)
def test_memory_that_is_written_later(after: Caller) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Tensor) -> Any:
        return (*after(*recurrence(q, k, v, g, beta, cache), cache), cache.clone())

    cache = torch.randn(2, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, plain, _ = run_both(fn, (*delta_arguments(length=3), cache))
    assert worst_error(ours, plain) < 1e-5


def test_the_state_is_stored_and_the_cache_goes_on() -> None:
    """The first of these is rewritten all the same."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Tensor) -> Any:
        return cache_scaled_after_the_state_is_stored(*recurrence(q, k, v, g, beta, cache), cache)

    cache = torch.randn(2, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, _, report = run_both(fn, (*delta_arguments(length=3), cache))
    assert patterns(report) == ["gated_delta_rule"]


def equal(size: int) -> tuple[Tensor, ...]:
    """Arguments all of whose dimensions are ``size``."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, state = (torch.randn(4 * (size,), generator=rng) for _ in range(4))
    g, beta = (torch.rand(3 * (size,), generator=rng) for _ in range(2))
    return q, k / k.norm(dim=-1, keepdim=True), v, -g, beta, state


def test_sizes_that_are_all_equal() -> None:
    """There are millions of ways to name the dimensions; the usual ones come first."""
    with torch.no_grad():
        ours, plain, report = run_both(recurrence, equal(4))
    assert worst_error(ours, plain) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]


def test_an_empty_batch_is_left_alone() -> None:
    arguments = delta_arguments(batch=0, length=3)
    with torch.no_grad():
        ours, plain, report = run_both(recurrence, (*arguments, torch.zeros(0, HEADS, KEY, VALUE)))
    assert worst_error(ours, plain) == 0.0
    assert patterns(report) == []
