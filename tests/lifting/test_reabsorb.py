"""Ops that are in the captured graph already take over what stands above them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile import ops
from kdacompile.backend import kda
from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.lifting import functions
from tests.lifting.functions import HEADS, KEY, VALUE


def operands(length: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    q, k, x = (torch.randn(2, length, HEADS, KEY, generator=rng) for _ in range(3))
    v, beta = torch.randn(2, length, HEADS, VALUE, generator=rng), torch.randn(2, length, HEADS, generator=rng)
    return [q, k, v, x, beta]


def captured(fn: Any, inputs: list[Tensor], **how: Any) -> tuple[Any, list[torch.fx.Node]]:
    """The result, and the calls of our operators after the pass."""
    torch._dynamo.reset()
    seen: list[torch.fx.Node] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        forward = kda(gm, example_inputs, options={"kda.inner": "eager"})
        seen.extend(node for node in gm.graph.nodes if "kdacompile" in str(node.target))
        return forward

    return torch.compile(fn, backend=backend, fullgraph=True, **how)(*inputs), seen


def gated(q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    q, k = functions.normalized(q), functions.normalized(k)
    return ops.linear_attention(q, k, v, F.logsigmoid(x), beta.sigmoid(), scale=0.5)[0]


def rounded(q: Tensor, k: Tensor, v: Tensor, x: Tensor, beta: Tensor) -> Tensor:
    return ops.linear_attention(q, k, v, F.logsigmoid(x).clamp(-0.5), beta.sigmoid().round(), scale=0.5)[0]


def test_what_stands_above_a_call_is_absorbed() -> None:
    for how in ({"dynamic": False}, {"dynamic": True}):
        inputs = operands(19)
        result, calls = captured(gated, inputs, **how)
        assert relative_error(result, gated(*inputs)) < 1e-5
        assert len(calls) == 1
        options = calls[0].kwargs
        assert options["gate_fn"] == "logsigmoid"
        assert options["sigmoid_beta"]
        assert options["scale"] == 0.5
        assert float(str(options["qk_l2norm_eps"])) > 0
        assert all(node.op == "placeholder" for node in calls[0].all_input_nodes) or how["dynamic"]


def test_other_functions_are_not() -> None:
    inputs = operands(19)
    result, calls = captured(rounded, inputs)
    assert relative_error(result, rounded(*inputs)) < 1e-5
    assert (calls[0].kwargs["gate_fn"], calls[0].kwargs["sigmoid_beta"]) == ("log", False)


def test_a_lifted_function_reports_what_its_caller_gave_it() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return functions.chunked_gla(q, k, v, F.logsigmoid(x) / 16)[0]

    torch._dynamo.reset()
    inputs = operands(80)[:4]
    with collecting() as report:
        result = torch.compile(model, backend="kda", options={"kda.inner": "eager"})(*inputs)
    assert relative_error(result, model(*inputs)) < 1e-5
    assert [match.absorbed for match in report.matches] == [("gate_logsigmoid",)]


def test_inputs_with_lengths_of_their_own_are_tied() -> None:
    """In inference lengths stay open, and every input of the graph has a symbol of its own for the same length."""

    def model(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return functions.chunked_gla(q, k, v, F.logsigmoid(x) / 16)[0]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="kda", options={"kda.inner": "eager"})
    with torch.no_grad(), collecting() as report:
        for length in (80, 97):
            inputs = operands(length)[:4]
            assert relative_error(compiled(*inputs), model(*inputs)) < 1e-5
    assert [match.absorbed for match in report.matches] == [("gate_logsigmoid",)]  # one graph for both


def test_gradients() -> None:
    own, theirs = ([x.requires_grad_() for x in operands(9)] for _ in range(2))
    result, calls = captured(gated, own)
    assert calls[0].kwargs["sigmoid_beta"]
    have = torch.autograd.grad(result.sum(), own)
    want = torch.autograd.grad(gated(*theirs).sum(), theirs)
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(have, want, strict=True))


def two_layers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, normalised: bool) -> Tensor:
    """[B, H, T, D]: a closed form, and a loop over its results."""
    x = (q @ k.mT).tril() @ v
    if normalised:  # the row sums are a column of the values: no function is tried in that form before it is captured
        scores = (q.exp() @ k.exp().mT).tril()
        x = torch.tanh((scores / scores.sum(-1, keepdim=True)) @ v)
    outs: list[Tensor] = []
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1) + k[:, :, t].unsqueeze(-1) * x[:, :, t].unsqueeze(-2)
        outs.append((q[:, :, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outs, 2)


@pytest.mark.parametrize("normalised", [False, True])
def test_layers_that_hang_together_are_told_once_each(normalised: bool) -> None:
    def model(*args: Tensor) -> Tensor:
        return two_layers(*args, normalised=normalised) * 2

    torch._dynamo.reset()
    q, k, v, g = (x.transpose(1, 2).contiguous() for x in operands(40)[:4])
    inputs = [q, k, v[..., :VALUE], -g.abs()]
    with collecting() as report:
        result = torch.compile(model, backend="kda", options={"kda.inner": "eager", "kda.cost_model": False})(*inputs)
    assert relative_error(result, model(*inputs)) < 1e-5
    before_capture = {match.pattern: match.lifted for match in report.matches}
    assert before_capture == {"linear_attention": "" if normalised else "two_layers", "gla": "two_layers"}
    assert len(report.matches) == 2
    assert {match.source.rpartition(":")[0] for match in report.matches} == {__file__}
