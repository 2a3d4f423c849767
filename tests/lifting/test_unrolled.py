"""Loops that are recognised but not lifted: the report says which, and why."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import kdacompile
from kdacompile.report import source
from kdacompile.report.collect import collecting
from kdacompile.report.findings import Match
from kdacompile.report.report import Report
from tests.lifting import functions
from tests.lifting.test_lift import arguments
from tests.models.zoo import CASES


class Layer(nn.Module):
    """GLA token by token, in a method that reads its object."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Buffer(torch.tensor(0.25))

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        q = q * self.scale
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)


class Forward(Layer):
    forward = Layer.recurrence


class Method(Layer):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return self.recurrence(q, k, v, g)


def keeps_count(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    functions.calls.append(1)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def closed_form(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The same without a loop, for few tokens."""
    decay = g.cumsum(1)
    reads, writes = (q * decay.exp()).transpose(1, 2), (k * (-decay).exp()).transpose(1, 2)
    return ((reads @ writes.transpose(-1, -2)).tril() @ v.transpose(1, 2)).transpose(1, 2)


def explained(fn: Callable[..., Any], *args: Any, options: Any = None, **named: Any) -> Match:
    report = kdacompile.explain(fn, options=options)(*args, **named)
    assert len(report.matches) == 1, str(report)
    match = report.matches[0]
    assert Report.from_json(report.to_json()).matches == [match]
    assert not match.loop or (match.loop in str(report) and match.not_lifted in str(report))
    return match


def header_of(match: Match) -> str:
    file, _, line = match.loop.rpartition(":")
    return linecache.getline(file, int(line)).strip()


@pytest.mark.parametrize("layer", [Forward, Method])
def test_a_method(layer: type[Layer]) -> None:
    match = explained(layer(), *arguments(12))
    assert match.loop.startswith(str(__file__))
    assert header_of(match) == "for t in range(q.shape[1]):"
    reason = "Layer.recurrence: self is neither a tensor nor a plain value, and may change from call to call"
    assert match.not_lifted == reason


def packed(qkv: Tensor, g: Tensor) -> Tensor:
    q, k, v = qkv.unbind(-1)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def test_a_function_of_few_arguments() -> None:
    g = arguments(12)[3]
    with collecting() as report:
        torch.compile(packed, backend="kda", options={"kda.inner": "eager"})(torch.randn(*g.shape, 3), g)
    (match,) = report.matches
    assert header_of(match) == "for t in range(q.shape[1]):"
    assert match.not_lifted == "packed: it takes fewer than three arguments"


def test_a_function_that_was_looked_at() -> None:
    match = explained(lambda *args: keeps_count(*args), *arguments(12))
    assert header_of(match) == "for t in range(q.shape[1]):"
    assert match.not_lifted == "keeps_count: it depends on functions.calls, a list"


def test_the_switch() -> None:
    match = explained(lambda *args: functions.recurrent_gla(*args), *arguments(12), options={"kda.lift": False})
    assert header_of(match) == "for t in range(q.shape[1]):"
    assert match.not_lifted == "kda.lift is off"


def test_what_is_lifted_or_has_no_loop_has_none() -> None:
    for fn in (functions.recurrent_gla, closed_form):
        match = explained(lambda *args, fn=fn: fn(*args), *arguments(12))
        assert (match.loop, match.not_lifted) == ("", "")


@pytest.mark.parametrize(
    ("fn", "header"), [(functions.recurrent_gla, "for t in range(q.shape[1]):"), (closed_form, "")]
)
def test_traces_without_columns(fn: Callable[..., Tensor], header: str) -> None:
    """As torch 2.11 and Python 3.10 write them: operators of one line have one trace, in a loop and outside."""
    nodes: list[fx.Node] = []

    def keep(module: fx.GraphModule, _: list[Tensor]) -> fx.GraphModule:
        nodes.extend(node for node in module.graph.nodes if node.op.startswith("call"))
        return module

    torch.compile(fn, backend=keep)(*arguments(4))
    for node in nodes:
        lines = node.meta["stack_trace"].splitlines()
        node.meta["stack_trace"] = "\n".join(line for line in lines if set(line) - set(" ^~"))
    found = source.unrolled(nodes)
    assert (linecache.getline(found.file, found.first).strip() if found else "") == header


def test_minimax() -> None:
    """A loop over blocks in a forward that reads its cache and four buffers."""
    case = CASES["minimax"]
    model = case.build()
    with torch.no_grad():
        match = explained(model, **case.prefill_inputs(model, 200, cache=True))
    assert header_of(match) == "for i in range(num_blocks):"
    assert match.not_lifted.startswith("MiniMaxLightningAttention.forward: self is")


def test_the_innermost_loop_of_a_line() -> None:
    lines, first = inspect.getsourcelines(Layer)
    body = first + next(index for index, line in enumerate(lines) if "out.append" in line)
    found = source.at(str(__file__), body)
    assert found is not None
    assert (found.first, found.function, found.method) == (body - 2, "Layer.recurrence", True)
    assert source.at(str(__file__), first) is None
