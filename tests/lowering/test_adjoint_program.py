"""The adjoint as a tile program, on the torch executor: gradients of the fp64 recurrence, and its text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.builder import Builder
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.lowering.errors import CarryError
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.ir import TileType
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.partition import sections
from kdacompile.lowering.run import layout_of
from kdacompile.lowering.stages import Section
from kdacompile.lowering.text import to_text
from tests.lowering.test_program import check_golden
from tests.lowering.verify import Case, make_inputs, oracle, relative_error

CHUNK = 16


def wanted(case: Case, inputs: Call, grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """By autograd of the token recurrence."""
    leaves = {n: x.clone().requires_grad_() for n in RECURRENT if (x := getattr(inputs, n)) is not None}
    loss = sum((x * w).sum() for x, w in zip(oracle(case, replace(inputs, **leaves)), grads, strict=True))
    assert isinstance(loss, Tensor)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check(case: Case) -> None:
    inputs = make_inputs(case)
    row = (case.gate, case.delta)
    if inputs.g is not None and case.gate == "head":  # the program has one gate a token, and the caller sums
        inputs = replace(inputs, g=inputs.g.expand(*inputs.v.shape[:2], -1).contiguous(), gate="token")
        case = replace(case, gate="token")
    random = torch.Generator().manual_seed(1)
    grads = tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape, _ in inputs.results)
    tensors = dict(zip(RECURRENT, inputs.recurrent, strict=True))
    found = Executable(adjoint_program(*row, beta=inputs.beta is not None))(
        {**tensors, "grad_o": grads[0], "grad_final_state": grads[1]},
        layout_of(inputs, CHUNK),
        dims={"C": CHUNK, "K": case.key_width, "V": case.value_width},
        dtype=torch.float64,
        scalars={"scale": case.scale},
    )
    for name, expected in wanted(case, inputs, (grads[0], grads[1])).items():
        assert relative_error(found[f"grad_{name}"].reshape(expected.shape), expected) < 2e-15, name


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("strength", ["mild", "strong"])
def test_gradients_of_the_recurrence(row: tuple[str, bool], strength: str) -> None:
    check(Case(*row, 70, dtype=torch.float64, strength=strength))


@pytest.mark.parametrize("row", ROWS)
def test_packed_sequences(row: tuple[str, bool]) -> None:
    check(Case(*row, lengths=(37, 0, 50), dtype=torch.float64))


def test_without_beta_and_without_a_state() -> None:
    check(Case("token", True, 20, dtype=torch.float64, beta=False, initial_state=False))


@pytest.mark.parametrize("row", [("channel", True), ("token", False)])
def test_text(row: tuple[str, bool]) -> None:
    check_golden(f"{ROWS[row]}.adjoint.txt", to_text(adjoint_program(*row)))


def test_the_scans_hold_what_their_carries_wait_for_and_nothing_else() -> None:
    placed = sections(adjoint_program("token", True))
    names = {
        section: {op.result.name for op, s in placed.items() if s is section and op.output is not None}
        for section in (Section.SCAN, Section.REVERSE)
    }
    assert names[Section.SCAN] == {"S", "V_new", "S_change", "S_decayed", "S_next"}
    assert names[Section.REVERSE] == {"GS", "GV_new", "GS_change_1", "GS_decayed", "GS_next"}


def test_a_carry_must_not_read_the_other() -> None:
    b = Builder("crossed")
    type = TileType("K", "V")
    state = b.carry("S", type, "initial_state", "final_state")
    behind = b.carry("GS", type, "grad_final_state", "grad_initial_state", reverse=True)
    b.step(b.add(state, state))
    b.step(b.add(behind, state), reverse=True)
    with pytest.raises(CarryError, match="walks the other way"):
        b.build()
