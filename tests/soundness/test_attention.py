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
    "half the lowest": lambda s: s.masked_fill(LATER, torch.finfo(s.dtype).min / 2),
    "-1e9 added": lambda s: s + LATER * -1e9,
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


LOWEST = torch.finfo(torch.float32).min
LARGE: dict[str, Callable[[Tensor], Tensor]] = {
    "-1e9 replaces": lambda s: s.masked_fill(LATER, -1e9),
    "-1e9 added": lambda s: s + LATER * -1e9,
    "-1e12 by where": lambda s: torch.where(LATER, -1e12, s),
    "-1e9 made by where, and added": lambda s: s + torch.where(LATER, -1e9, 0.0),
    "-1e20 replaces": lambda s: s.masked_fill(LATER, -1e20),
    "a quarter of the lowest": lambda s: (s * 1e20).masked_fill(LATER, LOWEST / 4),
    "the lowest of float16, added": lambda s: s + LATER * torch.finfo(torch.float16).min,
    "-1e9 and then scaled down": lambda s: s.masked_fill(LATER, -1e9) * 1e-3,
    "-1e9 and then shifted": lambda s: s.masked_fill(LATER, -1e9) + 1e9 * LATER,
    "the lowest, shifted back": lambda s: s.masked_fill(LATER, LOWEST) + LATER * -LOWEST,
}


@pytest.mark.parametrize("name", LARGE)
def test_masks_that_larger_scores_reach(name: str) -> None:
    """A query whose scores are all below the number sees what it hides; no number but the dtype's lowest is safe."""
    q, latent, rope = given()
    equals_eager(Layer(LARGE[name]), (q.abs() * 1e12, latent, -rope.abs() * 1e8))
    equals_eager(Layer(LARGE[name]), (q * 1e10, latent, rope))


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "-inf": lambda s: s.masked_fill(LATER | FIRST, -torch.inf),
    "the lowest number": lambda s: s.masked_fill(LATER | FIRST, LOWEST),
    "the lowest number twice": lambda s: s.masked_fill(LATER, LOWEST).masked_fill(FIRST, LOWEST),
    "half of it added twice": lambda s: s + LATER * (LOWEST / 2) + FIRST * (LOWEST / 2),
    "the lowest number, then half": lambda s: s.masked_fill(LATER, LOWEST).masked_fill(FIRST, LOWEST / 2),
    "-inf, then the lowest number": lambda s: s.masked_fill(LATER, -torch.inf).masked_fill(FIRST, LOWEST),
}
FIRST = (torch.arange(T) < 3).expand(T, T)
"""Padding on the left: the first queries see nothing."""


@pytest.mark.parametrize("name", UNSEEN)
def test_queries_that_see_nothing(name: str) -> None:
    """They average over what the lowest number hides, as eager does; of -inf alone they are zero, and eager's NaN."""
    module = Layer(UNSEEN[name])
    with torch.no_grad():
        expected = module(*given())
        report = explained(module, given())
    seen = ~expected.isnan()
    assert report.matches and torch.equal(seen, ~report.result.isnan() & (report.result != 0) | seen), str(report)
    assert relative_error(report.result[seen], expected[seen]) <= 2e-5, str(report)


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logsumexp": lambda s, v: (s - s.logsumexp(-1, keepdim=True)).exp() @ v,
    "log_softmax": lambda s, v: s.log_softmax(-1).exp() @ v,
    "amax": lambda s, v: ((w := (s - s.amax(-1, keepdim=True)).exp()) @ v) / w.sum(-1, keepdim=True),
    "max over a dimension": lambda s, v: (
        ((w := (s - s.max(-1, keepdim=True).values).exp()) @ v) / w.sum(-1, keepdim=True)
    ),
    "the sum's inverse": lambda s, v: (
        ((w := (s - s.amax(-1, keepdim=True)).exp()) @ v) * w.sum(-1, keepdim=True).reciprocal()
    ),
}


