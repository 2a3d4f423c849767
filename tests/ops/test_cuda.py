"""The ops on a GPU: the same numbers, and a step that a CUDA graph can capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile.ops import errors
from tests.ops.cases import GATE_FNS, GATES, Case, assert_close, make_case, oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _cuda(case: Case) -> Case:
    tensors = {name: None if x is None else x.cuda() for name, x in case.tensors.items()}
    return Case(tensors, case.options, case.cu_seqlens)


def _cpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.cpu() for x in tensors)


@pytest.mark.parametrize("gate_fn", GATE_FNS)
@pytest.mark.parametrize("gate", GATES[1:])
def test_numbers_and_gradients(gate: str, gate_fn: str) -> None:
    for length in (1, 40):
        case = make_case(gate=gate, gate_fn=gate_fn, length=length)
        leaf = case.tensors["k"].clone().requires_grad_()
        o, state = oracle(case.with_tensors(k=leaf))
        (expected,) = torch.autograd.grad(o.sum() + state.sum(), leaf)
        on_device = _cuda(case)
        k = on_device.tensors["k"].requires_grad_()
        outputs = on_device.run()
        assert_close(_cpu(*outputs), (o, state), 1e-5)
        assert_close(_cpu(*torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), k)), (expected.double(),), 3e-5)
        if length == 1:
            assert_close(_cpu(*on_device.run_step()), (o, state), 1e-5)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_packed_sequences(where: str) -> None:
    case = make_case(batch=1, length=20, sequences=3)
    bounds = torch.tensor([0, 7, 7, 20])
    packed = Case(case.tensors, case.options, bounds)
    on_device = Case(_cuda(case).tensors, case.options, bounds.to(where))
    assert_close(_cpu(*on_device.run()), oracle(packed), 1e-5)


def test_autocast_casts_nothing() -> None:
    case = _cuda(make_case(length=40))
    outside = case.run()
    for device in ("cuda", "cpu"):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert all(torch.equal(a, b) for a, b in zip(case.run(), outside, strict=True))
    packed = _cuda(make_case(batch=1, length=20, sequences=2))
    packed = Case(packed.tensors, packed.options, torch.tensor([0, 7, 20]))  # bounds on the CPU: both keys are active
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed.run()[1].dtype == torch.float32


def test_mixed_devices_are_refused() -> None:
    case = _cuda(make_case(length=3))
    with pytest.raises(errors.DeviceError):
        case.with_tensors(beta=case.tensors["beta"].cpu()).run()


def test_in_place_step_in_a_cuda_graph() -> None:
    """Captured once, replayed per token: no synchronisation inside, the cache written where it lies."""
    case = _cuda(make_case(gate_fn="softplus", length=5))
    options: dict[str, Any] = {name: value for name, value in case.options.items() if name != "chunk_size"}
    per_token = ("q", "k", "v", "g", "beta")
    static = {name: case.tensors[name][:, :1].clone() for name in per_token}
    state = case.tensors["initial_state"].clone()

    def step() -> torch.Tensor:
        return torch.ops.kdacompile.linear_attention_step_(
            *static.values(), state, case.tensors["A_log"], case.tensors["dt_bias"], None, **options
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    state.copy_(case.tensors["initial_state"])
    outputs: list[torch.Tensor] = []
    for t in range(5):
        for name in per_token:
            static[name].copy_(case.tensors[name][:, t : t + 1])
        graph.replay()
        outputs.append(captured.clone())
    expected = oracle(Case({n: None if x is None else x.cpu() for n, x in case.tensors.items()}, case.options))
    assert_close(_cpu(torch.cat(outputs, dim=1), state), expected, 1e-5)
