"""The op on an NPU with the emitted kernels simulated, and the operators' schemas against the wheel of torch_npu."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kdacompile.lowering.ascend.npu import EmittedKernels
from kdacompile.lowering.ascend.operators import CHUNKED, RECURRENT
from kdacompile.lowering.verify import relative_error
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.npu import prepare
from tests.ascend.cases import CORES
from tests.ascend.tools import SimulatedDevice, Tools
from tests.ops.cases import Case, make_case, oracle


def simulated(tools: Tools) -> FusedKernels:
    emitted = EmittedKernels(SimulatedDevice(tools), CORES)
    return FusedKernels(lambda call: None if emitted.declines(call) else emitted, prepare)


def sixteen_bit_case(length: int, batch: int = 2) -> Case:
    case = make_case(
        gate="channel", gate_fn="softplus", heads=1, groups=2, key_dim=64, value_dim=64, length=length, batch=batch
    )
    return case.to(torch.bfloat16)


def test_the_op_through_the_emitted_kernels(tools: Tools) -> None:
    """With l2norm, the gate's activation and sigmoid of beta, as a model calls it."""
    case = sixteen_bit_case(length=70, batch=1)
    o, state = simulated(tools).sequence(*case.positional, None, **case.options)
    expected = oracle(case)
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert relative_error(o, expected[0]) < 6e-3 and relative_error(state, expected[1]) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_through_the_emitted_kernel(tools: Tools, dtype: torch.dtype) -> None:
    """In place on an fp32 state; a bf16 one is rounded to on the way back."""
    case = sixteen_bit_case(length=1)
    expected = oracle(case)
    state = case.tensors["initial_state"].to(dtype)
    case = case.with_tensors(initial_state=state)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    o = simulated(tools).inplace_step(*case.positional, **options)
    assert relative_error(o, expected[0]) < 6e-3 and relative_error(state, expected[1]) < 6e-3


@pytest.mark.parametrize("schema", [CHUNKED, RECURRENT])
def test_schemas_are_those_of_the_wheel(environment: Path, schema: str) -> None:
    path = environment / "torch_npu/torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
    found = re.findall(rf"func: ({schema.split('(')[0]}\(.*)", path.read_text())
    assert found == [schema]
