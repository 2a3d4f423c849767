"""The compiled split, executed: one Cube and two Vec cores a block, against the fp64 recurrence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kdacompile.lowering.ascend.launch import run_step
from kdacompile.lowering.ascend.npu import EmittedKernels
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.ir import DType
from kdacompile.lowering.layout import packed_layout
from kdacompile.lowering.linear_attention import ROWS
from tests.ascend.cases import CORES, Verdict, ascend_case, judge, narrowed, rounded_inputs, run
from tests.ascend.test_compiler import FAMILY, plan_of
from tests.ascend.tools import SimulatedDevice, Tools
from tests.lowering.planned import ascend_scratch
from tests.lowering.verify import Case, as_implementation, verify

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}


def simulated(tools: Tools, case: Case, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Verdict:
    order = options.pop("order", ("AIC", "AIV0", "AIV1"))
    inputs = rounded_inputs(case, dtype)
    return judge(case, inputs, run(inputs, SimulatedDevice(tools, order), dtype, **options))


@pytest.mark.parametrize("row", FAMILY)
def test_family(tools: Tools, row: tuple[str, bool]) -> None:
    """With NaN in every buffer between kernels, of which there are as many bytes as planned."""
    case = ascend_case(*row, dtype=torch.bfloat16)
    kernels = as_implementation(EmittedKernels(SimulatedDevice(tools), CORES))
    verify(kernels, case, tolerance=TOLERANCE[torch.bfloat16], scratch_bytes=ascend_scratch(case, CORES))


@pytest.mark.parametrize("row", [("channel", True), ("token", False)])
def test_kernels_planned_for_the_next_generation(tools: Tools, row: tuple[str, bool]) -> None:
    """Compiled for the 910B: what its own compiler makes of them cannot be executed here."""
    case = ascend_case(*row, dtype=torch.bfloat16)
    kernels = as_implementation(EmittedKernels(SimulatedDevice(tools), CORES, "ascend910_95"))
    planned = ascend_scratch(case, CORES, "ascend910_95")
    verify(kernels, case, tolerance=TOLERANCE[torch.bfloat16], scratch_bytes=planned)


@pytest.mark.parametrize("delta", [True, False])
def test_constant_gate_without_extras(tools: Tools, delta: bool) -> None:
    case = ascend_case("head", delta, beta=False, initial_state=False)
    assert simulated(tools, case).worst < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("strength", ["strong", "reset"])
@pytest.mark.parametrize("gate", ["channel", "token"])
def test_gates_that_forget(tools: Tools, gate: str, strength: str) -> None:
    case = ascend_case(gate, True, (64, 0, 40), strength=strength)
    assert simulated(tools, case).worst < TOLERANCE[torch.bfloat16]


def test_resets_leave_decays_exact(tools: Tools) -> None:
    """Differences of sums over gates that forget everything and gates that forget little, in fp32."""
    case = ascend_case("token", True, (64,), strength="reset", value_heads=1)
    assert simulated(tools, case, torch.float32).worst < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("gate", ["channel", "token"])
def test_dtypes(tools: Tools, gate: str, dtype: torch.dtype) -> None:
    assert simulated(tools, ascend_case(gate, True), dtype).worst < TOLERANCE[dtype]


@pytest.mark.parametrize(("width", "columns"), [(16, 16), (64, 32), (256, 256)])
def test_sizes(tools: Tools, width: int, columns: int) -> None:
    for gate in ("channel", "token"):
        case = ascend_case(gate, True, (70,), key_width=width, value_width=columns, value_heads=1)
        assert simulated(tools, case).worst < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("row", [("channel", True), ("token", True), ("none", False)])
def test_chunks_of_32(tools: Tools, row: tuple[str, bool]) -> None:
    case = ascend_case(*row, (70, 0, 32), dtype=torch.bfloat16, chunk_size=32)
    kernels = as_implementation(EmittedKernels(SimulatedDevice(tools), CORES))
    verify(kernels, case, tolerance=TOLERANCE[torch.bfloat16], scratch_bytes=ascend_scratch(case, CORES))


def test_chunks_of_128(tools: Tools) -> None:
    case = ascend_case("none", False, (200, 0, 128), dtype=torch.bfloat16, chunk_size=128)
    kernels = as_implementation(EmittedKernels(SimulatedDevice(tools), CORES))
    verify(kernels, case, tolerance=TOLERANCE[torch.bfloat16], scratch_bytes=ascend_scratch(case, CORES))


@pytest.mark.parametrize(("gate", "delta", "width", "columns"), [("channel", True, 24, 20), ("token", False, 96, 100)])
def test_widths_that_are_no_power_of_two(tools: Tools, gate: str, delta: bool, width: int, columns: int) -> None:
    case = ascend_case(gate, delta, (70, 0, 3), key_width=width, value_width=columns)
    assert simulated(tools, case).worst < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("options", [{"outputs": "epilogue"}, {"narrow_update": True}])
def test_other_plans(tools: Tools, options: dict[str, Any]) -> None:
    assert simulated(tools, ascend_case("token", True, (130,)), **options).worst < TOLERANCE[torch.bfloat16]


def test_the_order_of_the_cores_changes_nothing(tools: Tools) -> None:
    case = ascend_case("channel", True, (130,), value_heads=1)
    found = {simulated(tools, case, order=order) for order in itertools.permutations(("AIC", "AIV0", "AIV1"))}
    assert len(found) == 1


def planned(case: Case, inputs: Call) -> Verdict:
    """The plan's own numbers: its program on torch with every dot operand rounded and the change of the state fp32."""
    made = plan_of((case.gate, case.delta))
    assert inputs.cu_seqlens is not None
    layout = packed_layout(inputs.cu_seqlens, sum(case.lengths or ()), case.value_heads, 64)
    rounding = {name: torch.bfloat16 for name, dtype in made.rounding.items() if dtype is DType.IO}
    out = Executable(made.program, rounding)(
        dict(zip(RECURRENT, inputs.recurrent, strict=True)),
        layout,
        dims={"C": 64, "K": case.key_width, "V": case.value_width},
        dtype=torch.float32,
        scalars={"scale": case.scale},
    )
    return judge(case, inputs, (out["o"], out["final_state"]))


