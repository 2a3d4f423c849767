"""Scores over their own row sums: the normaliser that leaves linear attention recognisable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.explainer import explain
from tests.backend.test_hoist import explained
from tests.compare import worst_error


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def divided_before(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q.exp(), k.exp()).tril()
    scores = scores / scores.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", scores, v)


def divided_after(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The values are laid out after the sums were made."""
    q, k = heads_first(F.elu(q) + 1, F.elu(k) + 1)
    scores = (q @ k.mT).tril()
    total = scores.sum(dim=3)
    return ((scores @ v.transpose(1, 2)) / (total[..., None] + 1e-6)).transpose(1, 2)


def by_einsum_after(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", F.softplus(q), F.softplus(k)).tril()
    total = scores.sum(-1).transpose(1, 2).unsqueeze(-1)
    return torch.einsum("bhij,bjhd->bihd", scores, v) / (total + 1e-2)


def two_factors(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """mLSTM without its stabiliser, its output gate on the scores: decay, a bounded normaliser, a factor per row."""
    q, k, v, gate = heads_first(q, k, v, F.logsigmoid(gate))
    total = gate.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    scores = (q @ k.mT) * decay
    scores = scores / scores.sum(-1, keepdim=True).abs().clamp_min(1.0) * logit.transpose(1, 2).sigmoid()[..., None]
    return torch.matmul(scores, v).transpose(1, 2)


def sums_without_gradient(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """RetNet's, as torchscale first had it."""
    q, k, v = heads_first(q, k, v)
    scores = (q @ k.mT).tril()
    scores = scores / scores.detach().sum(-1, keepdim=True).abs().clamp(min=1)
    return (scores @ v).transpose(1, 2)


def sums_with_and_without_gradient(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q.exp(), k.exp(), v)
    scores = (q @ k.mT).tril()
    total = scores.detach().sum(-1) * 0.5 + scores.sum(-1)
    return ((scores @ v) / total[..., None]).transpose(1, 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        divided_before,
        divided_after,
        by_einsum_after,
        two_factors,
        sums_without_gradient,
        sums_with_and_without_gradient,
    ],
)
def test_sums_are_one_more_column(fn: Callable[..., Tensor], grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    pattern = "simple_gla" if fn is two_factors else "linear_attention"
    assert [match.pattern for match in report.matches] == [pattern], str(report)


def over_their_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).tril()
    return (scores / scores.sum(-1, keepdim=True).abs()) @ v


def whole_over_their_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No row of the mask: every token reads all. Laid out as the one above."""
    scores = q @ k.mT
    return (scores / scores.sum(-2, keepdim=True).abs()) @ v


@pytest.mark.parametrize("shape", [(2, 4, 12, 8), (8, 8, 12, 64)])
@pytest.mark.parametrize("grad", [False, True])
def test_as_many_batches_and_heads_as_channels(shape: tuple[int, ...], grad: bool) -> None:
    """Laid out for the product, the values could be a state of another reading of the result."""
    torch.manual_seed(0)
    inputs = [torch.rand(shape, requires_grad=grad) for _ in range(3)]
    report = explain(over_their_sums)(*inputs)
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)
    expected = over_their_sums(*inputs)
    assert worst_error(report.result, expected) <= 1e-5
    if grad:
        weight = torch.rand(shape)
        ours, theirs = (torch.autograd.grad(o, inputs, weight) for o in (report.result, expected))
        assert worst_error(ours, theirs) <= 1e-4


def test_other_sums_of_as_many_batches_and_heads_stay() -> None:
    torch.manual_seed(0)
    inputs = [torch.rand(2, 4, 12, 8) for _ in range(3)]
    report = explain(whole_over_their_sums)(*inputs)
    assert worst_error(report.result, whole_over_their_sums(*inputs)) <= 1e-5
    assert not report.matches and report.rejections, str(report)


def over_the_queries(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q.exp(), k.exp(), v)
    scores = (q @ k.mT).tril()
    return (scores / scores.sum(-2, keepdim=True)) @ v


def masked_after_the_sum(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q.exp(), k.exp(), v)
    scores = q @ k.mT
    return (scores / scores.sum(-1, keepdim=True)).tril() @ v


def scores_read_elsewhere(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q.exp(), k.exp(), v)
    scores = (q @ k.mT).tril()
    scores = scores / scores.sum(-1, keepdim=True)
    return (scores @ v) * scores.square().sum(-1, keepdim=True)


def sums_of_magnitudes(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """RetNet's own: no product with ones."""
    q, k, v = heads_first(q, k, v)
    scores = (q @ k.mT).tril()
    return (scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)) @ v


def overwritten_factor(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v = heads_first(q.exp(), k.exp(), v)
    scores = (q @ k.mT).tril()
    total = scores.sum(-1, keepdim=True) + 1
    scores = scores / total
    total.mul_(2)
    return (scores @ v) + total


def overwritten_values(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Where the sums are made, the values are not yet what they are in the product; where they are read, they are."""
    q, k = heads_first(q.exp(), k.exp())
    scores = (q @ k.mT).tril()
    total = scores.sum(-1, keepdim=True)
    v.mul_(2)
    return (scores @ v.relu().transpose(1, 2)) / total


def fewer_scores_than_values(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """One batch of scores for all, so that there is one of sums."""
    q, k, v = heads_first(q[:1].exp(), k[:1].exp(), v)
    scores = (q @ k.mT).tril()
    total = scores.sum(-1, keepdim=True)
    return (scores / total) @ v, total


def large_in_half(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Finite as it is written; the product of scores that are not yet divided is beyond fp16."""
    q, k, v = heads_first(q.half().exp() * 16, k.half().exp() * 16, v.half() + 100)
    scores = (q @ k.mT).tril()
    return (scores / scores.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize(
    "fn",
    [
        over_the_queries,
        masked_after_the_sum,
        scores_read_elsewhere,
        sums_of_magnitudes,
        overwritten_factor,
        fewer_scores_than_values,
    ],
)
def test_other_normalisers_stay(fn: Callable[..., Tensor]) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) <= 1e-5
    assert not report.matches
    assert report.rejections


def test_values_are_read_where_the_product_read_them() -> None:
    ours, expected, report = explained(overwritten_values)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)


def test_half_precision_holds_only_what_is_normalised() -> None:
    ours, expected, report = explained(large_in_half)
    assert expected.isfinite().all() and worst_error(ours, expected) <= 1e-3
    assert not report.matches
