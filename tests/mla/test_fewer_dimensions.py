"""Latent attention of one request, token or head, which has no dimension of its own; heads in a Python loop."""

from __future__ import annotations

from collections.abc import Callable
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
CACHED, BATCH = 13, 2
Shapes = tuple[tuple[int, ...], ...]
CASES: dict[str, tuple[type[nn.Module], Shapes, str, int]] = {}


def case(*shapes: tuple[int, ...], mode: str = "sequence", many: int = 1) -> Callable[[type[nn.Module]], Any]:
    """``shapes`` of the inputs, and how many matches there are of what mode."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[cls.__name__] = cls, shapes, mode, many
        return cls

    return register


class Layer(nn.Module):
    heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, self.heads * QK, bias=False)
        self.wkv_a = nn.Linear(WIDTH, RANK + ROPE, bias=False)
        self.wkv_b = nn.Linear(RANK, self.heads * (NOPE + VALUE), bias=False)
        self.wo = nn.Linear(self.heads * VALUE, WIDTH)
        self.scale = QK**-0.5

    def absorb(self) -> tuple[Tensor, Tensor]:
        w_uk, w_uv = self.wkv_b.weight.unflatten(0, (self.heads, -1)).split([NOPE, VALUE], dim=1)
        return w_uk, w_uv


# -- one head ----------------------------------------------------------------------------------------------------------


@case((BATCH, 9, WIDTH))
class OneHead(Layer):
    heads = 1

    def forward(self, x: Tensor) -> Tensor:
        latent, rope = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        k, v = self.wkv_b(latent).split([NOPE, VALUE], dim=-1)
        scores = self.wq(x) @ torch.cat([k, rope], dim=-1).mT * self.scale
        return self.wo(scores.masked_fill(~causal(x.shape[1], x.shape[1]), float("-inf")).softmax(-1) @ v)


@case((9, WIDTH))
class OneHeadOfOneRequest(Layer):
    heads = 1

    def forward(self, x: Tensor) -> Tensor:
        latent, rope = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        k, v = self.wkv_b(latent).split([NOPE, VALUE], dim=-1)
        q, q_rope = self.wq(x).split([NOPE, ROPE], dim=-1)
        scores = (q @ k.T + q_rope @ rope.T) * self.scale
        return self.wo((scores + torch.full(scores.shape, float("-inf")).triu(1)).softmax(-1) @ v)


@case((BATCH, WIDTH), (BATCH, CACHED, RANK + ROPE), mode="step")
class OneHeadOfOneToken(Layer):
    heads = 1

    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.cat([cache, self.wkv_a(x).unsqueeze(1)], dim=1)
        k, v = self.wkv_b(cache[..., :RANK]).split([NOPE, VALUE], dim=-1)
        scores = torch.einsum("bd,bsd->bs", self.wq(x), torch.cat([k, cache[..., RANK:]], dim=-1)) * self.scale
        return self.wo(torch.einsum("bs,bsv->bv", scores.softmax(-1), v)), cache


# -- one token of one request ------------------------------------------------------------------------------------------


@case((WIDTH,), (CACHED, RANK), (CACHED, ROPE), mode="step")
class OneToken(Layer):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, (c, r) = self.wq(x).view(HEADS, QK), self.wkv_a(x).split([RANK, ROPE])
        latent, rope = torch.cat([latent, c[None]]), torch.cat([rope, r[None]])
        k, v = self.wkv_b(latent).view(-1, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=-1)
        scores = torch.einsum("hn,shn->hs", q[:, :NOPE], k) + torch.einsum("hd,sd->hs", q[:, NOPE:], rope)
        o = torch.einsum("hs,shv->hv", (scores * self.scale).softmax(-1), v)
        return self.wo(o.flatten()), latent, rope


@case((WIDTH,), (CACHED, RANK), (CACHED, ROPE), mode="step")
class OneTokenAbsorbed(Layer):
    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, (c, r) = self.wq(x).view(HEADS, QK), self.wkv_a(x).split([RANK, ROPE])
        latent, rope = torch.cat([latent, c[None]]), torch.cat([rope, r[None]])
        w_uk, w_uv = self.absorb()
        absorbed = torch.einsum("hn,hnr->hr", q[:, :NOPE], w_uk)
        weights = ((absorbed @ latent.T + q[:, NOPE:] @ rope.T) * self.scale).softmax(-1)
        return self.wo(torch.einsum("hr,hvr->hv", weights @ latent, w_uv).flatten()), latent, rope


@case((WIDTH,), (CACHED, RANK + ROPE), mode="step")
class OneTokenOfOneCache(Layer):
    def forward(self, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        q, cache = self.wq(x).view(HEADS, QK), torch.cat([cache, self.wkv_a(x)[None]])
        w_uk, w_uv = self.absorb()
        q = torch.cat([torch.bmm(q[:, None, :NOPE], w_uk).squeeze(1), q[:, NOPE:]], dim=-1)
        latent = (q @ cache.T * self.scale).softmax(-1) @ cache[:, :RANK]
        return self.wo(torch.bmm(latent[:, None], w_uv.mT).flatten()), cache


# -- tokens of one request, the weights absorbed elsewhere -------------------------------------------------------------


class References(Layer):
    """As kernels' references have it: of a request nothing but its tokens and heads; fewer queries than the cache."""

    @staticmethod
    def hidden(queries: int, cached: int) -> Tensor:
        seen = torch.ones(queries, cached, dtype=torch.bool).tril(diagonal=cached - queries)
        return torch.zeros(queries, cached).masked_fill_(seen.logical_not(), float("-inf"))