@pytest.mark.parametrize("strength", ["mild", "strong"])
@pytest.mark.parametrize("gate", ["channel", "token"])
def test_long_sequences_keep_the_plan_s_accuracy(tools: Tools, gate: str, strength: str) -> None:
    case = ascend_case(gate, True, (4096,), value_heads=1, strength=strength)
    inputs = rounded_inputs(case, torch.bfloat16)
    found, expected = simulated(tools, case), planned(case, inputs)
    assert found.output <= 1.2 * expected.output and found.state <= 1.2 * expected.state
    assert found.worst < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "row", [(*row, 64, 128, 1) for row in ROWS] + [("channel", True, 24, 20, 3), ("token", True, 64, 128, 8)]
)
def test_steps(tools: Tools, row: tuple[str, bool, int, int, int]) -> None:
    """A token or a few for each of three sequences, twice, the second time in place."""
    gate, delta, width, columns, tokens = row
    case = Case(gate, delta, tokens, 3, heads=1, value_heads=2, key_width=width, value_width=columns, scale=0.125)
    inputs = rounded_inputs(case, torch.bfloat16)
    call, device = narrowed(inputs, torch.bfloat16), SimulatedDevice(tools)
    found = run_step(call, cores=CORES, launch=device)
    verdict = judge(case, inputs, found)
    assert verdict.output < TOLERANCE[torch.bfloat16] and verdict.state < TOLERANCE[torch.float32]
    assert inputs.initial_state is not None
    state = inputs.initial_state.clone()
    again = run_step(replace(call, initial_state=state), cores=CORES, launch=device, out=state)
    assert again[1] is state and torch.equal(state, found[1]) and torch.equal(again[0], found[0])
