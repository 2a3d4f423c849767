"""A cache that the model gathers from pages is read where it lies; what only looks like it is gathered as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kdacompile
from kdacompile.report.report import Report
from tests.compare import relative_error
from tests.mla.paged import BATCH, EACH, GATHERED, PAGE, PAGED, PAGES, Expanded, Paged, arguments
from tests.mla.test_recognised import EAGER


def explained(name: str, table: Tensor | None = None) -> tuple[Report, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = (PAGED | GATHERED)[name]()
    mine, theirs = arguments(table), arguments(table)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*mine)
        expected = module(*theirs)
    assert torch.equal(mine[1], theirs[1])
    return report, relative_error(report.result, expected)


def gathers(report: Report) -> bool:
    return any("block_table" not in match.roles for match in report.matches)


@pytest.mark.parametrize("name", PAGED)
def test_nothing_is_gathered(name: str) -> None:
    report, error = explained(name)
    assert len(report.matches) == 1 and not gathers(report), str(report)
    assert error < 1e-6


@pytest.mark.parametrize("name", GATHERED)
def test_other_gathers_stay(name: str) -> None:
    report, error = explained(name)
    assert len(report.matches) == 1 and gathers(report), str(report)
    assert error < 1e-6


@pytest.mark.parametrize("cls", [Paged, Expanded])
def test_a_pool_without_pages(cls: type[Paged]) -> None:
    """``pool[slots]`` of two matrices, a slot for every token: it is no weight that is picked from."""

    class Flat(cls):  # type: ignore[misc, valid-type]
        def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
            return pool[table]

    torch._dynamo.reset()
    x, pool, table, lengths = arguments()
    slots = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
    module, inputs = Flat(), (x, pool.flatten(0, 1), slots, lengths)
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*inputs)
        assert len(report.matches) == 1 and not gathers(report), str(report)
        assert relative_error(report.result, module(*inputs)) < 1e-6


@pytest.mark.parametrize("name", ["Paged", "Clamped"])
def test_entries_below_zero(name: str) -> None:
    """An index counts them from the end; a clamp has made them zero."""
    table = torch.tensor([[4, -1, 2, 0], [-PAGES, 5, -3, 7]])
    report, error = explained(name, table)
    assert not gathers(report), str(report)
    assert error < 1e-6


def test_entries_that_no_pool_has_are_refused() -> None:
    with pytest.raises(ValueError, match="block_table"):
        explained("Paged", torch.full((BATCH, EACH), PAGES))


def test_a_prefill_expands_what_is_gathered() -> None:
    torch._dynamo.reset()
    module = PAGED["Expanded"]()
    x, pool, table, _ = arguments()
    inputs = (x.expand(-1, 5, -1).contiguous(), pool, table, torch.full((BATCH,), EACH * PAGE))
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*inputs)
        assert len(report.matches) == 1 and gathers(report), str(report)
        assert relative_error(report.result, module(*inputs)) < 1e-6


def test_gradients_go_through_what_is_gathered() -> None:
    torch._dynamo.reset()
    module, inputs = Paged(), arguments()
    inputs[1].requires_grad_()
    report = kdacompile.explain(module, options=EAGER)(*inputs)
    assert len(report.matches) == 1 and gathers(report), str(report)
    have, want = (torch.autograd.grad(y.sum(), inputs[1])[0] for y in (report.result, module(*inputs)))
    assert relative_error(have, want) < 1e-5


def test_one_graph_for_all_tables() -> None:
    torch._dynamo.reset()
    module, graphs = Paged(), 0

    def count(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        assert not any("index" in str(node.target) for node in graph.graph.nodes if graphs > 1)
        return kdacompile.backend.kda(graph, example, options=EAGER | {"kda.expect": {"mla": 1}})

    compiled = torch.compile(module, backend=count, dynamic=True)
    with torch.no_grad():
        for pages, each in ((11, 4), (30, 9), (17, 2)):
            generator = torch.Generator().manual_seed(each)
            pool = torch.randn(pages, PAGE, 12, generator=generator)
            table = torch.randint(pages, (BATCH, each), generator=generator)
            inputs = (arguments()[0], pool, table, torch.tensor([1, each * PAGE]))
            assert relative_error(compiled(*inputs), module(*inputs)) < 1e-6
    assert graphs == 1
