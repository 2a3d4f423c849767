"""The ops inside torch.compile: one graph, static and dynamic sizes, gradients, the in-place step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from kdacompile.ops import linear_attention, linear_attention_step
from tests.ops.cases import assert_close, gelu_mix, make_case


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
    o, final = linear_attention(
        gelu_mix(q), k, v, g, beta, initial_state=state, output_final_state=True, sigmoid_beta=True, qk_l2norm=True
    )
    return gelu_mix(o), final


def _operands(length: int, grad: bool) -> list[Tensor]:
    case = make_case(length=length, batch=3)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    return [case.tensors[name].clone().requires_grad_(grad) for name in names]


def _run(layer: Callable[..., Any], operands: list[Tensor]) -> tuple[Tensor, ...]:
    outputs = layer(*operands)
    if not operands[0].requires_grad:
        return outputs
    return (*outputs, *torch.autograd.grad(torch.stack([x.square().sum() for x in outputs]).sum(), operands))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_aot_eager(dynamic: bool, grad: bool) -> None:
    compiled = torch.compile(_layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for call, length in enumerate((19, 33)):
        operands = _operands(length, grad)
        expected = tuple(x.double() for x in _run(_layer, operands))
        with torch._dynamo.config.patch(error_on_recompile=dynamic and call > 0):  # another length, the same graph
            assert_close(_run(compiled, operands), expected, 2e-5)


def test_inductor_training() -> None:
    compiled = torch.compile(_layer, backend="inductor", fullgraph=True, dynamic=True)
    operands = _operands(40, grad=True)
    expected = tuple(x.double() for x in _run(_layer, operands))
    assert_close(_run(compiled, operands), expected, 2e-5)


def _twice(*operands: Tensor) -> tuple[Tensor, Tensor]:
    first, _ = linear_attention(*operands)
    with torch.no_grad():
        return first, linear_attention(*operands)[0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_equal_calls_return_tensors_of_their_own(backend: str) -> None:
    """A teacher's results beside a student's: the teacher's have no gradient, the student's keep theirs."""
    operands = _operands(19, grad=True)[:5]
    student, teacher = torch.compile(_twice, backend=backend, fullgraph=True)(*operands)
    assert (student.requires_grad, teacher.requires_grad) == (True, False)
    expected = torch.autograd.grad(_twice(*operands)[0].square().sum(), operands)
    assert_close(torch.autograd.grad(student.square().sum(), operands), tuple(x.double() for x in expected), 2e-5)
    kept = teacher.clone()
    student.detach().zero_()
    assert torch.equal(teacher, kept)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_decoding_loop_with_a_cache_written_in_place(backend: str) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, cache: Tensor) -> Tensor:
        o, _ = linear_attention_step(gelu_mix(q), k, v, g, state=cache[1], inplace=True)
        return gelu_mix(o)

    compiled = torch.compile(decode, backend=backend, fullgraph=True)
    case = make_case(length=6)
    caches = [torch.zeros(2, 2, 4, 5, 3, dtype=torch.bfloat16) for _ in range(2)]
    for t in range(6):
        token = [case.tensors[name][:, t : t + 1] for name in ("q", "k", "v", "g")]
        expected = decode(*token, cache=caches[0])
        with torch._dynamo.config.patch(error_on_recompile=t > 0):
            actual = compiled(*token, cache=caches[1])
        assert_close((actual,), (expected.double(),), 1e-2)  # the caches round to bfloat16
        assert_close((caches[1],), (caches[0].double(),), 1e-2)
    assert not caches[1][0].any() and caches[1][1].any()


def test_step_without_token_dimension() -> None:
    case = make_case(length=1)
    operands = [case.tensors[name][:, 0] for name in ("q", "k", "v", "g", "beta")]
    compiled = torch.compile(linear_attention_step, backend="aot_eager", fullgraph=True)
    expected = tuple(x.double() for x in linear_attention_step(*operands))
    assert_close(compiled(*operands), expected, 1e-6)


def test_packed_sequences_with_changing_bounds() -> None:
    """The bounds are data: other bounds, and another number of them, need no new graph."""

    def packed(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return linear_attention(q, k, v, cu_seqlens=bounds, qk_l2norm=True)[0]

    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=True)
    case = make_case(batch=1, length=20, key_dim=8, value_dim=6)
    q, k, v = (case.tensors[name] for name in ("q", "k", "v"))
    for call, bounds in enumerate(([0, 7, 20], [0, 3, 20], [0, 1, 5, 5, 20])):
        bounds = torch.tensor(bounds)
        with torch._dynamo.config.patch(error_on_recompile=call > 0):
            o = compiled(q, k, v, bounds)
        assert_close((o,), (packed(q, k, v, bounds).double(),), 1e-6)


def test_autocast_region() -> None:
    """Inside a compiled autocast region the op keeps its dtypes, as it does in eager mode."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_attention(q, k, v, qk_l2norm=True)[0]

    case = make_case(length=19)
    operands = [case.tensors[name] for name in ("q", "k", "v")]
    o = torch.compile(layer, backend="aot_eager", fullgraph=True)(*operands)
    assert o.dtype == torch.float32
    assert_close((o,), (linear_attention(*operands, qk_l2norm=True)[0].double(),), 1e-6)
