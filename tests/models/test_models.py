"""Every linear-attention layer of every model is matched, in prefill and in the cached step, and logits stay eager's.

One length and fp32 here; the full table, glm5_next in it, is ``python -m tests.matrix``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kdacompile
from kdacompile.report.report import Report
from tests.compare import cache_tensors, relative_error, worst_error

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from tests.models.zoo import CASES, ModelCase

LENGTH = 70  # two chunks, the second one padded
BOUND = 1e-5
QUICK = [case for case in CASES.values() if case.name != "glm5_next"]  # its own graph breaks cost two minutes


def call(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**kwargs)[0]


def explained(model: PreTrainedModel, kwargs: dict[str, Any], **how: Any) -> Report:
    torch._dynamo.reset()
    with torch.no_grad():
        # Functions are not lifted here: what is tested is the captured graph.
        return kdacompile.explain(model, options={"kda.lift": False}, **how)(**kwargs)


def eager_capture(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
    return graph.forward


def check(
    case: ModelCase, model: PreTrainedModel, own: dict[str, Any], theirs: dict[str, Any], mode: str, **how: Any
) -> Report:
    expected = call(model, theirs)
    report = explained(model, own, **how)
    layers = [(m.pattern, m.mode) for m in report.matches if m.pattern != "mla"]  # tests/mla is about those
    assert layers == [(case.pattern, mode)] * case.layers, str(report)
    assert relative_error(report.result[0], expected) <= BOUND
    return report


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_prefill_fills_the_cache(case: ModelCase) -> None:
    model = case.build()
    own, theirs, third = (case.prefill_inputs(model, LENGTH, cache=True) for _ in range(3))
    # A length found open has loops captured twice, the second time with symbols. Qwen3-Next below is one such model,
    # the others are left to `python -m tests.lengths`.
    report = check(case, model, own, theirs, "sequence", dynamic=None if case.breaks_by_itself else False)
    caches = (cache_tensors(kwargs[case.cache_argument]) for kwargs in (own, theirs))
    assert worst_error(*caches) <= BOUND
    alone = explained(model, third, backend=eager_capture).graph_count if case.breaks_by_itself else 1
    assert report.graph_count == alone


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_cached_step(case: ModelCase) -> None:
    model = case.build()
    own, theirs = case.step_inputs(model), case.step_inputs(model)
    check(case, model, own, theirs, "step")
    assert worst_error(*(cache_tensors(kwargs[case.cache_argument]) for kwargs in (own, theirs))) <= BOUND


PADDED = ("kimi_linear", "qwen3_next")


@pytest.mark.parametrize("name", [*PADDED, "mamba2", "minimax"])
def test_prefill_without_a_cache(name: str) -> None:
    case = CASES[name]
    model = case.build()
    own, theirs = (case.prefill_inputs(model, LENGTH, cache=False) for _ in range(2))
    # The padded batch below has Qwen3-Next's length open, `python -m tests.lengths` Kimi Linear's.
    check(case, model, own, theirs, "sequence", dynamic=False if name in PADDED else None)


@pytest.mark.parametrize("name", PADDED)
def test_padding_mask(name: str) -> None:
    """A left-padded batch: models zero the padded tokens before the layer, which is none of the pattern's business."""
    case = CASES[name]
    model = case.build()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :11] = 0
    own, theirs = (case.prefill_inputs(model, LENGTH, cache=False) | {"attention_mask": mask} for _ in range(2))
    # Kimi Linear's loop over chunks with an open length is left to `python -m tests.lengths`.
    check(case, model, own, theirs, "sequence", dynamic=False if name == "kimi_linear" else None)
