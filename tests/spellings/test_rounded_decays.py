"""Chunks of a model in 16 bits, whose decays are made in float32 and rounded before anything is multiplied by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.explainer import explain
from tests.compare import worst_error

B, H, N, C, K, V = 2, 3, 3, 8, 16, 12
Given = tuple[Tensor, ...]


def chunks(rounded: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> Given:
    """Each chunk as a whole, a state from chunk to chunk; a token reads the state before its own write (RWKV)."""
    q, k, v, log = (x.view(B, H, N, C, -1) for x in (q, k, v, w.float().log()))
    total = log.cumsum(-2)
    whole = rounded(log.sum(-2, keepdim=True).mT.exp())
    after, before = rounded((log.sum(-2, keepdim=True) - total).exp()), rounded((total - log).exp())
    middle = total[..., C // 2 - 1 : C // 2, :]
    scores = (q * (F.pad(total, (0, 0, 1, -1)) - middle).exp()) @ (k * (middle - total).exp()).mT
    out = scores.to(q.dtype).tril(-1) @ v
    writes = (k * after).mT @ v
    states: list[Tensor] = []
    for n in range(N):
        states.append(state)
        state = state * whole[:, :, n] + writes[:, :, n]
    out = out + (q * before) @ torch.stack(states, 2)
    return out.view(B, H, N * C, V), state


def to_results(q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> Given:
    return chunks(lambda decay: decay.to(q.dtype), q, k, v, w, state)


def to_half(q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> Given:
    """Whatever the tokens are in."""
    return chunks(lambda decay: decay.bfloat16().to(q.dtype), q, k, v, w, state)


def to_eighths(q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor) -> Given:
    return chunks(lambda decay: ((decay * 8).round() / 8).to(q.dtype), q, k, v, w, state)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, w = torch.randn(B, H, N * C, K), torch.randn(B, H, N * C, K) / 4, torch.rand(B, H, N * C, K) * 0.4 + 0.6
    v, state = torch.randn(B, H, N * C, V), torch.randn(B, H, K, V)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, w, state)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_decays(dtype: torch.dtype) -> None:
    """Results and gradients are no further from float64 than eager's."""
    torch._dynamo.reset()
    given = inputs(dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    report = explain(to_results, options={"kda.lift": False})(*given)
    assert [match.pattern for match in report.matches] == ["gla"], str(report)
    seeds = [torch.randn_like(x) for x in report.result]
    found = list[list[Tensor]]()
    for outs, args in ((report.result, given), (to_results(*given), given), (to_results(*wide), wide)):
        weights = [seed.to(out.dtype) for seed, out in zip(seeds, outs, strict=True)]
        found.append([*outs, *torch.autograd.grad(outs, args, weights)])
    for ours, theirs, exact in zip(*found, strict=True):
        bound = worst_error(theirs.double(), exact) if dtype.itemsize < 4 else 0.0
        assert worst_error(ours.double(), exact) <= max(1.2 * bound, 1e-5)


@pytest.mark.parametrize(
    ("fn", "dtype"), [(to_half, torch.float32), (to_eighths, torch.float32), (to_eighths, torch.bfloat16)]
)
def test_coarser_decays_stay(fn: Callable[..., Given], dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    given = inputs(dtype)
    report = explain(fn, options={"kda.lift": False})(*given)
    assert not report.matches and report.rejections, str(report)
    assert worst_error(report.result, fn(*given)) <= (1e-6 if dtype is torch.float32 else 1e-2)
