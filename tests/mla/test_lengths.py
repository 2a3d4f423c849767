"""Masks by length become the op's lengths, if they say nothing else; otherwise they stay masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kdacompile
import kdacompile.backend
from kdacompile.report.report import Report
from tests.compare import relative_error
from tests.mla.absorbed import RANK, Mqa
from tests.mla.spellings import HEADS, ROPE
from tests.mla.test_recognised import EAGER, inputs

Hide = Callable[[Tensor, Tensor], Tensor]
CACHED = 12


class Limited(Mqa):
    """One query a request, which sees as many tokens as ``hide`` leaves of the scores ``[B, H, 1, S]``."""

    def __init__(self, hide: Hide) -> None:
        super().__init__()
        self.hide = hide

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, limit: Tensor) -> Tensor:  # type: ignore[override]
        q, cache = torch.cat(self.queries(x), dim=-1).transpose(1, 2), torch.cat([latent, rope], dim=-1)
        scores = self.hide(q @ cache.unsqueeze(1).mT * self.scale, limit)
        return scores.softmax(-1) @ cache[..., :RANK].unsqueeze(1)


def explained(hide: Hide, limit: Tensor) -> tuple[Report, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, arguments = Limited(hide), (*inputs(1, CACHED, batch=len(limit)), limit)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        return report, relative_error(report.result, module(*arguments))


def below(scores: Tensor, limit: Tensor) -> Tensor:
    seen = torch.arange(CACHED) < limit[:, None, None, None]
    return scores.masked_fill(~seen, float("-inf"))


def at_most(scores: Tensor, limit: Tensor) -> Tensor:
    return torch.where(limit[:, None, None, None] >= torch.arange(CACHED), scores, float("-inf"))


def added(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill((torch.arange(CACHED) > limit[:, None])[:, None, None], float("-inf"))


@pytest.mark.parametrize("hide", [below, at_most, added])
@pytest.mark.parametrize("limits", [(3, 7), (1, CACHED - 1), (5, CACHED + 4)])
def test_lengths_instead_of_the_mask(hide: Hide, limits: tuple[int, ...]) -> None:
    report, error = explained(hide, torch.tensor(limits))
    assert [sorted(match.roles) for match in report.matches] == [["cache", "lengths", "q"]], str(report)
    assert error < 1e-6


def test_lengths_that_the_graph_overwrites_stay_a_mask() -> None:
    def hide(scores: Tensor, limit: Tensor) -> Tensor:
        seen = torch.arange(CACHED) < limit.view(-1, 1, 1, 1)
        limit.add_(1)
        return scores.masked_fill(~seen, float("-inf"))

    torch._dynamo.reset()
    module, arguments = Limited(hide), inputs(1, CACHED)
    mine, theirs = torch.tensor([3, 7]), torch.tensor([3, 7])
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments, mine)
        expected = module(*arguments, theirs)
    assert len(report.matches) == 1, str(report)
    assert relative_error(report.result, expected) < 1e-6
    assert torch.equal(mine, theirs)


def finite(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(CACHED) >= limit[:, None, None, None], torch.finfo(scores.dtype).min)


def from_one(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(1, CACHED + 1) > limit[:, None, None, None], float("-inf"))


def per_head(scores: Tensor, limit: Tensor) -> Tensor:
    limit = limit[:, None, None, None] + torch.arange(HEADS)[None, :, None, None]
    return scores.masked_fill(torch.arange(CACHED) >= limit, float("-inf"))


def suffix(scores: Tensor, limit: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(CACHED) < limit[:, None, None, None], float("-inf"))


def scattered(scores: Tensor, limit: Tensor) -> Tensor:
    """As many limits as there are tokens: one a token, not one a request."""
    return scores.masked_fill(torch.arange(CACHED) >= limit.repeat_interleave(CACHED // 2), float("-inf"))


@pytest.mark.parametrize("hide", [finite, from_one, per_head, suffix, scattered])
def test_other_masks_stay_masks(hide: Hide) -> None:
    """The last of them hides what lies below; a finite number leaves an average where all is hidden."""
    report, error = explained(hide, torch.tensor([3, 7]))
    assert ["mask" in match.roles for match in report.matches] == [True], str(report)
    assert error < 1e-6


# -- positions at which the cache is written ---------------------------------------------------------------------------


class Static(Mqa):
    """A static cache: written at ``start`` and the places after it, seen up to each query's own."""

    def __init__(self, fill: float, *, late: int = 0, writes: bool = True) -> None:
        super().__init__()
        self.fill, self.late, self.writes = fill, late, writes
        self.held = nn.Buffer(torch.zeros(1, CACHED, RANK + ROPE))

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, start: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.shape[1]
        cache = self.held.expand(x.shape[0], -1, -1).clone()
        places = torch.arange(tokens) + start
        new = torch.cat([latent, rope], dim=-1)
        if self.writes:
            cache.index_copy_(1, places, new)
        else:
            cache[:, places] = new
        hidden = torch.arange(CACHED) > (torch.arange(tokens) + start - self.late)[:, None]
        scores = torch.cat(self.queries(x), dim=-1).transpose(1, 2) @ cache.unsqueeze(1).mT * self.scale
        scores = scores + torch.where(hidden[None, None], self.fill, 0.0)
        return scores.softmax(-1) @ cache[..., :RANK].unsqueeze(1)


def run_static(module: Static, tokens: int, start: int) -> tuple[Report, float]:
    torch._dynamo.reset()
    arguments = (*inputs(tokens, tokens, batch=2), torch.tensor(start))
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*arguments)
        return report, relative_error(report.result, module(*arguments))


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 7), (3, 0), (3, CACHED - 3), (5, 4)])
def test_a_static_cache_has_lengths(fill: float, tokens: int, start: int) -> None:
    report, error = run_static(Static(fill), tokens, start)
    assert [sorted(match.roles) for match in report.matches] == [["cache", "lengths", "q"]], str(report)
    assert error < 1e-6


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("module", [Static(-3e38, late=1), Static(-3e38, writes=False)], ids=["late", "wraps"])
def test_nobody_knows_that_a_token_is_seen(module: Static, tokens: int) -> None:
    """The first query may see nothing and average; an index, unlike ``index_copy``, may count from the end."""
    report, error = run_static(module, tokens, 0 if module.writes else -tokens)
    assert ["mask" in match.roles for match in report.matches] == [True], str(report)
    assert error < 1e-6


def test_as_many_queries_as_requests_stay_a_mask() -> None:
    report, error = run_static(Static(float("-inf")), 2, 3)
    assert ["mask" in match.roles for match in report.matches] == [True], str(report)
    assert error < 1e-6


def test_layers_share_what_is_made_of_their_lengths() -> None:
    layers, graphs = nn.ModuleList([Limited(below), Limited(below)]), list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return kdacompile.backend.kda(graph, example, options={**EAGER, "kda.expect": {"mla": 2}})

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(*arguments) for layer in layers)

    torch._dynamo.reset()
    arguments = (*inputs(1, CACHED), torch.tensor([3, 7]))
    with torch.no_grad():
        for got, want in zip(torch.compile(run, backend=backend)(*arguments), run(*arguments), strict=True):
            assert relative_error(got, want) < 1e-6
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.kdacompile.mla.default]
    assert len(calls) == 2 and calls[0].args[8] is calls[1].args[8]
