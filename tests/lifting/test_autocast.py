"""Functions called under autocast: one graph for every length, and nothing that eager mode would not have done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compare import relative_error
from tests.lifting.functions import changes_its_mind, chunked_gla
from tests.lifting.test_lift import arguments, graphs, lifted_functions

LENGTHS = (40, 23, 70)
Function = Callable[..., Any]


def by_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Every product goes through autocast, and the results have its dtype."""
    state = g.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1)


def with_what_it_was_given(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An argument among the results stays that argument, with its dtype."""
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out * 2
    return out, v, out[:, -1]


def in_its_dtype(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """What a product's dtype is, is asked for the start of the state and for a cast alone."""
    k = k @ torch.ones(k.shape[-1], dtype=k.dtype).diag()
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=k.dtype, device=k.device)
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2).to(k.dtype))
    return torch.stack(out, 1)


def compiled(model: Function) -> Function:
    return torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager"})


def calling(fn: Function, *, inside: bool = False, dtype: torch.dtype = torch.bfloat16) -> Function:
    """A model that calls ``fn``; ``inside``: under an autocast of its own."""

    def model(*args: Tensor) -> Any:
        if not inside:
            return fn(*args)
        with torch.autocast("cpu", dtype):
            return fn(*args)

    return model


def results(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def check(model: Function, args: list[Tensor], run: Function, bound: float) -> None:
    have, want = results(run(*args)), results(model(*args))
    assert [x.dtype for x in have] == [x.dtype for x in want]
    assert max(map(relative_error, have, want)) < bound


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "inside the region"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [by_products, chunked_gla, with_what_it_was_given, in_its_dtype])
def test_one_graph_for_every_length(fn: Function, dtype: torch.dtype, inside: bool) -> None:
    model = calling(fn, inside=inside, dtype=dtype)
    run = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=not inside):
        for length in LENGTHS:
            check(model, arguments(length), run, 2e-2)
    assert graphs() == 1
    assert lifted_functions() == {fn.__qualname__}


def test_no_further_from_the_truth_than_eager() -> None:
    model = calling(by_products)
    args = arguments(70)
    exact = by_products(*(x.double() for x in args))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        have, want = compiled(model)(*args), model(*args)
    assert lifted_functions() == {"by_products"}
    assert have.dtype == want.dtype == torch.bfloat16
    assert relative_error(have, exact) <= 1.5 * relative_error(want, exact)


def test_products_of_two_dtypes() -> None:
    """q, k and v in 16 bits, as autocast's projections leave them, and decays in 32: no such product without it."""
    model = calling(by_products)
    run = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for length in LENGTHS:
            *narrow, g = arguments(length)
            check(model, [*(x.bfloat16() for x in narrow), g], run, 2e-2)
    assert graphs() == 1
    assert lifted_functions() == {"by_products"}


@pytest.mark.parametrize("fn", [by_products, chunked_gla])
def test_gradients(fn: Function) -> None:
    model = calling(fn)
    run = compiled(model)
    for length in LENGTHS:
        args = [x.requires_grad_() for x in arguments(length)]
        with torch.autocast("cpu", torch.bfloat16):
            have, want = results(run(*args))[0], results(model(*args))[0]
        exact = results(model(*(x.double() for x in args)))[0]
        seed = torch.randn(have.shape)
        mine, theirs, true = (torch.autograd.grad(out, args, seed.to(out)) for out in (have, want, exact))
        for one, other, truth in zip(mine, theirs, true, strict=True):
            assert one.dtype == other.dtype
            assert relative_error(one, truth) <= 1.5 * relative_error(other, truth) + 1e-3
    assert lifted_functions() == {fn.__qualname__}


def test_what_is_known_without_autocast_is_not_used_under_it() -> None:
    run, model = compiled(calling(by_products)), calling(by_products)
    with torch.no_grad():
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                check(model, arguments(40), run, 2e-2 if enabled else 1e-5)
    assert graphs() == 2


def test_autocast_that_is_switched_off_around_the_call() -> None:
    def model(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return by_products(*args)

    run = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for length in LENGTHS:
            check(model, arguments(length), run, 1e-5)
    assert graphs() == 1


# -- never lifted -----------------------------------------------------------------------------------------------------


def switches_off(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The scores' own autocast is no part of a replacement."""
    with torch.autocast("cpu", enabled=False):
        out = by_products(q, k, v, g)
    for _ in range(1):
        out = out @ torch.ones(out.shape[-1], out.shape[-1])
    return out


def asks_for_autocast(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out * 2 if torch.is_autocast_enabled("cpu") else out
    return out


def decides_by_dtype(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Adds what shows in no comparison in 16 bits."""
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out + 1e-9 if out.dtype == torch.bfloat16 else out
    return out


def decides_by_dtype_and_length(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out * 2 if out.dtype == torch.bfloat16 and q.shape[1] > 50 else out
    return out


def decides_by_the_size_of_an_entry(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out + 1e-9 if out.element_size() == 2 else out
    return out


def takes_what_a_dtype_can_tell_apart(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out + 1e-9 * torch.finfo(out.dtype).eps
    return out


def chooses_a_dtype(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The answer is kept before the call takes it."""
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out + torch.ones(1, dtype=(kept := out.dtype)) * (1e-9 if kept == torch.bfloat16 else 0.0)
    return out


def counts_in_its_dtype(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Positions beyond 256 are others in 16 bits."""
    out = by_products(q, k, v, g)
    for _ in range(1):
        out = out * (torch.arange(out.shape[1]).to(out.dtype)[:, None, None] == 257).logical_not()
    return out


LEFT = [
    takes_what_a_dtype_can_tell_apart,
    chooses_a_dtype,
    counts_in_its_dtype,
    switches_off,
    asks_for_autocast,
    decides_by_dtype,
    decides_by_dtype_and_length,
    decides_by_the_size_of_an_entry,
    changes_its_mind,
]


@pytest.mark.parametrize("fn", LEFT)
def test_left_as_it_is(fn: Function) -> None:
    model = calling(fn)
    run = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for length in LENGTHS:
            for size in (1.0, 1e-8):
                q, k, v, g = arguments(length)
                check(model, [q, k, v * size, g], run, 2e-2)
    assert fn.__qualname__ not in lifted_functions()
