"""From ``torch.compile`` on tensors of an NPU to the launched kernels; tests/ascend/test_npu.py runs this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import common as inductor
from torch.utils._pytree import tree_map

from kdacompile import compat, containment, ops
from kdacompile.lowering.ascend import npu as launching
from kdacompile.lowering.ascend.operators import CHUNKED, RECURRENT
from kdacompile.ops.fused import FusedKernels
from kdacompile.report.collect import collecting
from tests.ascend.npu import device
from tests.ascend.npu.device import HostWaitError, npu
from tests.ascend.npu.triton import SimulatedTriton
from tests.ascend.tools import Tools
from tests.backend import layers
from tests.lowering import test_ascend_dispatch as operators
from tests.lowering.verify import relative_error
from tests.ops.cases import Case, make_case, oracle
from tests.ops.mla_cases import MlaCase, make_mla

NPU = device.install()
SINGLE, HALF = 2e-6, 8e-3


@pytest.fixture(autouse=True)
def triton(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedTriton]:
    """triton-ascend as if installed."""
    simulated = SimulatedTriton(tools)
    monkeypatch.setattr(launching, "missing", lambda: None)
    monkeypatch.setattr(launching, "_driver", lambda: simulated.driver)
    monkeypatch.setattr(launching, "load_source", simulated.load)
    yield simulated
    torch._dynamo.reset()


def there(x: Any) -> Any:
    """Tensors of the device with these numbers and strides."""
    return tree_map(lambda leaf: leaf.to(NPU) if isinstance(leaf, Tensor) else leaf, x)


def compiled(function: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    return layers.compiled(function, "aot_eager", **keywords)


def on_device(case: Case) -> Case:
    return Case(there(case.tensors), case.options, there(case.cu_seqlens))


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float) -> bool:
    return all(relative_error(x.cpu(), y) < bound for x, y in zip(found, expected, strict=True))


# ---- recognised, dispatched, launched


def test_a_model(triton: SimulatedTriton) -> None:
    """Two kernels, on all Vec cores and on all Cube cores, with everything else as it is."""
    model = layers.Layer().bfloat16()
    x = torch.randn(2, 9, 12, dtype=torch.bfloat16)
    expected = model.double()(x.double())
    model = model.bfloat16().to(NPU)
    with collecting() as report:
        found = compiled(model)(there(x))
    assert layers.patterns(report) == ["gated_delta_rule"] and found.device == NPU
    assert triton.launched == [("sub_chunks", 6), ("scan", 3)]
    assert close((found,), (expected.detach(),), 2e-2)


def test_a_speculative_step(triton: SimulatedTriton) -> None:
    """Five tokens of each request are one kernel, which reads and writes the state once."""
    arguments = layers.delta_arguments()
    found = compiled(layers.gated_delta_loop)(*there(arguments))
    assert triton.launched == [("step", 6)]
    assert close((found,), (layers.gated_delta_loop(*(x.double() for x in arguments)),), SINGLE)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Tensor:
    o, new = layers.gla_step(q, k, v, g, state)
    state.copy_(new)
    return o


def test_a_step_in_place(triton: SimulatedTriton) -> None:
    q, k, v, g, state = layers.step_arguments()
    ours = there(state)
    with collecting() as report:
        found = compiled(step)(*there((q, k, v, g)), ours)
    assert layers.patterns(report) == ["gla"] and [name for name, _ in triton.launched] == ["step"]
    assert close((found, ours), layers.gla_step(*(x.double() for x in (q, k, v, g, state))), SINGLE)


def pulled(case: Case, run: Callable[[Case], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Gradients of everything that a case has."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.tensors.items() if x is not None}
    o, state = run(case.with_tensors(**leaves))
    return torch.autograd.grad(o.square().sum() + state.square().sum(), list(leaves.values()))


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_gradients(triton: SimulatedTriton, gate: str) -> None:
    """Kernels forward and backward; norms and gate functions in front of them are differentiated by torch."""
    case = make_case(gate=gate, gate_fn="softplus", batch=1, heads=1, length=40).to(torch.bfloat16)
    found = pulled(on_device(case), Case.run)
    names = [name for name, _ in triton.launched]
    forward = ["sub_chunks"] * (gate == "channel") + ["prologue", "scan"]
    assert names == [*forward, *forward, "reverse", "epilogue", "sums"]
    assert all(x.device == NPU for x in found)
    assert close(found, pulled(case, oracle), 2e-2)


def test_gradients_that_have_no_kernels(triton: SimulatedTriton) -> None:
    """The kernels of the forward pass, and PyTorch's operators on the device behind them."""
    case = make_case(gate="channel", batch=1, heads=1, length=20)
    found = pulled(on_device(case), Case.run)
    assert [name for name, _ in triton.launched][-1] == "scan" and all(x.device == NPU for x in found)
    assert close(found, pulled(case, oracle), 2e-5)


