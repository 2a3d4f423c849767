"""One of the two weights is absorbed by hand: the op gets both, whichever form then is the cheaper one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdacompile
from tests.compare import relative_error, tensors
from tests.mla.layers import HEADS, NOPE, QK, RANK, ROPE, VALUE, WIDTH
from tests.mla.spellings import causal

EAGER: dict[str, Any] = {"kda.inner": "eager"}
PLAIN, APART = {"q", "latent", "k_rope"}, {"w_k", "w_v"}


class Layer(nn.Module):
    """``x [B, T, 16]`` over ``latent [B, S, R]`` and ``rope [B, S, D]`` of earlier tokens, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * QK, bias=False)
        self.wkv_a = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.wkv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.scale = QK**-0.5

    @property
    def w_uk(self) -> Tensor:
        return self.wkv_b.weight.view(HEADS, -1, RANK)[:, :NOPE]

    @property
    def w_uv(self) -> Tensor:
        return self.wkv_b.weight.view(HEADS, -1, RANK)[:, NOPE:]

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.wq(x).unflatten(-1, (HEADS, QK))
        return q[..., :NOPE], q[..., NOPE:]

    def absorbed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, turned = self.queries(x)
        return torch.einsum("bthn,hnr->bthr", q, self.w_uk), turned

    def weights(self, scores: Tensor) -> Tensor:
        """``[B, H, T, S]``"""
        return (scores * self.scale).masked_fill(~causal(*scores.shape[-2:]), float("-inf")).softmax(-1)

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, turned = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        latent, rope = torch.cat([latent, c], dim=1), torch.cat([rope, turned], dim=1)
        return self.attend(x, latent, rope), latent, rope


# -- the queries have been taken through W_UK --------------------------------------------------------------------------


class ValuesExpanded(Layer):
    roles = PLAIN | APART | {"q_rope"}

    def values(self, latent: Tensor) -> Tensor:
        return torch.einsum("bsr,hvr->bshv", latent, self.w_uv)

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, turned = self.absorbed(x)
        scores = torch.einsum("bthr,bsr->bhts", q, latent) + torch.einsum("bthd,bsd->bhts", turned, rope)
        return torch.einsum("bhts,bshv->bthv", self.weights(scores), self.values(latent))


class WholeProjection(ValuesExpanded):
    """The keys' half of what is expanded is thrown away."""

    roles = PLAIN | {"q_rope", "w"}

    def values(self, latent: Tensor) -> Tensor:
        return self.wkv_b(latent).unflatten(-1, (HEADS, -1))[..., NOPE:]


class OneKeyForAll(ValuesExpanded):
    """Queries are multiplied with a copy of the weight for every request, and joined with their rotated part."""

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, turned = (part.transpose(1, 2) for part in self.queries(x))
        key = torch.cat([latent, rope], dim=-1).unsqueeze(1)
        weights = self.weights(torch.cat([q @ self.w_uk, turned], dim=-1) @ key.mT)
        return (weights @ self.values(latent).transpose(1, 2)).transpose(1, 2)


class RotatedFirst(ValuesExpanded):
    """The latent is a part of what is cached."""

    roles = {"q", "cache", "q_rope"} | APART

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, cache = torch.cat(self.absorbed(x)[::-1], dim=-1) * self.scale, torch.cat([rope, latent], dim=-1) * 1.0
        v, mask = self.values(cache[..., ROPE:]), causal(x.shape[1], cache.shape[1])
        k = cache.unsqueeze(1).expand(-1, HEADS, -1, -1)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v.transpose(1, 2), attn_mask=mask, scale=1.0)
        return o.transpose(1, 2)


class NoPositions(ValuesExpanded):
    roles = {"q", "latent"} | APART

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        weights = self.weights(torch.einsum("bthr,bsr->bhts", self.absorbed(x)[0], latent))
        return torch.einsum("bhts,bshv->bthv", weights, self.values(latent))


# -- the result is taken through W_UV ----------------------------------------------------------------------------------


class KeysExpanded(Layer):
    roles = PLAIN | APART | {"q_rope"}

    def keys(self, latent: Tensor) -> Tensor:
        return torch.einsum("bsr,hnr->bshn", latent, self.w_uk)

    def between(self, o: Tensor) -> Tensor:
        return o

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q, turned = self.queries(x)
        scores = torch.einsum("bthn,bshn->bhts", q, self.keys(latent)) + torch.einsum("bthd,bsd->bhts", turned, rope)
        o = self.between(torch.einsum("bhts,bsr->bhtr", self.weights(scores), latent))
        return torch.einsum("bhtr,hvr->bthv", o, self.w_uv)


