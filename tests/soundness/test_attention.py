"""MLA: finite masks are finite, positions round as the model's do, and no small term is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.compare import relative_error
from tests.soundness.programs import explained

HEADS, NOPE, ROPE, VALUE, RANK, T = 4, 16, 8, 16, 32, 24
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)


class Layer(nn.Module):
    """Latent attention from expanded keys; ``hide`` masks the scores, ``keys`` and ``read`` may bend the rest."""

    def __init__(
        self,
        hide: Callable[[Tensor], Tensor],
        keys: Callable[[Tensor], Tensor] = lambda k: k,
        read: Callable[[Tensor, Tensor], Tensor] = lambda w, v: w @ v,
        size: float = 1.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hide, self.keys, self.read, self.size = hide, keys, read, size
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)

    def forward(self, q: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        batch, length = latent.shape[:2]
        kv = self.kv_b(latent).view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        k = torch.cat([self.keys(kv[..., :NOPE]), k_rope[:, None].expand(-1, HEADS, -1, -1)], -1)
        scores = self.hide(q @ k.mT * (NOPE + ROPE) ** -0.5)
        return self.read(scores.softmax(-1), kv[..., NOPE:])


def given(length: int = T, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(2, HEADS, length, NOPE + ROPE, generator=rng) * size
    return q, torch.randn(2, length, RANK, generator=rng), torch.randn(2, length, ROPE, generator=rng)


def equals_eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    """How the matches were shown; results must be eager's."""
    with torch.no_grad():
        expected = module(*inputs)
        report = explained(module, inputs)
    assert relative_error(report.result, expected) <= 2e-5, str(report)
    return [match.checked for match in report.matches]


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "-inf": lambda s: s.masked_fill(LATER, -torch.inf),
    "the lowest number": lambda s: s.masked_fill(LATER, torch.finfo(s.dtype).min),
    "-1e9": lambda s: s.masked_fill(LATER, -1e9),
    "-1e4 added": lambda s: s + LATER * -1e4,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_masks_that_hide(name: str) -> None:
    assert equals_eager(Layer(HIDDEN[name]), given()) == ["exactly"]


FINITE: dict[str, Callable[[Tensor], Tensor]] = {
    "-1e4 replaces": lambda s: s.masked_fill(LATER, -1e4),
    "-1e4 added": lambda s: s + LATER * -1e4,
    "-1e4 added to what is seen too": lambda s: s + torch.where(LATER, -1e4, 1.0),
    "-2e4 by where": lambda s: torch.where(LATER, -2e4, s),
    "-5e4 added twice": lambda s: s + LATER * -2.5e4 + LATER * -2.5e4,
    "-3e4 by a product": lambda s: s * ~LATER - 3e4 * LATER.float(),
}


@pytest.mark.parametrize("name", FINITE)
def test_masks_that_large_scores_reach(name: str) -> None:
    equals_eager(Layer(FINITE[name]), given(size=3e4))


def positions(dtype: torch.dtype, length: int) -> Tensor:
    at = torch.arange(length).to(dtype)
    return at[:, None] < at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8])
def test_positions_that_round(dtype: torch.dtype) -> None:
    equals_eager(Layer(lambda s: s.masked_fill(positions(dtype, s.shape[-1]), -torch.inf)), given(400))


BENT: dict[str, Layer] = {
    "keys squared": Layer(HIDDEN["-inf"], keys=lambda k: k + 1e-11 * k * k),
    "one key more": Layer(HIDDEN["-inf"], keys=lambda k: k * (1 + 1e-11)),
    "weights squared": Layer(HIDDEN["-inf"], read=lambda w, v: (w + 1e-12 * w * w) @ v),
    "scores squared": Layer(lambda s: (s + 1e-12 * s * s).masked_fill(LATER, -torch.inf)),
    "values leak": Layer(lambda s: s.masked_fill(LATER, -28.0)),
}


@pytest.mark.parametrize("name", BENT)
def test_small_terms(name: str) -> None:
    assert equals_eager(BENT[name], given()) == []
