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
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    with context(), Functions():
        expected = ops.linear_attention_step(**others, inplace=inplace)
    with context():
        found = ops.linear_attention_step(**given, inplace=inplace)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert given["state"]._version == others["state"]._version == int(inplace)


@pytest.mark.parametrize(
    "context",
    [Functions, Dispatches, lambda: torch.autocast("cpu"), lambda: torch.profiler.profile(acc_events=True)],
    ids=["functions", "dispatches", "autocast", "profiler"],
)
def test_who_looks_on_sees_the_op(context: Callable[[], AbstractContextManager[Any]]) -> None:
    given = step_operands()
    with context() as looking:
        assert taken(lambda: ops.linear_attention_step(**given)) == 0
    if isinstance(looking, Dispatches):
        assert looking.seen == ["kdacompile.linear_attention_step.default"]


def test_other_tensors_are_the_dispatchers() -> None:
    given = step_operands()
    assert taken(lambda: ops.linear_attention_step(**given | {"q": given["q"].requires_grad_()})) == 0
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