class KeysOfTheWholeProjection(KeysExpanded):
    roles = PLAIN | {"q_rope", "w"}

    def keys(self, latent: Tensor) -> Tensor:
        return self.wkv_b(latent).unflatten(-1, (HEADS, -1))[..., :NOPE]


class OneValueForAll(KeysExpanded):
    """Joined keys; the values have a dimension for heads that the keys' latent has not."""

    roles = PLAIN | APART

    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        q = torch.cat(self.queries(x), dim=-1).transpose(1, 2)
        k = torch.cat([self.keys(latent), rope.unsqueeze(2).expand(-1, -1, HEADS, -1)], dim=-1).transpose(1, 2)
        return ((self.weights(q @ k.mT) @ latent.unsqueeze(1)) @ self.w_uv.mT).transpose(1, 2)


HALVES = {
    cls.__name__: cls
    for cls in (
        ValuesExpanded, WholeProjection, OneKeyForAll, RotatedFirst, NoPositions, KeysExpanded,
        KeysOfTheWholeProjection, OneValueForAll,
    )
}  # fmt: skip


# -- near misses -------------------------------------------------------------------------------------------------------


class NormalisedQueries(ValuesExpanded):
    def absorbed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, turned = super().absorbed(x)
        return F.normalize(q, dim=-1), turned


class OtherHeads(ValuesExpanded):
    def absorbed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, turned = super().absorbed(x)
        return q.flip(2), turned


class Biased(ValuesExpanded):
    def absorbed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, turned = super().absorbed(x)
        return q + self.wkv_b.weight[:HEADS], turned


class GatedResult(KeysExpanded):
    def between(self, o: Tensor) -> Tensor:
        return o * torch.sigmoid(self.wkv_b.weight[0])


class ResultAlsoRead(KeysExpanded):
    def attend(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        o = super().attend(x, latent, rope)
        return torch.cat([o.flatten(2), self.seen[0].transpose(1, 2).flatten(2)], dim=-1)

    def between(self, o: Tensor) -> Tensor:
        self.seen.append(o)
        return o


ONE_SIDE = "absorbed by hand on one side"
MISSES: dict[str, tuple[type[Layer], str]] = {
    "normalised": (NormalisedQueries, ONE_SIDE),
    "other_heads": (OtherHeads, ONE_SIDE),
    "biased": (Biased, ONE_SIDE),
    "gated": (GatedResult, ONE_SIDE),
    "also_read": (ResultAlsoRead, ONE_SIDE),
}


def inputs(tokens: int, cached: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, tokens, WIDTH), torch.randn(2, cached, RANK), torch.randn(2, cached, ROPE)]


def build(cls: type[Layer]) -> Layer:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return cls()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", HALVES)
def test_both_weights_become_the_ops(name: str, tokens: int) -> None:
    module = build(HALVES[name])
    arguments = [x.requires_grad_() for x in inputs(tokens, 13)]
    report = kdacompile.explain(module, options=EAGER)(*arguments)
    assert [set(match.roles) for match in report.matches] == [HALVES[name].roles], str(report)
    have, want = tensors(report.result), tensors(module(*arguments))
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(have, want, strict=True))
    leaves, cotangent = [*arguments, *module.parameters()], torch.randn_like(want[0])
    one: Any = torch.autograd.grad(have[0], leaves, cotangent, allow_unused=True)
    other: Any = torch.autograd.grad(want[0], leaves, cotangent, allow_unused=True)
    for x, y in zip(one, other, strict=True):
        assert (x is None) == (y is None)
        assert x is None or relative_error(x, y) < 1e-5


@pytest.mark.parametrize("name", HALVES)
def test_one_graph_for_every_length(name: str) -> None:
    module = build(HALVES[name])
    options: Any = EAGER | {"kda.expect": {"mla": 1}}
    compiled = torch.compile(module, backend="kda", dynamic=True, options=options)
    with torch.no_grad(), kdacompile.collecting() as report:
        for tokens, cached in ((5, 13), (7, 13), (24, 40)):
            arguments = inputs(tokens, cached)
            have, want = tensors(compiled(*arguments)), tensors(module(*arguments))
            assert all(relative_error(x, y) < 1e-6 for x, y in zip(have, want, strict=True))
    assert len(report.graphs) == 1, str(report)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    cls, reason = MISSES[name]
    module, arguments = build(cls), inputs(5, 13)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        expected = module(*arguments)
    assert not report.matches and any(reason in r.reason for r in report.rejections), str(report)
    assert all(torch.equal(x, y) for x, y in zip(tensors(report.result), tensors(expected), strict=True))