class Written(Layer):
    """The softmax in other words, on ``bend`` of the scores."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor], bend: Callable[[Tensor], Tensor]) -> None:
        super().__init__(HIDDEN["-inf"])
        self.attend, self.bend = attend, bend

    def forward(self, q: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        kv = self.kv_b(latent).view(*latent.shape[:2], HEADS, NOPE + VALUE).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_rope[:, None].expand(-1, HEADS, -1, -1)], -1)
        scores = (q @ k.mT * (NOPE + ROPE) ** -0.5).masked_fill(LATER, -torch.inf)
        return self.attend(self.bend(scores), kv[..., NOPE:])


@pytest.mark.parametrize("name", WRITTEN)
def test_every_way_to_write_the_softmax_is_shown_exactly(name: str) -> None:
    assert equals_eager(Written(WRITTEN[name], lambda s: s), given()) == ["exactly"]


NEARLY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logsumexp of a little more": lambda s, v: (s - (s * (1 + 1e-11)).logsumexp(-1, keepdim=True)).exp() @ v,
    "logsumexp of half": lambda s, v: (s - s.logsumexp(-1, keepdim=True) * (1 - 1e-12)).exp() @ v,
    "log_softmax, scaled": lambda s, v: (s.log_softmax(-1) * (1 + 1e-11)).exp() @ v,
    "log_softmax of another dimension": lambda s, v: s.log_softmax(-2).nan_to_num(0.0).exp() @ v,
    "a maximum that stays": lambda s, v: (
        ((w := (s - s.amax(-1, keepdim=True) * (1 + 1e-11)).exp()) @ v) / (w.sum(-1, keepdim=True) + 1e-12)
    ),
    "a sum of all but a little": lambda s, v: (
        ((w := (s - s.amax(-1, keepdim=True)).exp()) @ v) / ((1 + 1e-11) * w.sum(-1, keepdim=True))
    ),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_the_softmax(name: str) -> None:
    assert equals_eager(Written(NEARLY[name], lambda s: s), given()) == []


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


class Scaled(Layer):
    """With a number of no meaning on the scores, and what undoes most of it on the values."""

    def forward(self, q: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        return super().forward(q * 0.3183098861837907, latent, k_rope)


ROUGH: dict[str, Layer] = {
    "keys squared": Scaled(HIDDEN["-inf"], keys=lambda k: k + 1e-10 * k * k),
    "one key more": Scaled(HIDDEN["-inf"], keys=lambda k: torch.cat([k[:, :, :-1], k[:, :, -1:] * (1 + 1e-9)], 2)),
    "weights squared": Scaled(HIDDEN["-inf"], read=lambda w, v: (w + 1e-10 * w * w) @ v),
    "scores squared": Scaled(lambda s: (s + 1e-10 * s * s).masked_fill(LATER, -torch.inf)),
    "values of another head": Scaled(HIDDEN["-inf"], read=lambda w, v: w @ (v + 1e-10 * v.roll(1, 1))),
    "values, rounded back": Scaled(HIDDEN["-inf"], read=lambda w, v: w @ (v * 3.14159 * 0.31831)),
}


@pytest.mark.parametrize("name", ROUGH)
def test_small_terms_beside_numbers_that_are_rounded(name: str) -> None:
    assert equals_eager(ROUGH[name], given()) == []


ROUNDED: dict[str, Layer] = {
    "scores in float16": Layer(lambda s: s.half().float().masked_fill(LATER, -torch.inf)),
    "scores in bfloat16": Layer(lambda s: s.masked_fill(LATER, -torch.inf).bfloat16().float()),
    "weights in bfloat16": Layer(HIDDEN["-inf"], read=lambda w, v: w.bfloat16().float() @ v),
    "values in float16": Layer(HIDDEN["-inf"], read=lambda w, v: w @ v.half().float()),
    "keys in bfloat16": Layer(HIDDEN["-inf"], keys=lambda k: k.bfloat16().float()),
    "the lowest number, in float16": Layer(lambda s: s.masked_fill(LATER, LOWEST).half().float()),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_between_the_steps(name: str) -> None:
    """To less than the inputs' own dtype: part of the function, and infinite where scores are large."""
    assert equals_eager(ROUNDED[name], given()) == []
    assert equals_eager(Layer(HIDDEN["-inf"], read=lambda w, v: (w @ v).double().float()), given()) == ["exactly"]


class Narrow(Layer):
    """The weight is kept in bfloat16, and so is the mask, which is added as it is."""

    def __init__(self, keys: Callable[[Tensor], Tensor], read: Callable[[Tensor, Tensor], Tensor]) -> None:
        mask = torch.zeros(T, T, dtype=torch.bfloat16).masked_fill(LATER, -torch.inf)
        super().__init__(lambda scores: scores + mask, keys, read)
        self.kv_b.bfloat16()
        self.kv_b.forward = lambda x: nn.functional.linear(x, self.kv_b.weight.float())  # type: ignore[method-assign]


@pytest.mark.parametrize("rounded", ["keys", "weights", "values", ""])
def test_a_weight_or_a_mask_in_fewer_bits_allows_no_rounding(rounded: str) -> None:
    def part(name: str, x: Tensor) -> Tensor:
        return x.bfloat16().float() if name == rounded else x

    layer = Narrow(lambda k: part("keys", k), lambda w, v: part("weights", w) @ part("values", v))
    assert equals_eager(layer, given()) == ([] if rounded else ["exactly"])


HEAD = torch.arange(HEADS)[:, None, None]
ROW = torch.arange(2)[:, None, None, None]
ODD: dict[str, Layer] = {
    "values of one head": Layer(HIDDEN["-inf"], read=lambda w, v: w @ (v * torch.where(HEAD == 3, 2.0, 1.0))),
    "keys of one head": Layer(HIDDEN["-inf"], keys=lambda k: k * torch.where(HEAD == 2, 0.5, 1.0)),
    "scores of one row": Layer(lambda s: (s * torch.where(ROW == 1, 2.0, 1.0)).masked_fill(LATER, -torch.inf)),
    "a mask of one row": Layer(lambda s: s.masked_fill(LATER | ((ROW == 1) & (torch.arange(T) == 5)), -torch.inf)),
    "a mask of one head": Layer(lambda s: s.masked_fill(LATER | ((HEAD == 1) & (torch.arange(T) == 5)), -torch.inf)),
    "heads turned round": Layer(HIDDEN["-inf"], read=lambda w, v: w.flip(1) @ v),
    "heads rolled": Layer(HIDDEN["-inf"], read=lambda w, v: w @ v.roll(1, 1)),
    "rows rolled": Layer(HIDDEN["-inf"], keys=lambda k: k.roll(1, 0)),
    "a head's mean taken off": Layer(HIDDEN["-inf"], read=lambda w, v: w @ (v - v.mean(1, keepdim=True))),
    "one pair hidden": Layer(
        lambda s: s.masked_fill(LATER | ((torch.arange(T)[:, None] == 20) & (torch.arange(T) == 7)), -torch.inf)
    ),
    "a window": Layer(lambda s: s.masked_fill(LATER | LATER.mT.triu(-T).tril(-20), -torch.inf)),
}


@pytest.mark.parametrize("name", ODD)
def test_heads_and_rows_that_are_not_alike(name: str) -> None:
    """Left alone, or matched with what makes the difference as an operand."""
    equals_eager(ODD[name], given())
