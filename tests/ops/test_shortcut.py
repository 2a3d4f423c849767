"""Calls of the public functions that go past the dispatcher: when they do, and that none who looks on is passed by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kdacompile import ops
from kdacompile.ops.dispatch import Shortcut


def step_operands() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(1, 1, 2, 16, generator=generator) for name in "qkv"}
    return rows | {"g": -rows["q"].abs(), "beta": rows["k"][..., 0].sigmoid(), "state": torch.ones(1, 2, 16, 16)}


def taken(call: Callable[[], object]) -> int:
    """How many calls went past the dispatcher."""
    with patch.object(Shortcut, "run", autospec=True, side_effect=Shortcut.run) as run:
        call()
    return run.call_count


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
    assert taken(lambda: ops.linear_attention_step(**given, scale=2)) == 0
    whole, _ = ops.linear_attention_step(**given, scale=2)
    assert torch.equal(whole, ops.linear_attention_step(**given, scale=2.0)[0])


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
