"""A function that is compiled by itself, without a model around it, is replaced like one that is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kdacompile.capture import hook
from kdacompile.containment import RAISE
from kdacompile.report.collect import collecting
from tests.compare import relative_error, worst_error
from tests.lifting import functions
from tests.lifting.test_lift import LENGTHS, arguments, graphs, lifted_functions


def compiled(fn: Callable[..., Any], *, fullgraph: bool = True, **how: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="kda", fullgraph=fullgraph, options={"kda.inner": "eager"}, **how)


def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Tensor, scale: float = 1.0, **others: Any) -> Tensor:
    """Arguments of every kind; one stands in a cell."""
    read = [lambda t: q[:, t] * scale][0]
    state = rest[0] if rest else q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * read(t).unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def results(q: Tensor, k: Tensor, v: Tensor, g: Tensor, alone: bool = False) -> Any:
    """Several returns, of a tuple and of a tensor."""
    out = q
    for _ in range(1):
        out = functions.recurrent_gla(q, k, v, g)
    if alone:
        return out
    return out, q * 2


def left(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = q
    for _ in range(1):
        out = functions.recurrent_gla(q, k, v, g)
    return out


def left_again(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = k
    for _ in range(1):
        out = functions.recurrent_gla(q, k, v, g)
    return out


@pytest.mark.parametrize("fn", [functions.chunked_gla, functions.recurrent_gla], ids=["chunked", "recurrent"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_for_every_length(fn: Any, batch: int, dynamic: bool | None) -> None:
    run = compiled(fn, dynamic=dynamic)
    with torch.no_grad(), collecting() as report:
        for length in (*LENGTHS, 1):
            args = arguments(length, batch)
            assert worst_error(run(*args), fn(*args)) < 1e-5, length
    assert graphs() <= 3  # any length, one chunk, whose result lies otherwise in memory, and one token
    matches = [match for match in report.matches if match.mode == "sequence"]
    assert [match.lifted for match in matches[:1]] == [fn.__qualname__]
    assert str(functions.__file__) in matches[0].source
    assert matches[0].roles["q"].startswith("q ")


@pytest.mark.parametrize("fn", [functions.chunked_gla, functions.recurrent_gla], ids=["chunked", "recurrent"])
def test_gradients_and_static_shapes(fn: Any) -> None:
    run = compiled(fn, dynamic=False)
    for length in (81, 16):
        own, theirs = ([x.requires_grad_() for x in arguments(length, 2)] for _ in range(2))
        found: list[tuple[Tensor, ...]] = []
        for call, args in ((run, own), (fn, theirs)):
            out = call(*args)
            out = out[0] if isinstance(out, tuple) else out
            found.append(torch.autograd.grad(out.square().sum(), args))
        assert max(map(relative_error, *found)) < 1e-4
    assert lifted_functions() == {fn.__name__}


def test_arguments_of_every_kind() -> None:
    run = compiled(gated)
    with torch.no_grad():
        for length in (20, 33):
            args = arguments(length, 2)
            state = torch.randn(2, functions.HEADS, functions.KEY, functions.VALUE)
            assert relative_error(run(*args), gated(*args)) < 1e-5
            assert relative_error(run(*args, state, scale=0.5), gated(*args, state, scale=0.5)) < 1e-5
            assert relative_error(run(*args[:3], g=args[3]), gated(*args)) < 1e-5
            assert relative_error(run(*args, scale=0.25), gated(*args, scale=0.25)) < 1e-5
            assert relative_error(run(*args, unknown=3), gated(*args)) < 1e-5  # unrolled
    assert lifted_functions() == {"gated"}


def test_several_returns() -> None:
    run = compiled(results)
    with torch.no_grad():
        for length in (8, 33, 16):
            args = arguments(length, 2)
            for alone in (False, True):
                have, want = run(*args, alone=alone), results(*args, alone=alone)
                assert type(have) is type(want)
                assert worst_error(have, want) < 1e-5
    assert graphs() == 2
    assert lifted_functions() == {"results"}


def test_what_it_reads_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global, a function that it calls, and a closure's cell."""
    sharpness = 1.0
    turned = functions.normalized

    def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = turned(functions.normalized(q))
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * (0.5 * sharpness) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    run, plain = compiled(retention), compiled(functions.recurrent_retention)
    args = arguments(18)[:3]

    def check(count: int) -> None:
        with torch.no_grad():
            for fn, original in ((run, retention), (plain, functions.recurrent_retention)):
                assert relative_error(fn(*args), original(*args)) < 1e-5
        assert graphs() == count

    check(2)
    sharpness = 0.5
    check(3)
    turned = torch.relu  # type: ignore[assignment]
    check(4)
    monkeypatch.setattr(functions, "sharpness", 0.25)
    check(5)
    monkeypatch.setattr(functions, "normalized", lambda x: -x)
    check(6)
    assert {"recurrent_retention"} < lifted_functions()


@pytest.mark.parametrize("fn", [functions.changes_its_mind, functions.writes_its_argument, functions.clamps_the_state])
def test_what_is_not_proven_is_captured_as_ever(fn: Any) -> None:
    run = compiled(fn)
    for length in (18, 24):
        own, theirs = arguments(length), arguments(length)
        assert relative_error(run(*own), fn(*theirs)) < 1e-5
        assert all(map(torch.equal, own, theirs))
    assert fn.__name__ not in lifted_functions()


def test_a_function_behind_a_graph_break() -> None:
    """It is called from eager mode then, and compiled by itself; what follows the break within it is not lifted."""

    def model(*args: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return functions.recurrent_gla(*args) * 2

    def broken(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    with torch.no_grad():
        for fn in (model, broken):
            run = compiled(fn, fullgraph=False)
            for length in (9, 12):
                args = arguments(length)
                assert relative_error(run(*args), fn(*args)) < 1e-5
    assert lifted_functions() == {"recurrent_gla"}


def test_other_backends_see_the_function() -> None:
    seen: list[str] = []

    def other(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    args = arguments(18)
    with torch.no_grad():
        compiled(functions.recurrent_gla)(*args)
        torch.compile(functions.recurrent_gla, backend=other)(*args)
    assert lifted_functions() and len(seen) > 60
    assert not any("kdacompile" in target for target in seen)


def test_an_error_of_ours_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("a mistake of ours")

    monkeypatch.delenv(RAISE)
    monkeypatch.setattr(hook, "_find_compiled", broken)
    args = arguments(12)
    with torch.no_grad(), collecting() as report:
        assert relative_error(compiled(left)(*args), left(*args)) < 1e-5
    assert [match.lifted for match in report.matches] == ["recurrent_gla"]
    assert "internal error while looking at a call (TypeError: a mistake of ours)" in str(report)


def test_a_replacement_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is captured once more, without it."""

    def broken(*_: Any) -> Any:
        raise TypeError("a mistake of ours")

    monkeypatch.delenv(RAISE)
    monkeypatch.setattr(hook.root.Root, "call", broken)
    args = arguments(12)
    with torch.no_grad(), collecting() as report:
        assert relative_error(compiled(left_again)(*args), left_again(*args)) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert [match.lifted for match in report.matches] == ["recurrent_gla"]
