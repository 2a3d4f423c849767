"""What is visible of results beside their numbers: who needs gradients, which gradients are none, who shares memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.soundness.programs import tokens

Program = Callable[..., tuple[Tensor, ...]]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = (v[:, t] - (k[:, t, :, None] @ state).squeeze(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error.unsqueeze(-2)
        outs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outs, 1), state


def closed(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return (scores.tril() @ v.transpose(1, 2)).transpose(1, 2)


def output_detached(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    o, state = recurrence(*inputs)
    return o.detach(), state


def run(program: Program, arguments: list[Tensor]) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    compiled: Any = torch.compile(program, backend="kda", options={"kda.inner": "aot_eager"})
    with collecting() as report:
        results = compiled(*arguments)
    assert len(report.matches) == 1, str(report)
    return results


@pytest.mark.parametrize("wanted", ["q", "k", "beta", "state", "none"])
def test_what_needs_gradients(wanted: str) -> None:
    """Only the output depends on queries: a state that a model keeps must not drag their graph along."""
    arguments = [x.requires_grad_(name == wanted) for name, x in tokens(4).items()]
    ours, eager = run(recurrence, arguments), recurrence(*arguments)
    assert [x.requires_grad for x in ours] == [x.requires_grad for x in eager]


def test_gradients_that_are_none() -> None:
    """Not zeros: an optimizer would decay weights that had no part in the loss."""
    arguments = [x.requires_grad_() for x in tokens(4).values()]
    found = [
        torch.autograd.grad(state.square().sum(), arguments, allow_unused=True)
        for _, state in (run(output_detached, arguments), output_detached(*arguments))
    ]
    assert [x is None for x in found[0]] == [x is None for x in found[1]]
    assert found[0][0] is None


def widened(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    o = closed(*inputs)
    return o.unsqueeze_(0), o


def narrowed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    o = closed(*inputs)
    return o.squeeze_(0), o


def viewed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    o = closed(*inputs)
    return o[:, 1:], o


def parts(*inputs: Tensor) -> tuple[Tensor, ...]:
    o = closed(*inputs)
    return (*o.split(2, dim=1), o)


def test_parts_of_a_result_are_views_of_it() -> None:
    arguments = list(tokens(4, B=2).values())
    ours, want = run(parts, arguments), parts(*arguments)
    for results in (ours, want):
        results[1].mul_(3)
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("program", [widened, narrowed, viewed])
def test_results_that_are_one_tensor(program: Program) -> None:
    arguments = list(tokens(4, B=2).values())
    torch._dynamo.reset()
    compiled: Any = torch.compile(program, backend="kda", options={"kda.inner": "aot_eager"})
    one, other = compiled(*arguments)
    want = program(*arguments)
    one.mul_(3)
    want[0].mul_(3)
    torch.testing.assert_close(other, want[1])


def into_a_buffer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * (v[:, t] * beta[:, t, :, None])[:, :, None]
        out[:, t] = (q[:, t, :, None] @ state).squeeze(-2)
    return out, state


def after(n: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = inputs
    return into_a_buffer(q[:, n:], k[:, n:], v[:, n:], g[:, n:], beta[:, n:], state)


@pytest.mark.parametrize("counts", [[2, 3, 6], [0]], ids=["a count that becomes all", "empty tensors"])
def test_a_lifted_loop_without_turns_returns_what_it_was_given(counts: list[int]) -> None:
    """The state itself, and an output that needs no gradient: the op made a copy, and gradients of nothing."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(after, backend="kda", options={"kda.inner": "aot_eager"})
    found = tokens(6)
    given = [found[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "state")]
    empty = [*(x.detach()[:, :0].requires_grad_() for x in given[:5]), given[5]]
    with collecting() as report:
        results = [compiled(n, *given) for n in counts]
        results += [compiled(0, *empty)] if counts == [0] else []
    assert report.matches and {each.pattern for each in report.matches} == {"simple_gla"}
    assert all(out.requires_grad for out, _ in results[:-1])
    out, state = results[-1]
    assert not out.requires_grad and out.numel() == 0
    assert state.data_ptr() == given[5].data_ptr()
