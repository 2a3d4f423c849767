"""Every spelling is recognised as what it computes and still computes it; no near miss is ever changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from kdacompile.report.report import Report
from tests.compare import copies, relative_error, tensors, worst_error
from tests.spellings import NEAR_MISSES, PATTERNS, SPELLINGS
from tests.spellings.near_misses import NearMiss
from tests.spellings.registry import REGISTRY, Spelling

# Two lengths per spelling by default; all of them (three more minutes) on request.
ALL_LENGTHS = os.environ.get("KDACOMPILE_TEST_ALL_LENGTHS") == "1"
FP32_BOUND = 1e-5
# Not near enough to the family for a reason to be owed.
NO_REASON_OWED = {"softmax_attention"}


def explained(fn: Any, inputs: tuple[Tensor, ...], **options: Any) -> Report:
    torch._dynamo.reset()
    # Functions are not lifted here: what is tested is the captured graph.
    return kdacompile.explain(fn, options={"kda.lift": False, **options})(*inputs)


def cases() -> Iterator[Any]:
    for spelling in SPELLINGS:
        for length in spelling.lengths if ALL_LENGTHS else spelling.lengths[:2]:
            yield pytest.param(spelling, length, id=f"{spelling.name}-{length}")


@pytest.mark.parametrize(("spelling", "length"), list(cases()))
def test_spelling_is_recognised(spelling: Spelling, length: int) -> None:
    inputs = spelling.make_inputs(T=length, dtype=spelling.dtypes[0], seed=1)
    own, theirs = copies(inputs), copies(inputs)
    expected = spelling.fn(*theirs)
    report = explained(spelling.fn, own)
    bound = FP32_BOUND if spelling.dtypes[0] != torch.bfloat16 else 1e-2
    assert worst_error((report.result, own), (expected, theirs)) <= bound, str(report)
    assert report.graph_count == 1
    if length <= 2 and not spelling.has_state:
        return  # a state that starts at zero and is hardly used leaves no recurrence to see
    assert [match.pattern for match in report.matches] == [spelling.pattern], str(report)
    if length > 1 or spelling.mode == "step":
        assert report.matches[0].mode == spelling.mode


@pytest.mark.parametrize("spelling", [s for s in SPELLINGS if torch.bfloat16 in s.dtypes], ids=lambda s: s.name)
@pytest.mark.parametrize(("precision", "ratio"), [("match", 1.5), ("fp32", 1.05)])
def test_bf16_error_stays_eagers(spelling: Spelling, precision: str, ratio: float) -> None:
    """Against fp64: no worse than 1.5x eager's own error; with the upcast kept, no worse than eager's."""
    inputs = spelling.make_inputs(dtype=torch.bfloat16, seed=2)
    exact, _ = spelling.expected(inputs)
    own, theirs = copies(inputs), copies(inputs)
    eager, _ = spelling.read(spelling.fn(*theirs), theirs)
    report = explained(spelling.fn, own, **{"kda.precision": precision})
    ours, _ = spelling.read(report.result, own)
    assert ours.dtype == eager.dtype
    assert [match.pattern for match in report.matches] == [spelling.pattern], str(report)
    assert relative_error(ours, exact) <= ratio * relative_error(eager, exact) + 1e-6


def one_of_each() -> list[Spelling]:
    """The first spelling of each pattern that carries a state in and out: the hardest gradients."""
    stated = [s for s in SPELLINGS if s.mode == "sequence" and s.has_state and s.returns_state]
    return [next(s for s in stated if s.pattern == pattern) for pattern in PATTERNS if pattern != "delta_rule"]


@pytest.mark.parametrize("spelling", one_of_each(), ids=lambda s: s.name)
def test_gradients_equal_eager(spelling: Spelling) -> None:
    inputs = tuple(x.requires_grad_() for x in spelling.make_inputs(seed=3))
    own, theirs = copies(inputs), copies(inputs)
    expected = spelling.fn(*theirs)
    report = explained(spelling.fn, own)
    assert [match.pattern for match in report.matches] == [spelling.pattern], str(report)
    assert worst_error(gradients(report.result, own), gradients(expected, theirs)) <= 1e-4


def gradients(result: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random projection of all results; zeros where none flows."""
    generator = torch.Generator().manual_seed(0)
    outputs = [x for x in tensors(result) if x.requires_grad]
    loss = torch.stack([(x * torch.randn(x.shape, generator=generator)).sum() for x in outputs]).sum()
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def check_gradients(name: str) -> None:
    """A spelling that is matched where its loop is captured has eager's gradients."""
    torch._dynamo.reset()
    spelling = REGISTRY[name]
    inputs = tuple(x.requires_grad_() for x in spelling.make_inputs(seed=3))
    own, theirs = copies(inputs), copies(inputs)
    report = kdacompile.explain(spelling.fn, options={"kda.lift": False})(*own)
    assert [match.pattern for match in report.matches] == [spelling.pattern], str(report)
    assert worst_error(gradients(report.result, own), gradients(spelling.fn(*theirs), theirs)) <= 1e-4


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda m: m.name)
def test_near_miss_equals_eager(miss: NearMiss) -> None:
    inputs = miss.make_inputs(seed=0)
    if miss.gradients:
        inputs = tuple(x.requires_grad_() for x in inputs)
    own, theirs = copies(inputs), copies(inputs)
    torch.manual_seed(0)
    expected = miss.fn(*theirs)
    torch.manual_seed(0)
    report = explained(miss.fn, own)
    assert worst_error((report.result, own), (expected, theirs)) <= FP32_BOUND, str(report)
    if miss.gradients:
        assert worst_error(gradients(report.result, own), gradients(expected, theirs)) <= 1e-4, str(report)
    if miss.expect == "decline":
        assert not [match for match in report.matches if match.mode == "sequence"], str(report)
        assert report.matches or report.rejections or miss.name in NO_REASON_OWED, "declined without a reason"
