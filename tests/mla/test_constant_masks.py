"""What constant masks hide, and that the same mask is computed once for all layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from torch import Tensor, fx, nn

from kdacompile.graph.build import functional_graph
from kdacompile.graph.ir import Value
from kdacompile.patterns.engine import constants
from kdacompile.patterns.engine.constants import Place, parts, parts_of_constant
from kdacompile.patterns.mla import constant_masks
from kdacompile.patterns.mla.constant_masks import of_numbers
from tests.compare import relative_error
from tests.mla.spellings import causal
from tests.mla.test_recognised import build, explained, inputs

LOW = torch.finfo(torch.float32).min


def numbers(keep: Tensor, fill: float = -math.inf) -> Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, fill)


MASKS = {
    "nothing": numbers(torch.ones(3, 5, dtype=torch.bool)),
    "causal": numbers(causal(5, 5)),
    "causal, cached before": numbers(causal(3, 5)),
    "of a batch": numbers(causal(3, 5)).expand(2, 1, 3, 5),
    "keys before queries": numbers(causal(3, 5).mT),
    "finite": numbers(causal(5, 5), LOW),
    "from the first token": numbers(torch.ones(3, 5, dtype=torch.bool).tril()),
    "strict": numbers(torch.ones(5, 5, dtype=torch.bool).tril(-1)),
    "window": numbers(causal(5, 5) & ~causal(5, 5).tril(-2)),
    "one entry beside": numbers(causal(5, 5)).index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(0.5)),
    "a NaN": numbers(causal(5, 5)).index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(math.nan)),
    "linear bias": torch.arange(5.0) - torch.arange(3.0)[:, None],
    "one query": torch.tensor([[0.0, 0.0, -math.inf]]),
    "whole numbers": torch.arange(5),
    "of one number": torch.tensor(-1.0),
    "without entries": torch.zeros(0, 5),
    "truths": torch.arange(5) > 2,
}


@pytest.mark.parametrize("size", [1, 6, 1 << 18])
@pytest.mark.parametrize("name", MASKS)
def test_facts_are_those_of_the_numbers(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the parts are in which it is looked at."""
    monkeypatch.setattr(constants, "PART", size)
    data = MASKS[name]
    found = of_numbers(data.shape, parts(data), torch.float32)
    assert found.changes == bool(data.any())
    assert found.raises == (not bool((data <= 0).all()))
    assert found.gone == bool(((data == 0) | (data == -math.inf)).all())
    hides = data <= LOW / 2 if data.is_floating_point() else torch.zeros_like(data, dtype=torch.bool)
    for queries, tokens in permutations(range(-data.dim(), 0), 2):
        length = {"T": data.shape[queries], "S": data.shape[tokens]}
        layout = "".join({queries: "T", tokens: "S"}.get(dim, "B") for dim in range(-data.dim(), 0))
        moved = hides.movedim((queries, tokens), (-2, -1))
        hidden = length["T"] <= length["S"] and bool((moved == ~causal(length["T"], length["S"])).all())
        want = hidden and found.changes and bool(((data == 0) | hides).all())
        assert found.is_causal(layout, length) == want, (queries, tokens)
        assert not found.is_causal(layout, length | {"T": length["T"] + 1})


def chosen(x: Tensor, first: float, second: float, *, strict: bool) -> Tensor:
    places = torch.arange(x.shape[-1])
    seen = places < places[:, None] if strict else places <= places[:, None]
    return x + torch.where(seen, torch.tensor(first), torch.tensor(second))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "numbers", [(0, -math.inf), (0, LOW), (0.5, LOW), (0, 0), (-math.inf, 0), (0, math.nan), (LOW, LOW)]
)
def test_a_choice_of_two_numbers_is_read_without_them(
    numbers: tuple[float, float], strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constant_masks, "_known", {})
    torch._dynamo.reset()
    masks: list[Value] = []

    def backend(gm: fx.GraphModule, _: list[object]) -> object:
        masks.extend(read for op in functional_graph(gm.graph).ops[-1:] for read in op.reads if read.const)
        return gm.forward

    with torch.no_grad():
        torch.compile(functools.partial(chosen, strict=strict), backend=backend, fullgraph=True)(
            torch.randn(7, 7), *numbers
        )
    (mask,) = masks
    assert constant_masks.added(mask, torch.float32) == of_numbers(mask.shape, parts_of_constant(mask), torch.float32)


def test_a_mask_is_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one of its own, made of the same; and again at each of the other sizes that are looked at."""
    read: list[tuple[int, ...]] = []

    def counted(value: Value) -> Iterator[tuple[Place, Tensor]]:
        read.append(value.shape)
        return parts_of_constant(value)

    monkeypatch.setattr(constant_masks, "parts_of_constant", counted)
    monkeypatch.setattr(constant_masks, "_known", {})

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([build("DeepSeekCausal") for _ in range(3)])

        def forward(self, *given: Tensor) -> list[Tensor]:
            return [layer(*given) for layer in self.layers]

    module, given = Layers(), inputs(9, 9)
    with torch.no_grad():
        report = explained(module, given, dynamic=True)
        want = module(*given)
    assert [match.pattern for match in report.matches] == ["mla"] * 3, str(report)
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(report.result, want, strict=True))
    assert len(read) == len(set(read)) > 1