@case((9, HEADS, RANK + ROPE), (CACHED, 1, RANK + ROPE))
class TokensThenHeads(References):
    """lse is returned beside the result."""

    def forward(self, q: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("qhd,khd->hqk", q, cache) * self.scale
        scores += self.hidden(q.shape[0], cache.shape[0])
        values = cache.split([RANK, ROPE], dim=-1)[0]
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


@case((HEADS, 9, RANK + ROPE), (1, CACHED, RANK + ROPE))
class HeadsThenTokens(References):
    def forward(self, q: Tensor, cache: Tensor) -> Tensor:
        scores = q @ cache.mT * self.scale + self.hidden(q.shape[1], cache.shape[1])
        return scores.softmax(-1) @ cache[..., :RANK]


@case((9, HEADS, RANK + ROPE), (CACHED, RANK + ROPE))
class ScoresOfTokensThenHeads(References):
    def forward(self, q: Tensor, cache: Tensor) -> Tensor:
        scores = torch.einsum("thd,sd->ths", q, cache) * self.scale
        scores = scores + self.hidden(q.shape[0], cache.shape[0])[:, None]
        return torch.einsum("ths,sr->thr", scores.softmax(-1), cache[:, :RANK])


@case((9, HEADS, RANK + ROPE), (CACHED, RANK + ROPE))
class EveryTokenSeesAll(References):
    def forward(self, q: Tensor, cache: Tensor) -> Tensor:
        weights = (torch.einsum("thd,sd->hts", q, cache) * self.scale).softmax(-1)
        return torch.einsum("hts,sr->thr", weights, cache[:, :RANK])


# -- heads one by one --------------------------------------------------------------------------------------------------


@case((BATCH, 9, WIDTH), many=HEADS)
class HeadsInALoop(Layer):
    """The weights of each are cut out; the op is called for each."""

    def forward(self, x: Tensor) -> Tensor:
        q, (latent, rope) = self.wq(x).unflatten(-1, (HEADS, QK)), self.wkv_a(x).split([RANK, ROPE], dim=-1)
        w_uk, w_uv = self.absorb()
        outputs: list[Tensor] = []
        for head in range(HEADS):
            k, v = latent @ w_uk[head].T, latent @ w_uv[head].T
            scores = q[:, :, head, :NOPE] @ k.mT + q[:, :, head, NOPE:] @ rope.mT
            scores = (scores * self.scale).masked_fill(~causal(x.shape[1], x.shape[1]), float("-inf"))
            outputs.append(scores.softmax(-1) @ v)
        return self.wo(torch.stack(outputs, dim=2).flatten(2))


@case((BATCH, 9, WIDTH), many=HEADS)
class ModulesPerHead(Layer):
    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, QK), (RANK, NOPE), (RANK, VALUE)
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(HEADS)) for sizes in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        latent, rope = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        outputs = [
            F.scaled_dot_product_attention(q(x), torch.cat([k(latent), rope], dim=-1), v(latent), is_causal=True)
            for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return self.wo(torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("name", CASES)
def test_matched_with_gradients(name: str) -> None:
    cls, shapes, mode, many = CASES[name]
    torch.manual_seed(0)
    module, arguments = cls(), [torch.randn(shape).requires_grad_() for shape in shapes]
    torch._dynamo.reset()
    report = kdacompile.explain(module, options={**EAGER, "kda.cost_model": False})(*arguments)
    assert [(m.pattern, m.mode) for m in report.matches] == [("mla", mode)] * many, str(report)
    assert not report.rejections, str(report)
    have, want = tensors(report.result), tensors(module(*arguments))
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(have, want, strict=True))
    loss, expected = (torch.stack([y.square().sum() for y in result]).sum() for result in (have, want))
    leaves = [*arguments, *module.parameters()]
    one: Any = torch.autograd.grad(loss, leaves, allow_unused=True)
    other: Any = torch.autograd.grad(expected, leaves, allow_unused=True)
    for x, y in zip(one, other, strict=True):
        assert (x is None) == (y is None)
        assert x is None or relative_error(x, y) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_every_length(name: str) -> None:
    """Where no weight says how wide a latent is, its columns stay what they are, and only lengths are open."""
    cls, shapes, _, many = CASES[name]
    torch.manual_seed(0)
    module = cls()
    torch._dynamo.reset()
    options: Any = EAGER | {"kda.expect": {"mla": many}}
    compiled = torch.compile(
        module, backend="kda", dynamic=None if cls.__base__ is References else True, options=options
    )
    with torch.no_grad(), kdacompile.collecting() as report:
        for longer in (0, 4):
            arguments = [torch.randn([n + longer if n in (9, CACHED) else n for n in shape]) for shape in shapes]
            for argument, shape in zip(arguments, shapes, strict=True):
                for dim in (dim for dim, n in enumerate(shape) if n in (9, CACHED)):
                    torch._dynamo.mark_dynamic(argument, dim)
            have, want = tensors(compiled(*arguments)), tensors(module(*arguments))
            assert all(relative_error(x, y) < 1e-6 for x, y in zip(have, want, strict=True))
    assert len(report.graphs) == 1, str(report)
