"""The first graph already serves every length: of prompts in inference, and of the caches that a step extends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kdacompile
from kdacompile.backend import kda
from kdacompile.capture import hook, lifting
from kdacompile.compat import sizes
from kdacompile.compat.sizes import capture_again
from tests.compare import relative_error
from tests.lifting import functions
from tests.lifting.functions import HEADS, KEY, VALUE
from tests.lifting.test_lift import LENGTHS, arguments


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(fn: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    def model(*args: Any) -> Any:
        return fn(*args)

    return torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager"}, **keywords)


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["long first", "short first"])
def test_one_graph_in_inference(lengths: tuple[int, ...]) -> None:
    run = compiled(functions.chunked_gla)
    with torch.no_grad():
        for length in lengths:
            args = arguments(length)
            assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5, length
    assert graphs() == 1


def test_open_heads_and_widths_are_guarded() -> None:
    """``dynamic=True`` opens them too, and no layout fitted; 64 rows were unrolled with open sizes."""
    run = compiled(functions.chunked_gla, dynamic=True)
    with torch.no_grad():
        for length in LENGTHS:
            args = arguments(length)
            assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5, length
        assert graphs() == 1
        args = [x[..., : KEY // 2].contiguous() for x in arguments(80)]
        assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5
    assert graphs() == 2
    assert (
        len({known.verdict.function for known in hook.lifts.known.values() if isinstance(known, lifting.Lifted)}) == 1
    )


@pytest.mark.parametrize("now", [KEY, HEADS])
def test_as_many_tokens_as_something_else(now: int) -> None:
    """Which of the open sizes is the length cannot be told."""
    run = compiled(functions.chunked_gla, dynamic=True)
    with torch.no_grad():
        for length in (now, 80, 9):
            args = arguments(length)
            assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5, length


def test_static_shapes_stay_static() -> None:
    run = compiled(functions.chunked_gla, dynamic=False)
    with torch.inference_mode():
        for length in (80, 90):
            args = arguments(length)
            assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5
    assert graphs() == 2


def test_a_function_that_is_not_lifted_is_captured_as_ever() -> None:
    run = compiled(functions.clamps_the_state)
    with torch.no_grad():
        for length in (18, 19):
            args = arguments(length)
            assert relative_error(run(*args), functions.clamps_the_state(*args)) < 1e-5
    assert graphs() == 2


# -- caches -----------------------------------------------------------------------------------------------------------


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, cache: Tensor, mask: Tensor) -> Any:
    """A token through a recurrence and through a growing cache of values, with the mask of an attention over it."""
    state = state * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
    cache = torch.cat([cache, v.unsqueeze(1)], dim=1)
    seen = (cache * mask[:, :, None, None]).sum(1)
    return (q.unsqueeze(-2) @ state).squeeze(-2) + seen, state, cache


def no_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, cache: Tensor, mask: Tensor) -> Any:
    cache = torch.cat([cache, v.unsqueeze(1)], dim=1)
    return (cache * mask[:, :, None, None]).sum(1), state, cache


def token(cached: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed + cached)
    q, k, g = (torch.randn(3, HEADS, KEY, generator=rng) for _ in range(3))
    v, state = torch.randn(3, HEADS, VALUE, generator=rng), torch.randn(3, HEADS, KEY, VALUE, generator=rng)
    cache = torch.randn(3, cached, HEADS, VALUE, generator=rng)
    return [q, k, v, -g.abs(), state, cache, torch.rand(3, cached + 1, generator=rng).round()]


@pytest.mark.parametrize(("fn", "expected"), [(step, 1), (no_recurrence, 2)], ids=["matched", "nothing to match"])
def test_steps_over_caches_of_all_lengths(fn: Any, expected: int) -> None:
    run = compiled(fn)
    for cached in (70, 71, 5, 900):
        args = token(cached)
        for have, want in zip(run(*args), fn(*args), strict=True):
            assert relative_error(have, want) < 1e-5
    assert graphs() == expected


def test_a_cache_that_was_cut_back_shares_the_graph_of_a_whole_one() -> None:
    """Its strides count rows that it does not have any more."""
    run = compiled(step)
    for cached, cut in ((70, 0), (71, 5), (30, 1), (31, 0)):
        args = token(cached)
        args[5] = torch.cat([args[5], args[5][:, :cut]], dim=1)[:, :cached]
        for have, want in zip(run(*args), step(*args), strict=True):
            assert relative_error(have, want) < 1e-5
    assert graphs() == 1


def test_a_cache_of_one_token_takes_a_graph_of_its_own() -> None:
    run = compiled(step)
    for cached in (1, 2, 70):
        args = token(cached)
        assert relative_error(run(*args)[0], step(*args)[0]) < 1e-5
    assert graphs() == 2


def test_explain_counts_what_is_compiled() -> None:
    report = kdacompile.explain(step)(*token(9))
    assert report.graph_count == 1
    assert report.counts == {"gla": 1}


def test_outside_of_capture_nothing_is_opened() -> None:
    """A graph handed to the backend by hand is compiled as it is."""
    kept: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        kept.append((gm, inputs))
        return gm.forward

    want = torch.compile(step, backend=keep, fullgraph=True)(*token(9))
    gm, inputs = kept[0]
    have = kda(gm, inputs, options={"kda.inner": "eager"})(*inputs)
    assert relative_error(have[0], want[0]) < 1e-5


# -- a later process --------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Regions are remembered by the modules they are called with."""

    def __init__(self, scaled: float | None) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
        if self.scaled is not None:  # q is read before a call is seen
            q = q * self.scaled
        return functions.chunked_gla(q, k, v, g)


def another_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing but what lies on disk; returns the reasons for which capture starts anew from here on."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    reasons: list[str] = []

    def again(reason: str) -> Exception:
        reasons.append(reason)
        return capture_again(reason)

    monkeypatch.setattr(sizes, "capture_again", again)
    return reasons


def serve(model: nn.Module, *lengths: int) -> None:
    run = torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager"})
    for length in lengths:
        args = arguments(length)
        assert relative_error(run(*args)[0], model(*args)[0]) < 1e-5, length


@pytest.mark.parametrize(("scaled", "attempts"), [(None, 0), (0.5, 1)], ids=["at once", "after an input was read"])
def test_another_process_opens_the_length_before_it_is_read(
    scaled: float | None, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        first = another_process(monkeypatch)
        serve(Model(scaled), 80)
        second = another_process(monkeypatch)
        serve(Model(scaled), 80, 33)
    assert (len(first), len(second), graphs()) == (1, attempts, 1)


def test_what_inference_opens_is_left_closed_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        serve(Model(None), 80)
    another_process(monkeypatch)
    serve(Model(None), 80, 90)
    assert graphs() == 2


class GrowingLayer: ...


class FixedLayer: ...


class Cache:
    """Told apart by its layers, as transformers' caches are."""

    def __init__(self, layer: type) -> None:
        self.layers = [layer(), layer()]


class WithCache(Model):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, past: Cache | None = None) -> Any:
        return super().forward(q, k, v, g)


@pytest.mark.parametrize(("layer", "attempts"), [(GrowingLayer, 0), (FixedLayer, 1)], ids=["the same", "another"])
def test_what_is_opened_for_one_kind_of_cache_is_not_for_another(
    layer: type, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prompt(layer: type) -> None:
        run = torch.compile(WithCache(None), backend="kda", options={"kda.inner": "eager"})
        run(*arguments(80), past=Cache(layer))

    with torch.no_grad():
        prompt(GrowingLayer)
        again = another_process(monkeypatch)
        prompt(layer)
    assert len(again) == attempts
