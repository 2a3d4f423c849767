"""Plans of the adjoint for Ascend: both scans with the fewest hand-overs, and the numbers they would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.calls import RECURRENT
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.plan import Plan, plan
from kdacompile.lowering.plan.whole import kernel_plans
from kdacompile.lowering.run import layout_of
from kdacompile.lowering.stages import SCANS, Section
from kdacompile.lowering.target import Unit
from tests.lowering.test_adjoint_program import wanted
from tests.lowering.test_program import check_golden
from tests.lowering.verify import Case, make_inputs, relative_error


def plan_of(row: tuple[str, bool], *, beta: bool = True) -> Plan:
    return plan(adjoint_program(*row, beta=beta), "ascend910b", K=64, V=64, C=64)


@pytest.mark.parametrize("row", ROWS)
def test_both_scans_have_the_fewest_hand_overs(row: tuple[str, bool]) -> None:
    """With the delta term two each, as the forward's scan; without it both are element-wise."""
    made = plan_of(row)
    assert made.handovers == made.lower_bound == (4 if row[1] else 0)
    assert made.meeting_bytes == made.floor_bytes
    expected = {Unit.CUBE, Unit.VEC} if row[1] else {Unit.VEC}
    assert all({stage.unit for stage in made.section(section)} == expected for section in SCANS)


@pytest.mark.parametrize("row", [("token", False), ("token", True), ("channel", True)])
def test_text(row: tuple[str, bool]) -> None:
    check_golden(f"{ROWS[row]}_adjoint.ascend910b.plan.txt", str(plan_of(row)))


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_both_scans_are_drawn(gate: str) -> None:
    page = plan_of((gate, True)).to_html()
    assert page.count("the scan of one core group") == page.count("the reverse of one core group") == 1


@pytest.mark.parametrize("delta", [True, False])
def test_what_needs_gates_per_channel_is_made_by_two_kernels(delta: bool) -> None:
    """In front of all products and behind them; Cube has no part in them, and sections between do not read the gate."""
    made = plan_of(("channel", delta))
    first, *others, last = kernel_plans(made)
    assert (first.name, last.name) == ("sub_chunks", "sums") and first.handovers == last.handovers == 0
    for kernel in others:
        tasks = [task for stage in kernel.stages for task in stage.tasks if task.part != "triangle"]
        assert not any(value.name.startswith("g") and value.type.cols == "K" for t in tasks for value in t.inputs)


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "head"])
def test_numbers_of_the_plan(row: tuple[str, bool]) -> None:
    """On torch, with every tile in the dtype it is planned in, but for the pairs' decayed weights, which the executor
    keeps in fp32."""
    made = plan_of(row)
    case = Case(*row, 150, 1, heads=1, value_heads=1, key_width=64, value_width=64, dtype=torch.float64)
    inputs = make_inputs(case)
    rounded = {name: getattr(inputs, name).bfloat16().double() for name in ("q", "k", "v")}
    inputs = replace(inputs, **rounded)
    random = torch.Generator().manual_seed(1)
    grad_o, grad_state = (torch.randn(shape, generator=random, dtype=torch.float64) for shape, _ in inputs.results)
    grad_o = grad_o.bfloat16().double()
    found = Executable(made.program, dict.fromkeys(made.rounding, torch.bfloat16))(
        {**dict(zip(RECURRENT, inputs.recurrent, strict=True)), "grad_o": grad_o, "grad_final_state": grad_state},
        layout_of(inputs, 64),
        dims={"C": 64, "K": 64, "V": 64},
        dtype=torch.float32,
        scalars={"scale": case.scale},
    )
    assert made.section(Section.REVERSE) and made.rounding
    errors = {
        name: relative_error(found[f"grad_{name}"].reshape(expected.shape), expected)
        for name, expected in wanted(case, inputs, (grad_o, grad_state)).items()
    }
    assert max(errors.values()) < 6e-3, errors
    assert errors["q"] > 1e-4  # tiles were rounded
