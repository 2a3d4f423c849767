"""Hooks on what autograd saves, such as activation checkpointing's, see what a call saves, nothing of compiling."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import kdacompile
from tests.compare import copies, worst_error


def mixer(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    s, rows = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        s = s * gate[:, t, :, None, None].sigmoid() + k[:, t, ..., None] * v[:, t, ..., None, :]
        rows.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]).tanh())
    return torch.stack(rows, 1)


def called(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """The loop is a function of its own, which is lifted."""
    return mixer(q, k, v, gate)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 6, *size).requires_grad_() for size in ((3, 4), (3, 4), (3, 5), (3,))]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [mixer, called])
def test_checkpointing_around_a_compiled_function(fn: Any, inner: str) -> None:
    torch._dynamo.reset()
    ours = inputs()
    theirs = copies(ours)
    options: Any = {"kda.inner": inner, "kda.expect": {"simple_gla": 1}}
    compiled = torch.compile(fn, backend="kda", options=options)
    have: Any = checkpoint(compiled, *ours, use_reentrant=False)
    want = fn(*theirs)
    assert worst_error(have, want) < 1e-6
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out, leaves in ((have, ours), (want, theirs)))
    assert worst_error(*gradients) < 1e-5


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing(saved: bool, inner: str) -> None:
    """By our op's name: where its result is saved it runs once, else again in the backward."""
    torch._dynamo.reset()
    op = torch.ops.kdacompile.linear_attention.default
    contexts = partial(create_selective_checkpoint_contexts, [op] if saved else [])

    def around(*x: Tensor) -> Tensor:
        result: Any = checkpoint(mixer, *x, use_reentrant=False, context_fn=contexts)
        return result.sin()

    ours = inputs()
    theirs = copies(ours)
    compiled = torch.compile(around, backend="kda", options={"kda.inner": inner, "kda.cost_model": False})
    with kdacompile.collecting() as report:
        have = torch.autograd.grad(compiled(*ours).square().sum(), ours)
    assert report.counts == {"simple_gla": 1}
    want = torch.autograd.grad(mixer(*theirs).sin().square().sum(), theirs)
    assert worst_error(have, want) < 1e-5
    profile = torch.autograd.profiler.profile()
    with profile:
        torch.autograd.grad(compiled(*ours).square().sum(), ours)
    assert sum(event.name == op.name() for event in profile.function_events or ()) == (1 if saved else 2)


def test_nothing_of_compiling_is_shown() -> None:
    torch._dynamo.reset()
    seen: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    compiled = torch.compile(mixer, backend="kda", options={"kda.inner": "eager"})
    counts: list[int] = []
    with kdacompile.collecting() as report, saved_tensors_hooks(pack, unpack):
        for _ in range(2):
            compiled(*inputs())
            counts.append(len(seen))
    assert [match.pattern for graph in report.graphs for match in graph.matches] == ["simple_gla"]
    assert counts[1] == 2 * counts[0] > 0
    assert all(type(x) is Tensor for x in seen)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_activations_are_offloaded(inner: str) -> None:
    """``save_on_cpu`` around forward and backward; what the backward op computes is not to be saved at all."""
    torch._dynamo.reset()
    ours = inputs()
    theirs = copies(ours)
    options: Any = {"kda.inner": inner, "kda.expect": {"simple_gla": 1}}
    with torch.autograd.graph.save_on_cpu():
        have = torch.autograd.grad(torch.compile(mixer, backend="kda", options=options)(*ours).square().sum(), ours)
    want = torch.autograd.grad(mixer(*theirs).square().sum(), theirs)
    assert worst_error(have, want) < 1e-5
