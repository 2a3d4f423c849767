"""What constant masks hide, and that the same mask is computed once for all layers."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from kdacompile.patterns.engine.evaluate import constant
from kdacompile.patterns.mla import constant_masks
from kdacompile.patterns.mla.constant_masks import _of_numbers
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
}


@pytest.mark.parametrize("name", MASKS)
def test_facts_are_those_of_the_numbers(name: str) -> None:
    data = MASKS[name]
    found = _of_numbers(data, torch.float32)
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


def test_a_mask_is_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one of its own, made of the same; and again at each of the other sizes that are looked at."""
    read: list[tuple[int, ...]] = []

    def counted(value: object) -> Tensor:
        data = constant(value)  # pyright: ignore[reportArgumentType]
        read.append(tuple(data.shape))
        return data

    monkeypatch.setattr(constant_masks, "constant", counted)
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
