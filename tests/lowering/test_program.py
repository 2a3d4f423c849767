"""The IR: builder, validator and typed errors, text and generated source (goldens), stages, combine, rounding."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from kdacompile.lowering.builder import Builder
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.lowering.codegen import generate
from kdacompile.lowering.errors import (
    CarryError,
    SingleAssignmentError,
    TileDtypeError,
    TileProgramError,
    TileShapeError,
    UndefinedValueError,
)
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.ir import DType, Op, OpKind, Per, Program, TileType, Value
from kdacompile.lowering.layout import dense_layout
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.partition import sections
from kdacompile.lowering.plan import plan
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.stages import Section
from kdacompile.lowering.text import to_text
from kdacompile.lowering.validate import validate
from tests.lowering.verify import Case, VerificationError, executor, make_inputs, oracle, relative_error, verify

GOLDENS = Path(__file__).parent / "goldens"
CK, CV, KV = TileType("C", "K"), TileType("C", "V"), TileType("K", "V")


def check_golden(name: str, text: str) -> None:
    """Compare with the stored text; ``KDA_ACCEPT=1`` stores it instead."""
    path = GOLDENS / name
    if os.environ.get("KDA_ACCEPT") == "1":
        path.write_text(text)
    assert path.read_text() == text, f"{name} changed; KDA_ACCEPT=1 accepts"


@pytest.mark.parametrize("form", ["chunk", "token"])
@pytest.mark.parametrize(("row", "name"), ROWS.items())
def test_text_golden(row: tuple[str, bool], name: str, form: str) -> None:
    check_golden(f"{name}.{form}.txt", to_text(linear_attention_program(*row, form=form)))


def test_factor_golden() -> None:
    check_golden("kda.factor.txt", to_text(linear_attention_program("channel", True, gate_form="factor")))


@pytest.mark.parametrize("row", [("channel", True), ("token", False)])
def test_source_golden(row: tuple[str, bool]) -> None:
    check_golden(f"{ROWS[row]}.py.txt", generate(linear_attention_program(*row)))


def test_sections_leave_only_what_the_carry_waits_for() -> None:
    program = linear_attention_program("channel", True)
    scan = [op.result.name for op, section in sections(program).items() if section is Section.SCAN]
    assert scan == ["S", "V_new", "S_decayed", "S_next"]
    scan = [
        op.result.name for op, s in sections(linear_attention_program("channel", False)).items() if s is Section.SCAN
    ]
    assert scan == ["S", "S_decayed", "S_next"]


def test_stage_costs() -> None:
    prologue, scan, epilogue = plan(linear_attention_program("none", True), "cpu").stages
    C, K, V = (sympy.Symbol(name, positive=True, integer=True) for name in "CKV")
    assert sympy.expand(scan.flops - 4 * C * K * V) == 0
    assert sympy.expand(epilogue.flops - (2 * C * K * V + 2 * C * C * V)) == 0
    assert [buffer.name for buffer in epilogue.reads] == ["A_qk", "S", "V_new", "q_scaled"]
    assert scan.domain == ("lane",) and prologue.domain == ("lane", "step")
    assert "o" in epilogue.rounding


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_combine_folds_to_the_final_state(gate: str, delta: bool) -> None:
    """Summaries of all chunks, merged pairwise as a tree, applied to the initial state, give the scan's result."""
    case = Case(gate, delta, 64, dtype=torch.float64)
    inputs = make_inputs(case)
    assert inputs.initial_state is not None
    program = linear_attention_program(gate, delta)
    assert program.carry is not None and program.carry.combine is not None
    combine = program.carry.combine
    layout = dense_layout(2, 64, 2, 16)
    g = inputs.g.expand(2, 64, 2) if inputs.g is not None and gate == "head" else inputs.g
    tensors = {"k": inputs.k, "v": inputs.v, "g": g, "beta": inputs.beta}
    run: dict[str, Any] = {"dims": {"C": 16, "K": 32, "V": 32}, "dtype": torch.float64}
    parts = Executable(combine.summary)(tensors, layout, **run)
    merge = Executable(combine.merge)
    steps = [{name: x[:, n : n + 1] for name, x in parts.items()} for n in range(4)]
    one = dense_layout(2, 16, 2, 16)

    def join(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        return merge({f"{n}{i}": x[n] for i, x in enumerate((first, second)) for n in x}, one, **run)

    whole = join(join(steps[0], steps[1]), join(steps[2], steps[3]))
    start = dict.fromkeys(whole, whole.get("A", whole["B"])) | {"B": inputs.initial_state.unsqueeze(1)}
    final = join(start, whole)["B"].squeeze(1)
    assert relative_error(final, oracle(case, inputs)[1]) < 1e-12


def test_rounding_of_planned_buffers() -> None:
    """Rounding the dot operands to bf16 costs bf16 accuracy and not more; rounding nothing changes no bit."""
    case = Case("channel", True, 128)
    inputs = make_inputs(case)
    program = linear_attention_program("channel", True)
    tensors = dict(zip(RECURRENT, inputs.recurrent, strict=True))
    run: dict[str, Any] = {
        "dims": {"C": 64, "K": 32, "V": 32},
        "dtype": torch.float32,
        "scalars": {"scale": case.scale},
    }
    layout = dense_layout(2, 128, 2, 64)
    names = ("W", "U", "V_new", "A_qk", "Q_gated", "K_decayed")
    rounded = Executable(program, dict.fromkeys(names, torch.bfloat16))(tensors, layout, **run)
    assert 1e-4 < relative_error(rounded["o"], oracle(case, inputs)[0]) < 1e-2
    plain = Executable(program)(tensors, layout, **run)
    none = Executable(program, {})(tensors, layout, **run)
    assert torch.equal(plain["o"], none["o"])
    with pytest.raises(TileProgramError):
        Executable(program, {"nonesuch": torch.bfloat16})


def test_verify_finds_faults() -> None:
    case = Case("token", True, 40)

    def wrong(call: Call, scratch: Scratch) -> tuple[Tensor, Tensor]:
        o, state = executor(call, scratch)
        return o, state * 1.001

    def unwritten(call: Call, scratch: Scratch) -> tuple[Tensor, Tensor]:
        o, state = executor(call, scratch)
        return o + scratch.empty(o.shape, o.dtype, o.device) * 0, state

    for implementation in (wrong, unwritten):
        with pytest.raises(VerificationError):
            verify(implementation, case, tolerance=1e-5)
    verify(executor, case, tolerance=1e-5, scratch_bytes=0)
    with pytest.raises(VerificationError):
        verify(executor, case, tolerance=1e-5, scratch_bytes=4)


def test_generic_cumsum_and_gram_without_a_group() -> None:
    """A cumulative sum that is read as it is cannot come from the decay tree; it takes the plain op."""
    b = Builder("plain", axis="")
    x, g = b.input("x", CK), b.input("g", CK)
    b.store("sums", b.add(b.cumsum(g), b.cumsum(g, reverse=True)))
    b.store("gram", b.gated_gram(x, x, g, strict=False), per=Per.STEP)
    x, g = torch.randn(1, 8, 1, 4), -torch.rand(1, 8, 1, 4)
    run: dict[str, Any] = {"dims": {"C": 8, "K": 4}, "dtype": torch.float32}
    out = Executable(b.build())({"x": x, "g": g}, dense_layout(1, 8, 1, 8), **run)
    torch.testing.assert_close(out["sums"], g.sum(1, keepdim=True).expand_as(g))
    total = g.cumsum(1)[0, :, 0]
    decay = (total[:, None] - total[None]).exp()
    expected = torch.einsum("id,jd,ijd->ij", x[0, :, 0], x[0, :, 0], decay).tril()
    torch.testing.assert_close(out["gram"][0, 0, 0], expected)


def test_builder_refuses_what_does_not_fit() -> None:
    b = Builder("bad", axis="")
    x, y = b.input("x", CK), b.input("y", CV)
    with pytest.raises(TileShapeError):
        b.add(x, y)
    with pytest.raises(TileShapeError):
        b.dot(x, y)
    with pytest.raises(TileShapeError):
        b.unit_lower_inverse(x)
    with pytest.raises(TileShapeError):
        b.gated_gram(x, x, y, strict=True)
    with pytest.raises(TileShapeError):
        b.dot(x, y, x, trans_a=True)
    with pytest.raises(TileDtypeError):
        b.mul(x, b.cast(x, DType.IO))
    with pytest.raises(TileProgramError):
        b.exp(x, name="not a name")


def test_builder_refuses_a_bad_carry() -> None:
    b = Builder("bad")
    state = b.carry("S", KV, "init", "final")
    with pytest.raises(CarryError):
        b.build()
    with pytest.raises(CarryError):
        b.carry("S2", KV, "init2", "final2")
    b.step(b.transpose(state))
    with pytest.raises(CarryError):
        b.build()
    with pytest.raises(CarryError):
        Builder("bad").step(state)


def test_combine_has_to_fit_the_carry() -> None:
    program = linear_attention_program("channel", True)
    other = linear_attention_program("none", False)
    assert program.carry is not None and program.carry.combine is not None
    assert other.carry is not None and other.carry.combine is not None
    mixed = replace(program.carry.combine, merge=other.carry.combine.merge)
    with pytest.raises(CarryError):
        validate(replace(program, carry=replace(program.carry, combine=mixed)))


def test_validator_refuses_broken_programs() -> None:
    program = linear_attention_program("token", True)
    exp = next(op for op in program.ops if op.kind is OpKind.EXP)
    at = program.ops.index(exp)

    def broken(*ops: Op) -> Program:
        return replace(program, ops=ops)

    validate(program)
    with pytest.raises(SingleAssignmentError):
        validate(broken(*program.ops[: at + 1], exp, *program.ops[at + 1 :]))
    with pytest.raises(UndefinedValueError):
        validate(broken(*program.ops[:at], *program.ops[at + 1 :]))
    with pytest.raises(UndefinedValueError):
        validate(broken(*reversed(program.ops)))
    with pytest.raises(TileProgramError):
        validate(broken(*(op for op in program.ops if op.kind is not OpKind.STORE)))
    store = next(op for op in program.ops if op.kind is OpKind.STORE)
    with pytest.raises(SingleAssignmentError):
        validate(broken(*program.ops, store))
    lied = Op(OpKind.EYE, (), Value("lied", CK), (("dim", "K"),))
    with pytest.raises(TileShapeError):
        validate(broken(lied, *program.ops))
    with pytest.raises(TileProgramError):
        validate(broken(*program.ops, Op(OpKind.STORE, store.inputs, None, (("port", "nowhere"),))))
    with pytest.raises(SingleAssignmentError):
        validate(replace(program, inputs=(*program.inputs, program.inputs[0])))
