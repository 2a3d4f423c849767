"""Experts that loop over those which were hit stand in the graph as one call, if something else in it is rewritten."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kdacompile import ops
from kdacompile.capture import loop
from tests.compare import relative_error

COUNT, WIDTH, HIDDEN = 4, 8, 12


class Experts(nn.Module):
    """Mixtures are written so all over: Mixtral, Qwen, DeepSeek in transformers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up = nn.Parameter(torch.randn(COUNT, 2 * HIDDEN, WIDTH, generator=generator))
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, HIDDEN, generator=generator))
        self.count, self.factor = COUNT, 1.0
        self.act: nn.Module = nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        mask = F.one_hot(index, num_classes=self.count).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            at, token = torch.where(mask[expert[0]])
            gate, up = F.linear(x[token], self.up[expert[0]]).chunk(2, dim=-1)
            out = F.linear(self.act(gate) * up, self.down[expert[0]]) * weights[token, at, None]
            result.index_add_(0, token, (self.factor * out).to(result.dtype))
        return result


class Layer(nn.Module):
    def __init__(self, *, attention: bool = True, writes: bool = False) -> None:
        super().__init__()
        self.experts, self.router = Experts(), nn.Linear(WIDTH, COUNT)
        self.attention, self.writes = attention, writes

    def forward(self, x: Tensor) -> Tensor:
        if self.attention:
            x = x + ops.linear_attention(x[:, :, None], x[:, :, None], x[:, :, None], delta=False)[0][:, :, 0]
        if self.writes:
            self.experts.up.mul_(1.5)
        weights, index = self.router(x).softmax(-1).flatten(0, 1).topk(2)
        return x + self.experts(x.reshape(-1, WIDTH), index, weights).view(x.shape)


def twice(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 2


def layer(**how: Any) -> tuple[Layer, Layer]:
    torch.manual_seed(0)
    made = Layer(**how)
    return made, copy.deepcopy(made)


def given(tokens: int) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def run(model: Layer, inner: str = "eager", **how: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend="kda", options={"kda.inner": inner}, **how)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_one_graph(inner: str) -> None:
    model, eager = layer()
    compiled = run(model, inner, fullgraph=True)
    with torch.no_grad():
        for tokens in (9, 1, 30, 2):
            assert relative_error(compiled(given(tokens)), eager(given(tokens))) < 1e-5
    assert counters["stats"]["unique_graphs"] <= 3  # 9 tokens, one, any


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_weights_that_the_graph_writes(inner: str) -> None:
    """They are operands of the call: what it reads is what was written before."""
    model, eager = layer(writes=True)
    compiled = run(model, inner)
    with torch.no_grad():
        for _ in range(2):
            assert relative_error(compiled(given(5)), eager(given(5))) < 1e-5
    assert torch.equal(model.experts.up, eager.experts.up)


def test_what_is_exchanged_between_calls() -> None:
    model, eager = layer()
    compiled = run(model)

    def same() -> None:
        with torch.no_grad():
            assert relative_error(compiled(given(5)), eager(given(5))) < 1e-5

    same()
    for each in (model, eager):
        each.experts.up = nn.Parameter(each.experts.up.detach() * 0.5)
    same()
    for each in (model, eager):
        each.experts.factor = 2.0
    same()
    for each in (model, eager):
        each.experts = Experts()
        each.experts.act = nn.GELU()
    same()


def test_layers_that_are_alike_share_a_graph() -> None:
    """As where each layer is compiled by itself."""
    layers = [layer() for _ in range(3)]
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        for place, (model, eager) in enumerate(layers):
            for each in (model, eager):
                each.experts.up.mul_(place + 1)
            model.compile(backend="kda", options={"kda.inner": "eager"})
            assert relative_error(model(given(6)), eager(given(6))) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1


def test_two_layers_are_told_apart() -> None:
    pairs = list(zip(layer(), layer(), strict=True))
    for _, second in pairs:
        second.experts.factor = 3.0
    model, eager = (nn.Sequential(*pair) for pair in pairs)
    compiled = torch.compile(model, backend="kda", options={"kda.inner": "eager"})
    torch._dynamo.reset()
    with torch.no_grad():
        assert relative_error(compiled(given(6)), eager(given(6))) < 1e-5


@pytest.mark.parametrize("how", ["no rewrite", "gradients", "autocast", "hook", "own forward"])
def test_the_graph_is_cut_as_ever(how: str) -> None:
    model, eager = layer(attention=how != "no rewrite")
    for each in (model, eager):
        if how == "hook":
            each.experts.register_forward_hook(twice)
        if how == "own forward":
            each.experts.forward = lambda x, index, weights: 3 * x
    compiled = run(model)
    with torch.set_grad_enabled(how == "gradients"), torch.autocast("cpu", enabled=how == "autocast"):
        x = given(5).requires_grad_(how == "gradients")
        have, want = compiled(x), eager(x)
    assert relative_error(have.float(), want.float()) < 1e-5
    assert (how == "own forward") == (not counters["graph_break"])


# -- what is read in the code -----------------------------------------------------------------------------------------


class Reads:
    """Near misses; what they do besides would be lost, or done where it may not be done."""

    up: Tensor
    seen: int

    def plain(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
        return result

    def writes_an_argument(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
            x.mul_(2)
        return result

    def writes_a_row(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            x[row] = 0
            result.index_add_(0, row, x[row])
        return result

    def keeps_state(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
            self.seen += 1
        return result

    def returns_another(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
        return result[hit[:, 0]]

    def rebinds(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result = result.index_add(0, row, x[row])
        return result

    def grows(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
        result.unsqueeze_(0)
        return result

    def hands_it_on(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            other = result
            other.index_add_(0, row, x[row])
        return result

    def draws(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, F.dropout(x[row], 0.5, True))
        return result

    def other_dtype(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x, dtype=torch.float64)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row].double())
        return result

    def may_return_nothing(self, x: Tensor) -> Tensor | None:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
            if x.numel() > 5:
                return None
        return result

    def writes_out(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, torch.mul(x[row], 2, out=self.up))
        return result

    def writes_in_place(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, F.relu(x, True)[row])
        return result

    def calls_a_helper(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, given(int(row)))
        return result

    def other_argument(self, x: Tensor) -> Tensor:
        x = x * 2
        result = torch.zeros_like(x)
        hit = x.sum(-1).nonzero()
        for row in hit:
            result.index_add_(0, row, x[row])
        return result


MISSES = [name for name, value in vars(Reads).items() if callable(value) and name != "plain"]


def test_a_loop_is_read() -> None:
    assert loop.read(Reads.plain) == loop.Loop(("x",), 0, frozenset(), frozenset())
    found = loop.read(Experts.forward)
    assert found is not None
    assert found.read == {"up", "down", "count", "factor"}
    assert found.called == {"act"}


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_is_left(name: str) -> None:
    assert loop.read(getattr(Reads, name)) is None
