"""RWKV-6's bonus beyond one call: gradients, functions that are lifted, one graph for all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.compare import copies, worst_error
from tests.spellings.bonus import bonus_without_decay, rwkv6_chunks, rwkv6_loop
from tests.spellings.registry import REGISTRY
from tests.spellings.test_recognised import check_gradients

EAGER: dict[str, Any] = {"kda.inner": "eager"}


@pytest.mark.parametrize("name", ["rwkv6_products", "rwkv5_loop"])
def test_gradients(name: str) -> None:
    """Of the bonus too, which the op does not know."""
    check_gradients(name)


def test_a_loop_is_lifted() -> None:
    """The function becomes the op, with what stands beside it, at any length."""
    torch._dynamo.reset()
    spelling = REGISTRY["rwkv6_loop"]
    with collecting() as report:
        compiled = torch.compile(rwkv6_loop, backend="kda", options=EAGER)
        for length in (19, 24):
            inputs = spelling.make_inputs(T=length, seed=4)
            assert worst_error(compiled(*inputs), rwkv6_loop(*inputs)) <= 1e-5
    assert {match.pattern for match in report.matches} == {"gla"}, str(report)


@pytest.mark.parametrize(("fn", "lengths"), [(bonus_without_decay, (7, 19, 33)), (rwkv6_chunks, (8, 16))])
def test_several_lengths(fn: Any, lengths: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    spelling = REGISTRY[fn.__name__]
    compiled = torch.compile(fn, backend="kda", options={**EAGER, "kda.lift": False})
    with collecting() as report:
        for length in lengths:
            inputs = spelling.make_inputs(T=length, seed=5)
            assert worst_error(compiled(*inputs), fn(*inputs)) <= 1e-5
    assert {match.pattern for match in report.matches} == {spelling.pattern}, str(report)


def one_token(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A step of RWKV-6, as its own demo has it."""
    own = k.unsqueeze(-1) @ v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ (u.unsqueeze(-1) * own + state)).squeeze(-2), own + w.unsqueeze(-1) * state


def test_a_step_is_known_and_left_as_it_is() -> None:
    """Two tokens of the op take longer than torch's code for the one."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(2, 3, size) for size in (4, 4, 5))
    inputs = q, k, v, torch.rand(2, 3, 4), torch.randn(3, 4), torch.randn(2, 3, 4, 5)
    torch._dynamo.reset()
    with collecting() as report:
        have = torch.compile(one_token, backend="kda", options=EAGER)(*inputs)
    assert worst_error(have, one_token(*inputs)) <= 1e-6
    assert not report.matches
    assert [(rejection.pattern, rejection.code) for rejection in report.declined] == [("gla", "cost")]


def by_distance(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, own: int = 0) -> Tensor:
    """nanoRWKV's x051a: one decay and one bonus a head, whose matrix is cut out of a row that is repeated.

    ``own``: to which power the decay stands in the row beside the bonus.
    """
    many = q.shape[2]
    powers = w[:, None].repeat(1, many).pow(torch.arange(many - 1 + own, own - 1, -1).repeat(len(w), 1))
    row = torch.cat([powers[:, 1:], u[:, None]], dim=1)
    tiled = torch.tile(F.pad(row, (0, many)), [many])[:, :-many].view(-1, many, 2 * many - 1)
    return (q @ k.mT * tiled[:, :, many - 1 :]) @ v


@pytest.mark.parametrize("many", [7, 12])
@pytest.mark.parametrize("own", [0, 1])
def test_a_row_of_powers_and_the_bonus(many: int, own: int) -> None:
    """With a power more it is no recurrence of the family: the state is decayed before it is read."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, many, size) for size in (8, 8, 10))
    given = [x.requires_grad_() for x in (q, k, v, torch.rand(3) / 2 + 0.4, torch.randn(3))]
    theirs = copies(given)
    program: Any = by_distance
    with collecting() as report:
        have = torch.compile(program, backend="kda", options=EAGER)(*given, own)
    want = program(*theirs, own)
    assert worst_error(have, want) <= 1e-5
    assert [match.pattern for match in report.matches] == ["simple_gla"] * (own == 0), str(report)
    gradients = (torch.autograd.grad(out.square().sum(), args) for out, args in ((have, given), (want, theirs)))
    assert all(worst_error(x, y) < 1e-4 for x, y in zip(*gradients, strict=True))
