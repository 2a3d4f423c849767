"""A delta-rule core and what may stand before it: each test changes one tensor on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile.report.findings import Match
from tests.backend.layers import train_both

BATCH, LENGTH, HEADS, SIZE = 3, 2, 4, 6


def mix(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule or, with a gate [B, T, H, K], KDA, over [B, T, H, D] token by token."""
    state = q.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if g.dim() == 4 else decay[..., None, None])
        old = (state * k[:, t].unsqueeze(-1)).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * ((v[:, t] - old) * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(seed: int, count: int = HEADS, length: int = LENGTH) -> Tensor:
    """Something like q, k or v: [B, T, H, K]."""
    return draw(BATCH, length, count, SIZE, seed=seed)


def plain() -> dict[str, Tensor]:
    """Inputs the core can take as they are."""
    return {
        "q": heads(1),
        "k": 0.4 * heads(2),
        "v": heads(3),
        "g": -draw(BATCH, LENGTH, HEADS, seed=4).abs(),
        "beta": draw(BATCH, LENGTH, HEADS, seed=5).sigmoid(),
    }


def only(fn: Callable[..., Any], arguments: Sequence[Tensor], tolerance: float = 1e-5, **keywords: Any) -> Match:
    """The one match in ``fn``, whose output and gradients equal eager's."""
    error, gradient_error, report = train_both(fn, arguments, **keywords)
    assert len(report.matches) == 1, str(report)
    assert max(error, gradient_error) < tolerance
    return report.matches[0]
