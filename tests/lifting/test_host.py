"""Functions of tensors on another device are compared on the CPU, unless they look at where their tensors are.

The other device is "meta", where everything can be captured and nothing compared.
"""

from __future__ import annotations

import types
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kdacompile.capture import lifting, verify
from kdacompile.capture.calls import Call, TensorArg
from kdacompile.capture.concolic import Concolic
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import identify
from kdacompile.capture.store import Verdict
from kdacompile.settings import Settings
from tests.lifting.functions import HEADS, KEY, VALUE, chunked_gla, recurrent_gla
from tests.lifting.test_lift import arguments


def where_its_tensors_are(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """A device goes from the question into a call, among other arguments, on either side of it."""
    state = torch.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), device=q.device, dtype=torch.float32)
    ones = torch.ones(v.shape[3], dtype=torch.float32).to(v.device)
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2) * ones)
    return torch.stack(out, 1)


def only_there(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * 2 if q.device.type != "cpu" else out
    return out


def only_there_and_if_long(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """At none of the lengths it is captured at."""
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * 2 if q.shape[1] > 20 and not q.is_cpu else out
    return out


def keeps_the_answer(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """A device goes by a variable into several calls, of a function and of a method."""
    device = q.device
    ones = torch.ones(v.shape[3] + 0, device=device, dtype=torch.float32)
    out = recurrent_gla(q, k, v, g)
    return out * ones * torch.ones(()).to(device)


def keeps_the_answer_and_looks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    device = q.device
    out = recurrent_gla(q, k, v, g) * torch.ones((), device=device)
    for _ in range(1):
        out = out * 2 if device.type != "cpu" else out
    return out


def hands_the_answer_on(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Beside what an operator makes, which does not get it."""
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * _doubled_there(q.device, torch.ones(()))
    return out


def hands_on_what_it_keeps(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    device = q.device
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * _doubled_there(device, torch.ones((), device=device))
    return out


def _doubled_there(device: torch.device, one: Tensor) -> Tensor:
    return one * 2 if device.type != "cpu" else one


def asks_by_number(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    out = recurrent_gla(q, k, v, g)
    for _ in range(1):
        out = out * 2 if q.get_device() >= 0 else out
    return out


def call_on(device: str) -> Call:
    rows = (("q", KEY), ("k", KEY), ("v", VALUE), ("g", KEY))
    return Call(tuple((n, TensorArg(("B", "T", HEADS, width), torch.float32, device)) for n, width in rows))


def proven(fn: Any, device: str) -> Verdict:
    assert isinstance(fn, types.FunctionType)
    return lifting.prove(fn, identify(fn), call_on(device), Settings())


@pytest.mark.parametrize("fn", [chunked_gla, recurrent_gla, where_its_tensors_are, keeps_the_answer])
def test_compared_on_the_cpu(fn: Any) -> None:
    there, here = proven(fn, "meta"), proven(fn, "cpu")
    assert there.text == here.text
    assert (there.lengths, there.max_error) == (here.lengths, here.max_error)
    args = arguments(37)
    have, want = (run(*args) for run in (lifting.load("test", there).run, fn))
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (have, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


LOOKING = (
    only_there,
    only_there_and_if_long,
    keeps_the_answer_and_looks,
    hands_the_answer_on,
    hands_on_what_it_keeps,
    asks_by_number,
)


@pytest.mark.parametrize("fn", LOOKING)
def test_compared_where_the_tensors_are(fn: Any) -> None:
    """There nothing can be compared on "meta", so that nothing is proven."""
    with pytest.raises((Unliftable, NotImplementedError)):
        proven(fn, "meta")


def test_what_is_refused_on_the_cpu_is_compared_where_the_tensors_are() -> None:
    """Whatever the CPU makes of it: a function may run on one device alone."""
    seen: list[str] = []
    real = verify.compare_everywhere

    def compare(concolic: Concolic, other: Any, call: Call, *rest: Any) -> Any:
        seen.extend({tensor.device for _, tensor in call.tensors()})
        if "cpu" in seen[-1:]:
            raise Unliftable("of the CPU's own")
        return real(concolic, other, call.map_tensors(lambda _, x: TensorArg(x.dims, x.dtype, "cpu")), *rest)

    with patch.object(verify, "compare_everywhere", compare), patch.object(verify, "compare_gradients"):
        assert proven(recurrent_gla, "meta").text == proven(recurrent_gla, "meta").text
    assert seen == ["cpu", "cpu", "meta"] * 2
