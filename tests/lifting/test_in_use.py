"""Lifted functions as programs use them: under autocast, from several threads, marked, without breaks, generating."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kdacompile.capture import hook, lifting
from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.lifting.functions import HEADS, KEY, VALUE, recurrent_gla
from tests.lifting.test_lift import arguments, lifted_functions
from tests.models.zoo import CASES


def projected(x: Tensor, weight: Tensor, g: Tensor) -> Tensor:
    """q, k and v by a product, which autocast makes bf16, and the recurrence on them."""
    q, k, v = (x @ weight).unflatten(-1, (HEADS, -1)).split([KEY, KEY, VALUE], -1)
    return recurrent_gla(q, k, v, g)


def operands(length: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(length)
    x, weight = torch.randn(1, length, 12, generator=rng), torch.randn(12, HEADS * (2 * KEY + VALUE), generator=rng)
    return x, weight, arguments(length)[3]


def within(*args: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return projected(*args)


@pytest.mark.parametrize("model", [projected, within], ids=["around the call", "inside the region"])
def test_autocast(model: Callable[..., Tensor]) -> None:
    """Lifted as without it, by a verdict of its own."""
    run = torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager"})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=model is projected):
        for length in (20, 33):
            args = operands(length)
            have, want = run(*args), model(*args)
            assert have.dtype == want.dtype
            assert relative_error(have, want) < 2e-2
    assert lifted_functions() == {"recurrent_gla"}
    with torch.no_grad():
        plain = torch.compile(projected, backend="kda", fullgraph=True, options={"kda.inner": "eager"})
        assert relative_error(plain(*operands(20)), projected(*operands(20))) < 1e-5
    assert [isinstance(known, lifting.Lifted) for known in hook.lifts.known.values()] == [True, True]


def test_marked_and_without_breaks() -> None:
    """``mark_dynamic`` on the tokens and ``fullgraph=True`` hold together, with gradients too: one graph."""
    run = torch.compile(lambda q, k, v, g: recurrent_gla(q, k, v, g), backend="kda", fullgraph=True)
    for length in (20, 7, 65):
        args = [x.requires_grad_() for x in arguments(length)]
        for x in args:
            torch._dynamo.mark_dynamic(x, 1)
        have, want = run(*args), recurrent_gla(*args)
        assert relative_error(have, want) < 1e-5
        for mine, theirs in zip(
            torch.autograd.grad(have.sum(), args), torch.autograd.grad(want.sum(), args), strict=True
        ):
            assert relative_error(mine, theirs) < 1e-4
    assert counters["stats"]["unique_graphs"] == 1


def test_two_threads_at_once() -> None:
    """Each compiles a model of its own at the same moment; both share the verdict."""
    start, results = threading.Barrier(2), dict[int, list[float]]()

    def work(index: int) -> None:
        def model(*args: Tensor) -> Tensor:
            return recurrent_gla(*args) * (index + 1)

        run = torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager"})
        start.wait()
        with torch.no_grad():
            sets = [arguments(length, seed=index) for length in (20, 41)]
            results[index] = [relative_error(run(*args), model(*args)) for args in sets]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1]
    assert all(error < 1e-5 for errors in results.values() for error in errors)
    assert lifted_functions() == {"recurrent_gla"}


def test_generate() -> None:
    """transformers' generate() with the compiled forward: batches of padded prompts of several lengths."""
    case = CASES["qwen3_next"]
    model: Any = case.build(attention="sdpa")
    other: Any = case.build(attention="sdpa")
    model.forward = torch.compile(model.forward, backend="kda", options={"kda.inner": "aot_eager"})
    pads = [(40, 0, 7), (70, 30, 0), (130, 1, 64)]
    with collecting() as report:
        for length, *padding in pads:
            tokens, mask = case.tokens(length), torch.ones(2, length, dtype=torch.long)
            for row, count in enumerate(padding):  # on the left, as for generation
                tokens[row, :count], mask[row, :count] = 0, 0
            options: Any = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
            have = model.generate(tokens, **options)
            assert torch.equal(have, other.generate(tokens, **options)), length
    assert counters["stats"]["unique_graphs"] <= 3
    assert all(sum(match.pattern == case.pattern for match in graph.matches) == case.layers for graph in report.graphs)
