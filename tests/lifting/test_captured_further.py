"""Regions captured past boolean masks and for any count of pools: only with a rewrite, only for our backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as aot
from torch.utils._sympy.functions import Max

from kdacompile import backend
from kdacompile.compat import graph_breaks, region
from tests.compare import relative_error
from tests.lifting import functions
from tests.lifting.test_lift import LENGTHS, arguments

POOL = 16


def pooled(x: Tensor) -> Tensor:
    """Means over pools of tokens, whole ones only: a sparse indexer's way to shorten its keys."""
    count = (x.shape[1] + POOL - 1) // POOL
    index = torch.arange(count * POOL).view(1, count, POOL)
    grouped = x[torch.arange(x.shape[0])[:, None, None], index.clamp(0, x.shape[1] - 1)]
    keep = (index < x.shape[1]).all(-1).any(0)
    return grouped.mean(2)[:, keep].sum(1, keepdim=True)


def lifted(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = functions.chunked_gla(q, k, v, g)[0]
    return out + pooled(out)


def inlined(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = functions.clamps_the_state(q, k, v, g)
    return out + pooled(out)


def counted(fn: Callable[..., Any], lengths: tuple[int, ...], **how: Any) -> tuple[int, int]:
    """Graphs and breaks over prompts of these lengths, whose results are eager mode's."""
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(lambda *args: fn(*args), **how)
    with torch.no_grad():
        for length in lengths:
            args = arguments(length)
            assert relative_error(run(*args), fn(*args)) < 1e-5, length
    return counters["stats"]["unique_graphs"], sum(graph_breaks().values())


KDA: dict[str, Any] = {"backend": "kda", "options": {"kda.inner": "aot_eager"}}


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["long first", "short first"])
def test_one_graph_for_any_count_of_pools(lengths: tuple[int, ...]) -> None:
    assert counted(lifted, lengths, **KDA) == (1, 0)


def test_inductor_takes_such_a_graph() -> None:
    """That of torch 2.11 refuses a mask over an open size, and gets what torch.compile captures."""
    graphs, breaks = counted(lifted, (9, 33, 70), backend="kda")
    assert (graphs, breaks) == (1, 0) or (torch.__version__ < "2.12" and breaks > 0)


def test_a_function_that_is_not_lifted_is_captured_as_ever() -> None:
    alone = counted(inlined, (6, 7), backend="eager")
    assert counted(inlined, (6, 7), **KDA) == alone
    assert alone[1] > 0


def test_other_backends_cut_the_graph() -> None:
    assert counted(lifted, (18,), backend="eager")[1] > 0
    assert counted(lifted, (18,), **KDA) == (1, 0)
    assert counted(lifted, (18,), backend="eager")[1] > 0


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradients_of_one_graph(inner: str) -> None:
    plain: Callable[..., Tensor] = lifted
    run = torch.compile(lambda *args: plain(*args), backend="kda", options={"kda.inner": inner})
    weights = torch.linspace(-1, 1, 80 * 2 * functions.VALUE).view(1, 80, 2, functions.VALUE)
    found: list[tuple[Tensor, ...]] = []
    for fn in (run, plain):
        args = [x.requires_grad_() for x in arguments(80)]
        found.append(torch.autograd.grad((fn(*args) * weights).sum(), args))
    assert max(map(relative_error, *found)) < 1e-5
    assert not graph_breaks() or (inner == "inductor" and torch.__version__ < "2.12")


def test_a_backward_that_is_refused_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the first backward pass runs."""
    at_once: list[bool] = []

    def compile_it(gm: torch.fx.GraphModule, inputs: Any, settings: Any) -> Any:
        at_once.append(aot.force_non_lazy_backward_lowering)
        return gm.forward

    monkeypatch.setitem(backend._INNER, "eager", compile_it)
    plain: Callable[..., Tensor] = lifted
    args = [x.requires_grad_() for x in arguments(80)]
    torch.compile(lambda *args: plain(*args), backend="kda", options={"kda.inner": "eager"})(*args)
    torch.compile(lambda x: (x @ x.mT).sum(), backend="kda", options={"kda.inner": "eager"})(args[0])
    assert at_once == [True, False]


def test_a_maximum_is_at_least_what_it_is_of() -> None:
    """Inductor asks that of a stride of an open size, and torch does not know."""
    size, other = sympy.symbols("u0 u1", integer=True, nonnegative=True)
    largest: Any = Max(1, size)  # type: ignore[call-arg]
    known = {largest >= size: True, size <= largest: True, largest < size: False, size > largest: False}
    assert {question: region._of_a_maximum(question) for question in known} == known
    for question in (largest >= other, largest > size, sympy.Eq(largest, size), size < largest, size):
        assert region._of_a_maximum(question) is None


def test_a_compiler_that_refuses_gets_what_torch_compile_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gm: torch.fx.GraphModule, inputs: Any, settings: Any) -> Any:
        if any("u" in str(getattr(node.meta.get("example_value"), "shape", "")) for node in gm.graph.nodes):
            raise BackendCompilerFailed(refuse, RuntimeError("a size that depends on data"), None)
        return gm.forward

    monkeypatch.setitem(backend._INNER, "eager", refuse)
    graphs, breaks = counted(lifted, (80,), backend="kda", options={"kda.inner": "eager"})
    assert breaks > 0
    assert graphs > 1


def last_row_of_a_chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    s, rows = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3]), list[Tensor]()
    for qc, kc, vc, ac in zip(*(x.chunk(q.shape[2] // 4, dim=2) for x in (q, k, v, a)), strict=True):
        through = ac.cumprod(dim=2)
        rows.append(qc * through @ s + (qc * through @ (kc / through).mT).tril() @ vc)
        s = ac.prod(dim=2).unsqueeze(-1) * s + (kc * (through[:, :, -1:] / through)).mT @ vc
    return torch.cat(rows, dim=2)


def test_no_size_is_assumed_that_fails_when_the_graph_runs() -> None:
    """torch 2.11 asserts that a chunk's last row, in a region captured further, is as long as the chunk."""

    def called(*given: Tensor) -> Tensor:
        return last_row_of_a_chunk(*given)

    generator = torch.Generator().manual_seed(0)
    q, k, v, a = (torch.rand(1, 1, 8, width, generator=generator) for width in (8, 8, 6, 8))
    run = torch.compile(called, backend="kda", options={"kda.inner": "eager"}, dynamic=True)
    with torch.no_grad():
        assert relative_error(run(q, k, v, a), called(q, k, v, a)) <= 1e-5
