"""Several writes a token beyond one call: gradients, lifted loops, all lengths, gates of -1000, causality."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile.patterns.recurrence.definition import token_recurrence
from kdacompile.patterns.recurrence.family import FORMS
from kdacompile.report.collect import collecting
from tests.compare import worst_error
from tests.spellings.products import product_chunks, product_loop, spread
from tests.spellings.registry import REGISTRY
from tests.spellings.test_recognised import check_gradients

EAGER: dict[str, Any] = {"kda.inner": "eager"}


def test_the_definition_is_the_gated_delta_rule_read_every_second_token() -> None:
    q, k, v, g, beta = REGISTRY["product_loop"].make_inputs(T=5, dtype=torch.float64)
    o, state = token_recurrence(q, k, v, g.exp().unsqueeze(-1), beta, delta=True, writes=2)
    decay = spread(g, 0).exp().unsqueeze(-1)
    every, last = token_recurrence(spread(q, 1), k, v, decay, beta, delta=True)
    assert torch.equal(o, every[:, 1::2]) and torch.equal(state, last)


@pytest.mark.parametrize("name", ["product_step", "product_apart", "product_gate_per_channel", "product_chunks"])
def test_gradients(name: str) -> None:
    check_gradients(name)


@pytest.mark.parametrize("fn", [product_loop, product_chunks])
def test_several_lengths(fn: Any) -> None:
    torch._dynamo.reset()
    spelling = REGISTRY[fn.__name__]
    compiled = torch.compile(fn, backend="kda", options=EAGER)
    with collecting() as report:
        for length in (8, 16, 24):
            inputs = spelling.make_inputs(T=length, seed=5)
            assert worst_error(compiled(*inputs), fn(*inputs)) <= 1e-5
    assert {match.pattern for match in report.matches} == {spelling.pattern}, str(report)


def test_gates_of_minus_1000_and_causality() -> None:
    """Two chunks of the op; what comes after a token changes none of its bits."""
    torch._dynamo.reset()
    q, k, v, g, beta = REGISTRY["product_loop"].make_inputs(T=40, seed=6)
    g[:, ::5] = -1000.0
    compiled = torch.compile(product_loop, backend="kda", options={**EAGER, "kda.lift": False})
    with collecting() as report:
        whole = compiled(q, k, v, g, beta)
    assert len(report.matches) == 1, str(report)
    assert worst_error(whole, product_loop(q, k, v, g, beta)) <= 1e-5
    k[:, 50:], v[:, 50:], q[:, 25:] = 3.0, -7.0, 2.0
    assert torch.equal(compiled(q, k, v, g, beta)[:, :25], whole[:, :25])


def test_the_support_table_names_the_rows_that_other_forms_have() -> None:
    products, bonuses, early = FORMS
    assert {spelling.pattern for spelling in REGISTRY.values() if spelling.writes > 1} == set(products.names)
    assert {spelling.pattern for spelling in REGISTRY.values() if "u" in spelling.takes} == set(bonuses.names)
    assert {spelling.pattern for spelling in REGISTRY.values() if spelling.reads != "after"} == set(early.names)