def test_inductor_gets_the_rewritten_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is called with our pass and otherwise as ever; what torch_npu registers with it is its own affair."""
    graphs: list[torch.fx.GraphModule] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        config_patches[compat.PASS_OPTION](gm.graph)
        gm.recompile()
        graphs.append(gm)
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    arguments = layers.delta_arguments()
    found = layers.compiled(layers.gated_delta_loop, "inductor")(*there(arguments))
    (graph,) = graphs
    assert torch.ops.kdacompile.linear_attention.default in {node.target for node in graph.graph.nodes}
    assert close((found,), (layers.gated_delta_loop(*(x.double() for x in arguments)),), SINGLE)
    assert "npu" not in inductor.device_codegens and inductor.get_scheduling_for_device("npu") is None


# ---- captured


def packed() -> Case:
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "length": 40, "key_dim": 16, "value_dim": 16, "sequences": 3}
    case = make_case(gate="channel", gate_fn="softplus", **sizes)
    return Case(case.to(torch.bfloat16).tensors, case.options, torch.tensor([0, 17, 17, 40], dtype=torch.int32))


def test_a_captured_graph_of_packed_sequences(triton: SimulatedTriton) -> None:
    """Replayed for other numbers and other lengths; capturing waits for nothing."""
    case = packed()
    placed = on_device(case)
    placed.run()  # compiles
    with npu.capture() as steps:
        o, state = placed.run()
    halves = {name: None if x is None else 0.5 * x for name, x in case.tensors.items()}
    other = Case(halves, case.options, torch.tensor([0, 3, 38, 40], dtype=torch.int32))
    for mine, now in zip((*placed.positional, placed.cu_seqlens), (*other.positional, other.cu_seqlens), strict=True):
        if mine is not None:
            mine.copy_(there(now))
    for run in steps:
        run()
    assert close((o, state), oracle(other), HALF)


def test_a_captured_backward_pass_of_packed_sequences(triton: SimulatedTriton) -> None:
    """Replayed for other numbers and other lengths, as the forward pass is."""
    case = packed()
    placed = on_device(case)
    pulled(placed, Case.run)  # compiles
    with npu.capture() as steps:
        found = pulled(placed, Case.run)
    halves = {name: None if x is None else 0.5 * x for name, x in case.tensors.items()}
    other = Case(halves, case.options, torch.tensor([0, 3, 38, 40], dtype=torch.int32))
    for mine, now in zip((*placed.positional, placed.cu_seqlens), (*other.positional, other.cu_seqlens), strict=True):
        if mine is not None:
            mine.detach().copy_(there(now))
    for run in steps:
        run()
    assert [name for name, _ in triton.launched].count("sums") == 2
    assert close(found, pulled(other, oracle), 2e-2)


def test_captured_steps_of_a_compiled_model(triton: SimulatedTriton) -> None:
    arguments = layers.step_arguments()
    q, k, v, g, expected = (x.double() for x in arguments)
    *placed, ours = there(arguments)
    run = compiled(step)
    run(*placed, ours)
    with npu.capture() as steps:
        run(*placed, ours)
    for _ in range(2):
        for again in steps:
            again()
    for _ in range(4):  # compiled, captured, replayed twice
        _, expected = layers.gla_step(q, k, v, g, expected)
    assert close((ours,), (expected,), SINGLE) and [name for name, _ in triton.launched] == ["step"] * 2


def decoded() -> MlaCase:
    sizes: dict[str, Any] = {"heads": 16, "rank": 64, "rope": 16, "cached": 100, "page": 16}
    case = make_mla(weights=False, tokens=1, lengths=(100, 33), dtype=torch.bfloat16, **sizes).with_(scale=0.1)
    return MlaCase(there({**case.tensors, **case.stale}), 0.1)


def test_captured_decoding_over_pages(triton: SimulatedTriton) -> None:
    """Lengths and page tables stay on the device."""
    case = decoded()
    case.run()
    with npu.capture() as steps:
        o, lse = case.run()
    assert [name for name, _ in triton.launched][:1] == ["attend"]
    case.tensors["lengths"].copy_(there(torch.tensor([64, 0], dtype=torch.int32)))
    for again in steps:
        again()
    cpu = make_mla(
        weights=False, tokens=1, lengths=(64, 0), heads=16, rank=64, rope=16, cached=100, page=16, dtype=torch.bfloat16
    )
    expected, _ = cpu.with_(scale=0.1).oracle()
    assert relative_error(o.cpu(), expected) < HALF and bool(lse[1].cpu().isinf().all())


def test_a_wait_for_the_host_would_be_seen() -> None:
    x = there(torch.ones(3))
    with npu.capture():
        for wait in (lambda: x.sum().item(), lambda: x.cpu(), x.tolist, lambda: x.copy_(torch.ones(3))):
            with pytest.raises(HostWaitError):
                wait()


# ---- not taken


def test_what_the_kernels_decline_runs_on_the_device(triton: SimulatedTriton) -> None:
    case = make_case(gate="token", batch=1, heads=1, length=5, key_dim=300)
    o, state = on_device(case).run()
    assert o.device == state.device == NPU and not triton.launched
    assert close((o, state), oracle(case), SINGLE)


def test_kernels_that_fail_are_not_asked_again(
    triton: SimulatedTriton, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(containment.RAISE)
    triton.broken = True
    case = make_case(gate="token", batch=1, heads=1, length=5)
    placed = on_device(case)
    serving = FusedKernels(launching.choose)
    for _ in range(2):
        found = serving.sequence(*placed.positional, None, **placed.options)
        assert close(tuple(found), oracle(case), SINGLE)
    assert caplog.text.count("leaves this to torch") == 1 and not triton.launched


def test_torch_npu_s_operators_where_they_lose_nothing(triton: SimulatedTriton) -> None:
    """A state that the caller holds in bf16; by what their documentation says, which stands in for them."""
    library = torch.library.Library("npu", "DEF")
    library.define(CHUNKED)
    library.define(RECURRENT)

    def through(run: Callable[..., Any]) -> Callable[..., Any]:
        def on_cpu(x: Any) -> Any:
            return device.on_cpu(x) if device.is_here(x) else x

        return lambda *args, **named: there(run(*tree_map(on_cpu, args), **tree_map(on_cpu, named)))

    library.impl("npu_chunk_gated_delta_rule", through(operators.chunked), "PrivateUse1")
    library.impl("npu_recurrent_gated_delta_rule", through(operators.recurrent), "PrivateUse1")
    case = operators.bf16_case(batch=1)
    assert close(on_device(case).run(), oracle(case), HALF) and not triton.launched
    single = case.with_tensors(initial_state=case.tensors["initial_state"].float())
    assert close(on_device(single).run(), oracle(single), HALF) and triton.launched
    library._destroy()


def test_the_functional_ops(triton: SimulatedTriton) -> None:
    q, k, v, g, beta = layers.delta_arguments()
    o, _ = ops.linear_attention(*there((q, k, v)), g=there(g), beta=there(beta), delta=True, scale=1.0)
    assert triton.launched and close(
        (o,), (layers.gated_delta_loop(*(x.double() for x in (q, k, v, g, beta))),), SINGLE
    )
