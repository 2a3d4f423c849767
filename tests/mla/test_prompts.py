"""One graph serves prompts of every length from the first one on, wherever attention over a latent is in it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.mla import absorbed, spellings
from tests.mla.spellings import HEADS, RANK, ROPE, WIDTH
from tests.mla.test_recognised import EAGER, build, inputs

LENGTHS = (9, 30, 5, 64)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def run(module: nn.Module, calls: list[tuple[Tensor, ...]], **how: Any) -> tuple[int, list[str]]:
    """How many graphs the calls take, and what was matched; results are compared with eager's."""
    compiled: Any = torch.compile(module, backend="kda", options=EAGER, **how)
    with collecting() as report:
        for arguments in calls:
            assert relative_error(compiled(*arguments), module(*arguments)) < 1e-6
    return counters["stats"]["unique_graphs"], [match.pattern for match in report.matches]


# Some of these lengths are also how many heads, requests or channels there are: those are opened with them.
@pytest.mark.parametrize(
    ("name", "first"),
    [("SliceCopies", 9), ("SliceCopies", WIDTH), ("SliceCopies", 2), ("TwoTerms", ROPE), ("SdpaIsCausal", RANK),
     ("MqaGrouped", HEADS), ("DeepSeekCausal", RANK)],
)  # fmt: skip
def test_one_graph_in_inference(name: str, first: int) -> None:
    with torch.no_grad():
        assert run(build(name), [inputs(length, length) for length in (first, *LENGTHS)]) == (1, ["mla"])


@pytest.mark.parametrize("name", ["RopeFirst", "ValuesFirst", "Mqa", "TwoCuts"])
def test_as_many_tokens_as_heads_and_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only other lengths show which dimension is which."""
    for module, constant in itertools.product((spellings, absorbed), ("HEADS", "NOPE", "VALUE")):
        monkeypatch.setattr(module, constant, RANK)
    with torch.no_grad():
        assert run(build(name), [inputs(RANK, RANK), inputs(30, 30)]) == (1, ["mla"])


def test_as_many_queries_as_tokens_is_guarded() -> None:
    """``is_causal`` begins at the first token: another number of queries is another attention, and another graph."""
    with torch.no_grad():
        graphs, matched = run(build("SdpaIsCausal"), [inputs(*sizes) for sizes in ((9, 9), (5, 7), (7, 5), (30, 30))])
    assert (graphs, matched) == (2, ["mla"])


def test_batches_to_train_on_are_captured_as_they_are() -> None:
    assert run(build("Naive"), [inputs(9, 9), inputs(12, 12)])[0] == 2


def test_static_shapes_stay_static() -> None:
    with torch.inference_mode():
        assert run(build("Naive"), [inputs(9, 9), inputs(12, 12)], dynamic=False)[0] == 2


class Ordinary(nn.Module):
    """Keys and values of hidden states: nothing to rewrite, so nothing is captured otherwise than by Inductor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.qkv = nn.Linear(WIDTH, RANK), nn.Linear(RANK, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.down(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_other_attention_is_captured_as_ever() -> None:
    with torch.no_grad():
        assert run(Ordinary(), [inputs(9, 9)[:1], inputs(12, 12)[:1]]) == (2, [])
