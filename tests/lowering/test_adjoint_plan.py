"""Plans of the adjoint for Ascend: both scans with the fewest hand-overs, and the numbers they would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.calls import RECURRENT
from kdacompile.lowering.errors import TileProgramError
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.plan import Plan, plan
from kdacompile.lowering.run import layout_of
from kdacompile.lowering.stages import SCANS, Section
from kdacompile.lowering.target import Unit
from tests.lowering.test_adjoint_program import wanted
from tests.lowering.test_program import check_golden
from tests.lowering.verify import Case, make_inputs, relative_error

PLANNED = [row for row in ROWS if row[0] != "channel"]


def plan_of(row: tuple[str, bool], *, beta: bool = True) -> Plan:
    return plan(adjoint_program(*row, beta=beta), "ascend910b", K=64, V=64, C=64)


@pytest.mark.parametrize("row", PLANNED)
def test_both_scans_have_the_fewest_hand_overs(row: tuple[str, bool]) -> None:
    """With the delta term two each, as the forward's scan; without it both are element-wise."""
    made = plan_of(row)
    assert made.handovers == made.lower_bound == (4 if row[1] else 0)
    assert made.meeting_bytes == made.floor_bytes
    expected = {Unit.CUBE, Unit.VEC} if row[1] else {Unit.VEC}
    assert all({stage.unit for stage in made.section(section)} == expected for section in SCANS)


@pytest.mark.parametrize("row", [("token", False), ("token", True)])
def test_text(row: tuple[str, bool]) -> None:
    check_golden(f"{ROWS[row]}_adjoint.ascend910b.plan.txt", str(plan_of(row)))


def test_both_scans_are_drawn() -> None:
    page = plan_of(("token", True)).to_html()
    assert page.count("the scan of one core group") == page.count("the reverse of one core group") == 1


@pytest.mark.parametrize("delta", [True, False])
def test_a_gate_per_channel_is_declined(delta: bool) -> None:
    with pytest.raises(TileProgramError, match="gate per channel"):
        plan_of(("channel", delta))


@pytest.mark.parametrize("row", [row for row in PLANNED if row[0] != "head"])
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
