"""Scores whose scale is held in a tensor, and the logarithm of their sum (lse) that is returned beside the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile.report.report import Report
from tests.compare import copies, tensors, worst_error
from tests.mla.layers import HEADS, NOPE, RANK, ROPE, WIDTH
from tests.mla.variants import PLAIN, Variant

EAGER: dict[str, Any] = {"kda.inner": "eager"}
CACHED = 13


class Scaled(Variant):
    """``factor`` in the place of the scale; ``weights`` may give more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.3))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Any:
        k, v = self.keys(*self.cached(x, latent, rope))
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        scores = self.scores(q, k)
        return self.results(scores, self.weights(scores, x) @ v)

    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.transpose(1, 2).flatten(2)


class Buffer(Scaled):
    def __init__(self) -> None:
        super().__init__()
        del self.factor
        self.register_buffer("factor", torch.full((1,), 0.3))


class Divided(Scaled):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.factor


class MaskedLater(Scaled):
    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)


class WithLse(Variant):
    forward = Scaled.forward

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.scale

    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.transpose(1, 2), scores.logsumexp(-1)


class InOtherUnits(WithLse):
    """Base two, tokens before heads, one more dimension."""

    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.transpose(1, 2), scores.logsumexp(-1, keepdim=True).transpose(1, 2) * math.log2(math.e)


class Merged(WithLse):
    """As whoever merges attention over two parts of a cache does."""

    def results(self, scores: Tensor, o: Tensor) -> Any:
        share = (scores.logsumexp(-1, keepdim=True) - 1.0).sigmoid()
        return (o * share).transpose(1, 2)


class HiddenRows(WithLse):
    """A mask of the requests: of one nothing is seen, and its lse is -inf."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = (q[:, 0, 0, 0] > q[:, 0, 0, 0].mean())[:, None, None, None].expand(-1, 1, 1, k.shape[2])
        return (q @ k.mT * self.scale).masked_fill(hidden, -torch.inf)

    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.nan_to_num().transpose(1, 2), scores.logsumexp(-1)


LSE = (WithLse, InOtherUnits, Merged)
FOUND: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((Scaled, Buffer, Divided, MaskedLater), (*PLAIN, "factor")),
    **dict.fromkeys(LSE, PLAIN),
    HiddenRows: (*PLAIN, "mask"),
}


class ScaledTwice(Scaled):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor * self.factor.exp()


class ScaledBehindTheMask(Scaled):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2])
        return (q @ k.mT + seen.log()) * self.factor

    def weights(self, scores: Tensor, x: Tensor) -> Tensor:
        return scores.softmax(-1)


class OneTermScaled(Scaled):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        plain = torch.einsum("bhtd,bhsd->bhts", q[..., :NOPE], k[..., :NOPE]) * self.factor
        return plain + torch.einsum("bhtd,bhsd->bhts", q[..., NOPE:], k[..., NOPE:])


class OneFactorPerHead(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(HEADS, 1, 1))


class LseOfOtherScores(WithLse):
    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.transpose(1, 2), (2 * scores).logsumexp(-1)


class LseOverQueries(WithLse):
    def results(self, scores: Tensor, o: Tensor) -> Any:
        return o.transpose(1, 2), scores.logsumexp(-2)


class SoftmaxOfOtherScores(WithLse):
    """A number per row is added before the softmax, which does not see it; lse does."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + q.sum(-1, keepdim=True)


LEFT = (ScaledTwice, ScaledBehindTheMask, OneTermScaled, OneFactorPerHead, LseOfOtherScores, LseOverQueries)


def inputs(tokens: int, cached: int = CACHED) -> list[Tensor]:
    return [torch.randn(2, many, width) for many, width in ((tokens, WIDTH), (cached, RANK), (cached, ROPE))]


def explained(cls: type[nn.Module], tokens: int) -> tuple[Report, float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, own = cls(), inputs(tokens)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*own)
        return report, worst_error(report.result, module(*own))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_matched(cls: type[nn.Module], tokens: int) -> None:
    report, error = explained(cls, tokens)
    assert [set(match.roles) for match in report.matches] == [set(FOUND[cls])], str(report)
    assert error < 1e-5, str(report)


@pytest.mark.parametrize("cls", [*LEFT, SoftmaxOfOtherScores], ids=lambda cls: cls.__name__)
def test_near_misses_equal_eager(cls: type[nn.Module]) -> None:
    report, error = explained(cls, 5)
    assert error < 1e-5 and not report.matches, str(report)


@pytest.mark.parametrize("cls", [Scaled, Divided, WithLse, Merged], ids=lambda cls: cls.__name__)
def test_gradients(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, own = cls(), [x.requires_grad_() for x in inputs(5)]
    theirs = copies(own)
    report = kdacompile.explain(module, options=EAGER)(*own)
    assert len(report.matches) == 1, str(report)
    found = gradients(report.result, [*own, *module.parameters()])
    assert worst_error(found, gradients(module(*theirs), [*theirs, *module.parameters()])) < 1e-4


def gradients(result: Any, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    losses = [(x * torch.randn(x.shape, generator=generator)).sum() for x in tensors(result)]
    return torch.autograd.grad(torch.stack(losses).sum(), wanted, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("cls", [Scaled, InOtherUnits], ids=lambda cls: cls.__name__)
def test_one_graph_for_all_lengths(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = cls()
    options: Any = {**EAGER, "kda.expect": {"mla": 1}}
    compiled = torch.compile(module, backend="kda", dynamic=True, options=options)
    with torch.no_grad():
        for tokens, cached in ((5, 13), (6, 19), (9, 31)):
            own = inputs(tokens, cached)
            assert worst_error(compiled(*own), module(*own)) < 1e-5


def test_exponentials_of_gates_are_no_softmax() -> None:
    """An exponential between sums and a product, of numbers that no product has made."""

    def weighted(gates: Tensor, v: Tensor) -> Tensor:
        return (gates - gates.sum(-1, keepdim=True)).exp() @ v

    torch._dynamo.reset()
    own = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    report = kdacompile.explain(lambda g, v: torch.softmax(weighted(g, v) @ v.mT, -1), options=EAGER)(*own)
    assert not report.matches and not [r for r in report.rejections if r.code == "internal"], str(report)
