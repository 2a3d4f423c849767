"""Loops over requests and heads that take ``x[b][head][t]``: one recurrence of all heads, or one each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.explainer import explain
from tests.compare import relative_error, worst_error

B, H, T, K, V = 1, 2, 6, 8, 5
Head = Callable[[tuple[Tensor, ...], int, int], Tensor]


def delta(given: tuple[Tensor, ...], b: int, head: int) -> Tensor:
    q, k, v, f, i = given
    s = q.new_zeros(K, v.shape[-1])
    out: list[Tensor] = []
    for t in range(T):
        s = s * f[b][head][t].exp()
        s = s + torch.outer(k[b][head][t], i[b][head][t] * (v[b][head][t] - k[b][head][t] @ s))
        out.append(q[b][head][t] @ s)
    return torch.stack(out)


def forgetting(given: tuple[Tensor, ...], b: int, head: int) -> Tensor:
    q, k, v, f, _ = given
    s = q.new_zeros(v.shape[-1], K)
    out: list[Tensor] = []
    for t in range(T):
        s = s * f[b][head][t].exp() + torch.outer(v[b][head][t], k[b][head][t])
        out.append(s @ q[b][head][t])
    return torch.stack(out)


def in_range(given: tuple[Tensor, ...], b: int, head: int) -> Tensor:
    """mLSTM with the largest exponent so far, as a scan over pairs."""
    q, k, v, f, i = given
    c, m = torch.zeros(v.shape[-1], K), torch.zeros(())
    out: list[Tensor] = []
    for t in range(T):
        log_f, log_i = F.logsigmoid(f[b][head][t]), i[b][head][t]
        largest = torch.maximum(log_f + m, log_i)
        c = torch.exp(log_f + m - largest) * c + torch.exp(log_i - largest) * torch.outer(v[b][head][t], k[b][head][t])
        m = largest
        out.append(c @ q[b][head][t])
    return torch.stack(out)


def in_range_and_normalised(given: tuple[Tensor, ...], b: int, head: int) -> Tensor:
    """The same with keys that each turn scales, a sum of keys beside the state, and a gate on the results."""
    q, k, v, f, i = given
    c: Tensor | int = 0
    n: Tensor | int = 0
    m: Tensor | int = 0
    out: list[Tensor] = []
    for t in range(T):
        log_f, log_i = F.logsigmoid(f[b][head][t]), i[b][head][t]
        largest = torch.maximum(log_f + m, log_i)
        forget, write = torch.exp(log_f + m - largest), torch.exp(log_i - largest)
        key = k[b][head][t] / K**0.5
        c = forget * c + write * torch.outer(v[b][head][t], key)
        n = forget * n + write * key
        m = largest
        total = torch.maximum(torch.dot(n, q[b][head][t]).abs(), torch.exp(-largest)) + 1e-6
        out.append(F.silu(v[b][head][t]) * (c @ q[b][head][t]) / total)
    return torch.stack(out)


def of_the_other_head(given: tuple[Tensor, ...], b: int, head: int) -> Tensor:
    """Keys of the head before, from the second token on."""
    q, k, v, f, _ = given
    s = q.new_zeros(v.shape[-1], K)
    out: list[Tensor] = []
    for t in range(T):
        s = s * f[b][head][t].exp() + torch.outer(v[b][head][t], k[b][head - 1 if t else head][t])
        out.append(s @ q[b][head][t])
    return torch.stack(out)


def one_by_one(head: Head) -> Callable[..., Tensor]:
    def run(*given: Tensor) -> Tensor:
        return torch.stack([torch.stack([head(given, b, h) for h in range(H)]) for b in range(B)])

    return run


def arguments(values: int = V) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H, T, K), torch.randn(B, H, T, K) / K**0.5, torch.randn(B, H, T, values)
    return [q, k, v, -torch.rand(B, H, T), torch.rand(B, H, T)]


@pytest.mark.parametrize("values", [V, K])
@pytest.mark.parametrize(
    ("head", "patterns"),
    [
        (delta, ["gated_delta_rule"]),
        (forgetting, ["simple_gla"]),
        (in_range, ["simple_gla"] * B * H),
        (in_range_and_normalised, ["simple_gla"] * 2 * B * H),
    ],
)
def test_heads_are_one_recurrence_or_one_each(head: Head, patterns: list[str], values: int) -> None:
    torch._dynamo.reset()
    args = [x.requires_grad_() for x in arguments(values)]
    fn = one_by_one(head)
    report, want = explain(fn, options={"kda.lift": False})(*args), fn(*args)
    assert [match.pattern for match in report.matches] == patterns, str(report)
    assert worst_error(report.result, want) < 1e-5
    seed, found = torch.randn(want.shape), list[tuple[Tensor, ...]]()
    for out in (report.result, want):
        found.append(torch.autograd.grad(out, args, seed, allow_unused=True, materialize_grads=True))
    assert max(map(relative_error, *found)) < 1e-4


def test_keys_of_another_head() -> None:
    torch._dynamo.reset()
    args, fn = arguments(), one_by_one(of_the_other_head)
    report = explain(fn, options={"kda.lift": False})(*args)
    assert worst_error(report.result, fn(*args)) < 1e-6
    assert not [match for match in report.matches if match.mode == "sequence"], str(report)
