"""Calls of the public functions that go past the dispatcher: when they do, and that none who looks on is passed by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kdacompile import ops
from kdacompile.compat.dispatcher import DispatchKey
from kdacompile.containment import RAISE
from kdacompile.lowering.recorded import Memory
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops.dispatch import MOST, Kind, Shortcut
from tests.lowering.recorded_offline import Kernel, floats


def step_operands() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(1, 1, 2, 16, generator=generator) for name in "qkv"}
    return rows | {"g": -rows["q"].abs(), "beta": rows["k"][..., 0].sigmoid(), "state": torch.ones(1, 2, 16, 16)}


def taken(call: Callable[[], object]) -> int:
    """How many calls went past the dispatcher, to a kernel or to what it did before."""
    chosen = patch.object(Shortcut, "run", autospec=True, side_effect=Shortcut.run)
    known = patch.object(Kind, "run", autospec=True, side_effect=Kind.run)
    with chosen as run, known as again:
        call()
    return run.call_count + again.call_count


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def mla_call() -> Tensor | tuple[Tensor, Tensor]:
    q, cache = torch.randn(2, 1, 3, 24), torch.randn(2, 5, 24)
    return ops.mla_decode(q, cache, rank=16, scale=0.2)


def test_plain_calls_go_past_the_dispatcher() -> None:
    given = step_operands()
    assert taken(lambda: ops.linear_attention_step(**given)) == 1
    assert taken(lambda: ops.linear_attention_step(**given, inplace=True)) == 1
    sequence = {name: x for name, x in given.items() if name != "state"}
    assert taken(lambda: ops.linear_attention(**sequence)) == 1
    assert taken(mla_call) == 1


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_the_same_numbers_either_way(context: Callable[[], AbstractContextManager[Any]], inplace: bool) -> None:
    given, others = step_operands(), step_operands()
    with context(), patch.object(Shortcut, "kernel", return_value=None):
        expected = ops.linear_attention_step(**others, inplace=inplace)
    with context():
        found = ops.linear_attention_step(**given, inplace=inplace)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert given["state"]._version == others["state"]._version == int(inplace)


@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_modes_see_the_op(mode: type[Functions | Dispatches]) -> None:
    with mode() as looking:
        ops.linear_attention_step(**step_operands())
    assert looking.seen.count("kdacompile.linear_attention_step.default") == 1


def test_autocast_is_off_inside() -> None:
    states: list[bool] = []

    def run(*call: Any) -> Any:
        states.append(torch.is_autocast_enabled("cpu"))
        return original(*call)

    original = Shortcut.run
    with torch.autocast("cpu"), patch.object(Shortcut, "run", autospec=True, side_effect=run):
        ops.linear_attention_step(**step_operands())
        assert torch.is_autocast_enabled("cpu")
    assert states in ([], [False])


def test_the_profiler_sees_the_op() -> None:
    with torch.profiler.profile(acc_events=True) as profile:
        assert taken(lambda: ops.linear_attention_step(**step_operands())) == 0
    assert "kdacompile::linear_attention_step" in {event.key for event in profile.key_averages()}


def test_other_tensors_are_the_dispatchers() -> None:
    given = step_operands()
    recorded, _ = ops.linear_attention_step(**given | {"q": given["q"].requires_grad_()})
    assert recorded.requires_grad  # what runs below autograd may go past the dispatcher
    given["q"].requires_grad_(False)
    assert taken(lambda: ops.linear_attention_step(**given | {"v": given["v"].as_subclass(Subclass)})) == 0
    negative: dict[str, Any] = given | {
        "k": torch.view_as_complex(torch.stack([given["v"], given["k"]], -1)).conj().imag
    }
    assert negative["k"].is_neg()
    assert taken(lambda: ops.linear_attention_step(**negative)) == 0
    found, _ = ops.linear_attention_step(**negative)
    negative["k"] = -given["k"]
    expected, _ = ops.linear_attention_step(**negative)
    assert torch.equal(found, expected)


def test_options_that_the_dispatcher_would_convert() -> None:
    given = step_operands()
    assert taken(lambda: ops.linear_attention_step(**given, scale=2.0)) == 1
    assert taken(lambda: ops.linear_attention_step(**given, scale=3)) == 0
    whole, _ = ops.linear_attention_step(**given, scale=3)
    assert torch.equal(whole, ops.linear_attention_step(**given, scale=3.0)[0])
    assert torch.equal(whole, ops.linear_attention_step(**given, scale=3)[0])  # of a kind that is known


def test_compiled_graphs_go_past_it_too() -> None:
    given = step_operands()
    expected, _ = ops.linear_attention_step(**given)
    compiled = torch.compile(lambda **x: ops.linear_attention_step(**x)[0] * 2, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**given), expected * 2)
        assert taken(lambda: compiled(**given)) == 1


def test_calls_that_the_dispatcher_refuses() -> None:
    """What is missing is not filled in, and None is no tensor."""
    given = step_operands()
    op, tensors = torch.ops.kdacompile.linear_attention_step_.default, [given[name] for name in "q k v g beta".split()]
    options = {"scale": 1.0, "delta": True, "gate": "channel", "gate_fn": "log", "gate_scale": 1.0}
    options |= {"sigmoid_beta": False, "qk_l2norm_eps": 0.0, "out_dtype": None}
    state = given["state"]
    assert taken(lambda: op(*tensors, state, None, None, None, **options)) == 1
    assert taken(lambda: op(*tensors, state, A_log=None, dt_bias=None, state_indices=None, **options)) == 0
    del options["gate"]
    for wrong in ([*tensors, state, None, None, None], [*tensors, None, None, None, None], [*tensors, state], []):
        with pytest.raises(RuntimeError, match="linear_attention_step_"):
            op(*wrong, **options)


def added(x: int, y: int, state: int, out: int, N: int, factor: float) -> None:
    rows = [floats(at, N) for at in (x, y, state, out)]
    for i in range(N):
        rows[2][i] += factor * (rows[0][i] + rows[1][i])
        rows[3][i] = rows[2][i]


class Adding:
    """``state += factor * (x + y)``, remembered, with x in the place of a y that is None; what it was is counted."""

    def __init__(self) -> None:
        self.memory, self.dispatched, self.chosen = Memory(), 0, 0
        self.launched = Kernel("added", ["x", "y", "state", "out", "N", "factor"], added)
        self.op = SimpleNamespace(_op=self.through_dispatcher)
        self.shortcut = Shortcut(self.op, {DispatchKey.CPU: self.kernel}, (False, True, False), {"factor": "float"}, 2)
        self.shortcut.known[self.kernel] = lambda tensors, options: self.memory.known(options["factor"], tensors, 2)

    def through_dispatcher(self, *tensors: Any, factor: float) -> Tensor:
        self.dispatched += 1
        x, y, state = tensors
        return state + factor * (x + (x if y is None else y))

    def kernel(self, *tensors: Tensor | None, factor: float) -> Tensor:
        self.chosen += 1
        return self.memory.run(factor, tensors, lambda scratch: self.run(scratch, tensors, factor), 2)[0]

    def run(self, scratch: Scratch, tensors: Any, factor: float) -> tuple[Tensor, ...]:
        x, y, state = tensors
        x, y = scratch.contiguous(x), None if y is None else scratch.contiguous(y)
        out = scratch.result(tuple(state.shape), state.dtype, state.device)
        scratch.launch(self.launched, (1,))(x, x if y is None else y, state, out, N=state.numel(), factor=factor)
        return (out,)

    def path(self, *tensors: Any, factor: float = 2.0) -> str:
        """How a call is served: "known", "chosen" or "dispatched"; its numbers are checked."""
        before = self.chosen, self.dispatched
        x, y, state = (x if x is None else x.detach().resolve_neg().clone() for x in tensors)
        assert x is not None and state is not None
        out = self.op._op(*tensors, factor=factor)
        assert torch.equal(out, state + factor * (x + (x if y is None else y)))
        return {before: "known", (before[0] + 1, before[1]): "chosen"}.get((self.chosen, self.dispatched), "dispatched")


def whole(*shape: int) -> Tensor:
    return torch.randint(-9, 10, shape).float()


def rows(count: int = 3, size: int = 8) -> list[Tensor]:
    return [whole(size, size) for _ in range(count)]


def test_calls_like_one_before_are_known_by_one_look() -> None:
    op = Adding()
    x, y, state = rows()
    assert [op.path(x, y, state) for _ in range(3)] == ["chosen", "known", "known"]
    assert state._version == 3
    assert op.path(*rows()) == "known"
    with torch.inference_mode():  # these have other keys
        assert op.path(*rows()) == "dispatched"
    for given in ([x, None, state], [x.T, y, state], rows(size=9), [torch.nn.Parameter(x, False), y, state]):
        assert [op.path(*given) for _ in range(2)] == ["chosen", "known"]
    assert op.path(x, y, state) == "known"
    assert [op.path(x, y, state, factor=3.0) for _ in range(2)] == ["chosen", "known"]


def test_the_oldest_kinds_are_forgotten() -> None:
    op = Adding()
    sizes = [*range(8, 8 + 4 * (MOST + 1), 4)]
    assert {op.path(*rows(size=size)) for size in sizes} == {"chosen"}
    assert op.path(*rows(size=sizes[-1])) == op.path(*rows(size=sizes[1])) == "known"
    assert op.path(*rows(size=sizes[0])) == "chosen"


def test_a_kind_that_cannot_be_kept_is_chosen_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAISE, raising=False)
    monkeypatch.setattr("kdacompile.ops.dispatch.likeness", None)
    op = Adding()
    assert [op.path(*rows()) for _ in range(2)] == ["chosen", "chosen"]
    assert not op.shortcut.known


def test_calls_that_are_not_like_it() -> None:
    """Elsewhere in memory, in memory that is shared, or watched: the numbers are checked, and who serves it."""
    op = Adding()
    x, y, state = rows()
    assert [op.path(x, y, state) for _ in range(2)] == ["chosen", "known"]
    assert op.path(whole(65)[1:].view(8, 8), y, state) == "chosen"  # 4 bytes beyond a multiple of 16
    assert op.path(x, x, state) == "chosen"
    memory = whole(200)
    assert op.path(memory[:64].view(8, 8), y, memory[64:128].view(8, 8)) == "known"
    assert op.path(memory[32:96].view(8, 8)[:4].repeat(2, 1), y, memory[64:128].view(8, 8)) == "known"
    seen: list[Any] = []
    with patch.object(Shortcut, "kernel", side_effect=lambda *call: seen.append(call)):
        with torch.autocast("cpu"):
            op.path(x, y, state)
        with Functions():
            op.path(x, y, state)
        with Dispatches():
            op.path(x, y, state)
        with torch.profiler.profile(acc_events=True):
            op.path(x, y, state)
        with forward_ad.dual_level():
            op.path(x, y, state)
        torch.func.vmap(lambda z: op.op._op(x, y, z, factor=2.0))(torch.stack([state] * 2))
        negative = torch.view_as_complex(torch.stack([y, x], -1)).conj().imag
        assert negative.is_neg() and negative.shape == x.shape
        op.path(negative, y, state)
        op.op._op(memory[32:96].view(8, 8), y, memory[64:128].view(8, 8), factor=2.0)  # x is read as it is written
        assert len(seen) == op.dispatched == 8


def test_what_needs_gradients_is_known_while_nothing_is_recorded() -> None:
    op = Adding()
    x, y, state = rows()
    weight = torch.nn.Parameter(x)
    with torch.no_grad():
        assert [op.path(weight, y, state) for _ in range(2)] == ["chosen", "known"]
    assert op.path(weight, y, state) == "dispatched"
    assert op.op._op(weight, y, state, factor=2.0).requires_grad
    with torch.no_grad():
        assert op.path(weight, y, state) == "known"
        assert op.path(x, y, state) == "chosen"
