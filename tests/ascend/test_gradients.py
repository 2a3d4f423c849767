"""The emitted kernels of the adjoint, compiled and executed: against the fp64 recurrence, with the race detector on.

What the compiler made of them is compared with their plans in test_table.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.ascend.emit import CHUNK, adjoint_module
from kdacompile.lowering.ascend.gradients import run_gradients
from kdacompile.lowering.calls import RECURRENT
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.plan import plan
from kdacompile.lowering.scratch import Scratch
from tests.ascend.cases import CORES, ascend_case, narrowed, rounded_inputs
from tests.ascend.damage import NOTHING, RACE, damage_is_caught
from tests.ascend.test_races import changed, synchronisation
from tests.ascend.tools import SimulatedDevice, ToolError, Tools
from tests.lowering.test_adjoint_program import wanted
from tests.lowering.verify import Case, relative_error

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}


def worst(
    device: SimulatedDevice,
    case: Case,
    dtype: torch.dtype = torch.bfloat16,
    cores: int = CORES,
    scratch: Scratch | None = None,
) -> float:
    """Relative RMS error of the worst gradient, of inputs that are rounded to ``dtype``; NaN if one has any. Buffers
    between kernels begin as NaN."""
    inputs = rounded_inputs(case, dtype)
    random = torch.Generator().manual_seed(1)
    shapes = (shape for shape, _ in inputs.results)
    grad_o, grad_state = (torch.randn(shape, generator=random) for shape in shapes)
    grad_o = grad_o.to(dtype).float()
    found = run_gradients(
        narrowed(inputs, dtype),
        grad_o,
        grad_state if case.initial_state else None,
        cores=cores,
        launch=device,
        scratch=scratch or Scratch(poison=True),
    )
    exact = {name: x.double() for name, x in zip(RECURRENT, inputs.recurrent, strict=True) if x is not None}
    expected = wanted(case, replace(inputs, **exact), (grad_o.double(), case.initial_state * grad_state.double()))
    assert found.keys() == expected.keys()
    errors = [relative_error(found[name].double(), x) for name, x in expected.items()]
    return max(errors) if all(error >= 0.0 for error in errors) else float("nan")


@pytest.mark.parametrize("row", ROWS)
def test_family(tools: Tools, row: tuple[str, bool]) -> None:
    """Grouped heads, packed sequences, one of them empty, K = V = 128, and between the kernels the plan's bytes."""
    scratch = Scratch(poison=True)
    case = ascend_case(*row, (70, 0, 3), heads=2, value_heads=4)
    assert worst(SimulatedDevice(tools), case, scratch=scratch) < TOLERANCE[torch.bfloat16]
    made = plan(adjoint_program(*row), "ascend910b", C=CHUNK)
    numbers = sum((128 - 1) * 4 for buffer in made.tensors if buffer.shape == (1, 1))  # kept as rows of K
    own = sum(made.bytes(made.buffer(x.name)) for x in adjoint_module(*row).scratch if x.per_core)
    if row[0] == "channel":  # the Gram matrices' diagonals, inverted too; or what crosses inside the prologue
        numbers += (1 + 2 * row[1]) * CHUNK * CHUNK * 4 + (0 if row[1] else made.bytes(made.buffer("Q_gated_io")))
    chunks = 73 // CHUNK + 3  # the most there can be: no length is read on the host
    assert scratch.allocated_bytes == chunks * 4 * (made.tensor_bytes + numbers) + CORES * own


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "head" and row != ("channel", True)])
def test_in_fp32(tools: Tools, row: tuple[str, bool]) -> None:
    """K = V = 128, the widest there are: in fp32 too everything has room."""
    assert worst(SimulatedDevice(tools), ascend_case(*row, (70, 0, 3)), torch.float32) < TOLERANCE[torch.float32]


def test_kda_in_fp32_is_declined(tools: Tools) -> None:
    """Since what the compiler makes of it waits for a flag that nobody sets (ascendnpu-ir 1.2.0): it would hang."""
    with pytest.raises(ToolError, match="FlagError: AIC: wait without a set"):
        worst(SimulatedDevice(tools), ascend_case("channel", True, (70, 0, 3)), torch.float32)


@pytest.mark.parametrize("row", [("token", False), ("none", True)])
def test_without_beta_and_without_states(tools: Tools, row: tuple[str, bool]) -> None:
    case = ascend_case(*row, (70,), beta=False, initial_state=False, value_heads=1)
    assert worst(SimulatedDevice(tools), case) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("row", [("token", True), ("token", False), ("channel", True), ("channel", False)])
def test_gates_that_forget(tools: Tools, row: tuple[str, bool]) -> None:
    case = ascend_case(*row, (64, 0, 40), strength="strong", value_heads=1)
    assert worst(SimulatedDevice(tools), case) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_widths_that_are_no_power_of_two(tools: Tools, gate: str) -> None:
    case = ascend_case(gate, True, (70, 3), key_width=24, value_width=100)
    assert worst(SimulatedDevice(tools), case, torch.float16) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("gate", "cores"), [("token", 1), ("token", 20), ("channel", 20)])
def test_any_order_of_blocks_and_cores(tools: Tools, gate: str, cores: int) -> None:
    case = ascend_case(gate, True, (70, 0, 40), key_width=32, value_width=32)
    assert worst(SimulatedDevice(tools, seed=cores), case, cores=cores) < TOLERANCE[torch.bfloat16]


# ---- what must be seen

CASE = ascend_case("token", True, (70,), key_width=32, value_width=32)
CHANNELS = replace(CASE, gate="channel")


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [
        ("reverse", "first + last - n", "first + n"),
        ("epilogue", "head // (HV // H)", "head % H"),
        ("sums", "rest_sum(rows_sum, C)", "rows_sum"),
    ],
)
def test_a_wrong_text(tools: Tools, kernel: str, right: str, wrong: str) -> None:
    """By its numbers."""
    change: Callable[[str], str] = lambda text: text.replace(right, wrong)  # noqa: E731
    case = replace(CASE, heads=2, value_heads=4)
    assert worst(changed(tools, **{kernel: change}), case) > 0.05


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [
        ("sub_chunks", "start, head, length, 0, low, n,", "start, head, length, 0, 0, n,"),  # as if halves began at 0
        ("epilogue", "LEVELS, True)", "LEVELS, False)"),
        ("sums", "whole += tl.sum(gates, 0)", "whole += 0.0"),  # nothing from later sub-chunks
        ("sums", "head // (HV // H)", "head % H"),
    ],
)
def test_a_wrong_text_with_gates_per_channel(tools: Tools, kernel: str, right: str, wrong: str) -> None:
    """By its numbers."""
    change: Callable[[str], str] = lambda text: text.replace(right, wrong)  # noqa: E731
    assert worst(changed(tools, **{kernel: change}), replace(CHANNELS, heads=2, value_heads=4)) > 0.05


@pytest.mark.parametrize(
    ("case", "kernel"),
    [(CASE, "reverse"), (CASE, "epilogue"), (CHANNELS, "epilogue")],
    ids=lambda x: getattr(x, "gate", x),
)
@pytest.mark.parametrize("flag", [0, 1])
def test_a_synchronisation_dropped_on_both_sides(tools: Tools, case: Case, kernel: str, flag: int) -> None:
    def is_right(device: SimulatedDevice) -> bool:
        return worst(device, case) < TOLERANCE[torch.bfloat16]

    edit = (synchronisation(flag), rf"{NOTHING}\1", -1)
    assert damage_is_caught(tools, kernel, [edit], is_right, RACE)
