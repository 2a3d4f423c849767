"""Whole numbers that Dynamo leaves open, as under ``dynamic=True``, are fixed where a function is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import relative_error
from tests.lifting.test_lift import graphs, lifted_functions

HEADS = 4


def grouped(x: Tensor, b: Tensor, c: Tensor, g: Tensor, groups: int, heads: int) -> Tensor:
    batch, length = x.shape[:2]
    k, q = (y.view(batch, length, groups, -1).repeat_interleave(heads // groups, 2) for y in (b, c))
    state = x.new_zeros(batch, heads, k.shape[-1], x.shape[-1])
    out: list[Tensor] = []
    for t in range(length):
        state = state * g[:, t, :, None, None].exp() + k[:, t].unsqueeze(-1) * x[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def some(x: Tensor, b: Tensor, c: Tensor, g: Tensor, count: int) -> Tensor:
    """Of the first tokens alone: a number of them is none of the function's own."""
    out = x[:, :0]
    for _ in range(1):
        out = grouped(x[:, :count], b[:, :count], c[:, :count], g[:, :count], 2, HEADS)
    return out


def arguments(length: int) -> list[Any]:
    b, c = torch.randn(2, 2, length, 16)
    return [torch.randn(2, length, HEADS, 8), b, c, -torch.rand(2, length, HEADS)]


def in_a_closure(groups: int) -> Callable[..., Tensor]:
    return lambda *tensors: grouped(*tensors, groups=groups, heads=HEADS)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="kda", dynamic=True, options={"kda.inner": "eager"})


SIX = (12, 2), (40, 2), (33, 1), (20, 4), (50, 1), (9, 2)
"""Lengths and numbers of groups, three of these."""


def check(run: Callable[..., Tensor], tensors: Callable[[int], list[Any]], calls: Iterable[tuple[int, int]]) -> None:
    """``grouped`` on tensors of each length, with each number of groups, is as it is eagerly."""
    with torch.no_grad():
        for length, groups in calls:
            args: list[Any] = [*tensors(length), groups, HEADS]
            assert relative_error(run(*args), grouped(*args)) < 1e-5


def test_in_a_closure() -> None:
    run = compiled(in_a_closure(2))
    with torch.no_grad():
        for length in (12, 40, 7):
            args = arguments(length)
            assert relative_error(run(*args), grouped(*args, groups=2, heads=HEADS)) < 1e-5
    assert graphs() == 1
    assert lifted_functions() == {"grouped"}


def test_other_numbers_are_other_graphs() -> None:
    run = compiled(grouped)
    check(run, arguments, SIX)
    assert graphs() == 3
    assert lifted_functions() == {"grouped"}


def test_a_number_of_tokens() -> None:
    run = compiled(some)
    with torch.no_grad():
        for length, count in ((12, 5), (20, 9), (33, 33), (40, 12)):
            args: list[Any] = [*arguments(length), count]
            assert relative_error(run(*args), some(*args)) < 1e-5


def marked(length: int) -> list[Any]:
    """Arguments whose tokens the caller demands to stay open."""
    args = arguments(length)
    for x in args:
        torch._dynamo.mark_dynamic(x, 1)
    return args


@pytest.mark.parametrize("dynamic", (True, None))
def test_beside_marked_tokens(dynamic: bool | None) -> None:
    """Numbers are none of the sizes that the caller has demanded, and may be guarded."""
    called: Callable[..., Tensor] = grouped
    run = torch.compile(lambda *given: called(*given), backend="kda", dynamic=dynamic, options={"kda.inner": "eager"})
    check(run, marked, SIX)
    assert graphs() == 3
    assert lifted_functions() == {"grouped"}


def test_the_function_itself_beside_marked_tokens() -> None:
    run = compiled(grouped)
    check(run, marked, ((12, 2), (33, 1), (20, 2)))
    assert graphs() == 2
    assert lifted_functions() == {"grouped"}


def test_gradients_beside_marked_tokens() -> None:
    called: Callable[..., Tensor] = grouped
    run = compiled(lambda *given: called(*given))
    for length in (12, 40):
        args: list[Any] = [x.requires_grad_() for x in marked(length)]
        have, want = run(*args, 2, HEADS), called(*args, 2, HEADS)
        assert relative_error(have, want) < 1e-5
        gradients = (torch.autograd.grad(out.square().sum(), args) for out in (have, want))
        for mine, theirs in zip(*gradients, strict=True):
            assert relative_error(mine, theirs) < 1e-4
    assert graphs() == 1
    assert lifted_functions() == {"grouped"}


def test_marked_widths_stay_open() -> None:
    """Torch raises where a size that was demanded is fixed."""
    called: Callable[..., Tensor] = grouped
    run = compiled(lambda *given: called(*given))
    with torch.no_grad():
        args: list[Any] = [*arguments(12), 2, HEADS]
        torch._dynamo.mark_dynamic(args[0], 3)
        assert relative_error(run(*args), grouped(*args)) < 1e-5
