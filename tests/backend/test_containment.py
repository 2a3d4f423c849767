"""An error of ours ends at the boundary: the graph as it was, a rejection, and what passes, passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kdacompile import backend, containment
from kdacompile.capture import hook
from kdacompile.capture.store import Verdict
from kdacompile.errors import InternalError
from kdacompile.explainer import explain
from kdacompile.lowering.cpu import backward, compiler, recurrence
from kdacompile.ops import fused, linear_attention
from kdacompile.report import refusals
from kdacompile.report.report import Report
from kdacompile.rewrite.linear_attention import LinearAttentionSplice
from kdacompile.search.matching import Matching
from tests.backend.layers import delta_arguments, gated_delta_loop, gated_linear_parallel


class Mistake(Exception):
    """Nobody catches this by name."""


def fail(*_: object, **__: object) -> Any:
    raise Mistake("of ours")


@pytest.fixture(autouse=True)
def contained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As users have it; tests have internal errors raised otherwise."""
    monkeypatch.delenv(containment.RAISE, raising=False)
    yield
    refusals._left.clear()


def explained(options: dict[str, Any] | None = None) -> Report:
    run = explain(gated_linear_parallel, options={"kda.inner": "aot_eager", **(options or {})})
    return run(*delta_arguments()[:4])


PLACES = [
    (Matching, "judge"),
    (LinearAttentionSplice, "erase"),  # the op is in the graph by then
    (backend, "_tables"),
]


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_the_graph_is_handed_on_as_it_was(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, fail)
    report = explained()
    want = gated_linear_parallel(*delta_arguments()[:4])
    (told,) = [rejection for rejection in report.rejections if rejection.code == "internal"]
    assert "please report it" in told.reason
    assert "Mistake: of ours" in told.reason
    if owner is not backend:  # tables are looked for before anything else; without them the graph is rewritten
        assert not report.matches
        assert torch.equal(report.result, want)
        assert told.source.split(":")[0].endswith("layers.py")
    torch.testing.assert_close(report.result, want)


def test_strict_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearAttentionSplice, "erase", fail)
    with pytest.raises(InternalError, match="Mistake: of ours"):
        explained({"kda.strict": True})


def test_the_tests_have_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(containment.RAISE, "1")
    monkeypatch.setattr(LinearAttentionSplice, "erase", fail)
    with pytest.raises(InternalError):
        explained()


def test_what_is_not_ours_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):

        def interrupted(*_: object, error: type[BaseException] = error) -> Any:
            raise error

        with pytest.raises(error):
            containment.contain("testing", interrupted, lambda _: None)


@pytest.mark.parametrize("name", ["_find", "library"])
def test_a_call_that_cannot_be_looked_at_is_left_to_dynamo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "library":
        monkeypatch.setattr(hook.library, "of", fail)
    else:
        monkeypatch.setattr(hook, name, fail)
    args = delta_arguments(length=12)
    report = explain(lambda *x: gated_delta_loop(*x))(*args)
    assert any("while looking at a call" in rejection.reason for rejection in report.rejections)
    torch.testing.assert_close(report.result, gated_delta_loop(*args))


def test_a_replacement_that_cannot_be_captured_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo is in the middle of it by then: the region is captured once more, with the function itself."""

    def broken(*tensors: Any) -> Any:
        return torch.zeros(2) @ torch.zeros(3)  # an error of the stand-ins

    def found(fn: Any, site: Any, settings: Any, tensors: list[Any]) -> Any:
        tensors += site.args
        return hook.Lifted(broken, Verdict("broken", "nowhere:1"))

    monkeypatch.setattr(hook, "_find", found)
    args = delta_arguments(length=12)
    report = explain(lambda *x: gated_delta_loop(*x), fullgraph=True)(*args)
    assert any("while capturing a replacement" in rejection.reason for rejection in report.rejections)
    torch.testing.assert_close(report.result, gated_delta_loop(*args))


class Kernels:
    """Kernels for every call, none of which runs."""

    name = "broken"
    asked = 0

    def declines(self, call: Any) -> None:
        return None

    def run(self, call: Any, scratch: Any = None) -> Any:
        Kernels.asked += 1
        fail()

    def step(self, call: Any, state: Any, scratch: Any = None) -> Any:
        state.fill_(7.0)
        fail()


@pytest.mark.parametrize("choose", [fail, lambda call: Kernels()])
def test_kernels_that_fail_are_not_used(choose: Any) -> None:
    served = fused.FusedKernels(choose, remember=True)
    q, k, v, g, beta = delta_arguments()
    options = {"scale": 1.0, "delta": True, "gate": "token", "gate_fn": "log", "gate_scale": 0.0, "chunk_size": 0}
    options |= {"sigmoid_beta": False, "qk_l2norm_eps": 0.0, "out_dtype": None}
    Kernels.asked = 0
    for _ in range(2):
        o, _ = served.sequence(q, k, v, g, beta, None, None, None, None, **options)
        torch.testing.assert_close(o, gated_delta_loop(q, k, v, g, beta))
    assert Kernels.asked < 2  # once they have failed they are not asked again


@pytest.mark.parametrize("choose", [fail, lambda call: Kernels()])
def test_steps_that_fail_leave_the_state_as_it_was(choose: Any) -> None:
    """The kernels of a step fail where they are compiled, or later: the state is put back, and the step is made."""
    served = fused.FusedKernels(choose, remember=True)
    q, k, v, g, beta = delta_arguments(length=1)
    options = {"scale": 1.0, "delta": True, "gate": "token", "gate_fn": "log", "gate_scale": 0.0}
    options |= {"sigmoid_beta": False, "qk_l2norm_eps": 0.0, "out_dtype": None}
    start = torch.randn(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    ours, plain = start.clone(), start.clone()
    for _ in range(2):
        o = served.inplace_step(q, k, v, g, beta, ours, None, None, None, **options)
        want = torch.ops.kdacompile.linear_attention_step_(q, k, v, g, beta, plain, None, None, None, **options)
        torch.testing.assert_close((o, ours), (want, plain))
    assert not torch.equal(ours, start)


def test_a_library_that_cannot_be_loaded_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "library", fail)
    kernels = recurrence._kernel_of, backward._kernel
    for cached in kernels:
        cached.cache_clear()
    q, k, v, g, beta = (x.requires_grad_() for x in delta_arguments())
    o, _ = linear_attention(q, k, v, g, beta, scale=1.0)
    want = gated_delta_loop(q, k, v, g, beta)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), (q, k, v, g, beta)) for out in (o, want)))
    for cached in kernels:
        cached.cache_clear()
