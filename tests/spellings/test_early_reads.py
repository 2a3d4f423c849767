"""Tokens that read the state before their own write, beyond one call: gradients, lifted functions, open sizes, cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.report.collect import collecting
from tests.compare import relative_error, worst_error
from tests.spellings import early_reads
from tests.spellings.registry import REGISTRY
from tests.spellings.test_recognised import check_gradients

EAGER: dict[str, Any] = {"kda.inner": "eager"}
NAMES = [name for name, spelling in REGISTRY.items() if spelling.reads != "after"]
CLOSED = [name for name in NAMES if "diagonal" in name or "chunks" in name]


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    check_gradients(name)


@pytest.mark.parametrize("name", NAMES)
def test_several_batches_and_lengths(name: str) -> None:
    """Lengths of what is no loop: that has a graph for each."""
    torch._dynamo.reset()
    spelling = REGISTRY[name]
    compiled = torch.compile(spelling.fn, backend="kda", options={**EAGER, "kda.lift": False})
    lengths = (8, 8, 12, 16) if name in CLOSED else (8, 8, 8)
    with collecting() as report:
        for batch, length in enumerate(lengths, 2):
            inputs = spelling.make_inputs(B=batch, T=length, seed=length)
            assert worst_error(compiled(*inputs), spelling.fn(*inputs)) <= 1e-5
    assert [match.pattern for match in report.matches] == [spelling.pattern] * report.graph_count, str(report)


@pytest.mark.parametrize("name", ["gla_reads_first", "gdn_reads_what_it_corrects", "kda_reads_first"])
def test_a_loop_is_lifted(name: str) -> None:
    torch._dynamo.reset()
    spelling = REGISTRY[name]
    with collecting() as report:
        compiled = torch.compile(spelling.fn, backend="kda", options=EAGER)
        for length in (19, 24):
            inputs = spelling.make_inputs(T=length, seed=4)
            assert worst_error(compiled(*inputs), spelling.fn(*inputs)) <= 1e-5
    assert {match.pattern for match in report.matches} == {spelling.pattern}, str(report)


def cut(where: str) -> Callable[..., Tensor]:
    """A gradient that ends on the way to what is read, or to what is written."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state, outs = early_reads.begun(q, v), []
        for t in range(q.shape[1]):
            decay = g[:, t].exp().unsqueeze(-1)
            if where == "decay that is read":
                outs.append(early_reads.read(state * decay.detach(), q[:, t]))
            state = state * (decay.detach() if where == "decay" else decay)
            if where != "decay that is read":
                outs.append(early_reads.read(state.detach() if where == "state that is read" else state, q[:, t]))
            told = early_reads.read(state, k[:, t])
            write = beta[:, t].unsqueeze(-1) * (v[:, t] - (told.detach() if where == "prediction" else told))
            state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
            state = state.detach() if where == "state" else state
        return torch.stack(outs, 1)

    return run


@pytest.mark.parametrize("where", ["decay that is read", "decay", "state that is read", "prediction", "state"])
def test_cut_gradients_stay_cut(where: str) -> None:
    spelling = REGISTRY["kda_reads_first"]
    args = [x.requires_grad_() for x in spelling.make_inputs(seed=5)[:5]]
    torch._dynamo.reset()
    report = explain(cut(where), options={"kda.lift": False})(*args)
    want = cut(where)(*args)
    assert worst_error(report.result, want) <= 1e-5
    assert max(map(relative_error, *(_gradients(o, args) for o in (report.result, want)))) <= 1e-4, str(report)


def _gradients(o: Tensor, args: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o.sin().sum(), args, allow_unused=True, materialize_grads=True)


def test_closed_gates_and_later_tokens() -> None:
    """A decay of 0 empties what is read, and no output depends on tokens after it."""
    spelling = REGISTRY["kda_reads_what_it_corrects"]
    q, k, v, w, beta = spelling.make_inputs(T=20, seed=6)
    w[:, :, ::4] = torch.inf
    torch._dynamo.reset()
    compiled = torch.compile(spelling.fn, backend="kda", options={**EAGER, "kda.lift": False})
    with collecting() as report:
        whole = compiled(q, k, v, w, beta)
    assert [match.pattern for match in report.matches] == ["kda"], str(report)
    assert worst_error(whole, spelling.fn(q, k, v, w, beta)) <= 1e-5
    k[:, :, 10:], v[:, :, 10:], w[:, :, 11:] = 3.0, torch.inf, 2.0
    assert torch.equal(compiled(q, k, v, w, beta)[:, :, :11], whole[:, :, :11])
