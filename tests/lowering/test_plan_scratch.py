"""Kernels follow their plans: what lies between them is what the plan says, by name, shape, dtype and bytes."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from kdacompile.lowering.ascend.npu import EmittedKernels
from kdacompile.lowering.codegen import generate
from kdacompile.lowering.hopper import Schedule
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.plan import Options, plan
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton.placement import place
from tests.lowering.planned import ascend_scratch
from tests.lowering.verify import Case, as_implementation, make_inputs


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("row", ROWS)
def test_emitted_triton_leaves_what_the_plan_says(row: tuple[str, bool], beta: bool) -> None:
    """All but keys that no gate scales: normalised, they are no longer the caller's."""
    program = linear_attention_program(*row, beta=beta)
    planned = {(b.name.removesuffix("_io"), b.shape, b.dtype.value) for b in plan(program, "cuda_sm90").tensors}
    placed = {(b.name, b.value.type.shape, "acc" if b.kept == "fp32" else "io") for b in place(program).crossing}
    assert placed - planned == ({("k_acc", ("C", "K"), "io")} if row[0] == "none" else set())
    assert planned <= placed


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("row", ROWS)
def test_the_executor_keeps_what_the_plan_says(row: tuple[str, bool], beta: bool) -> None:
    """Between the sections of the source that torch runs; keys that no gate scales are loaded once for both."""
    program = linear_attention_program(*row, beta=beta)
    planned = {b.name for b in plan(program, "cpu").tensors}
    kept = kept_across_sections(generate(program))
    assert kept == planned | ({"k_acc"} if row == ("none", True) else set())


def kept_across_sections(source: str) -> set[str]:
    """Names that one section of the source assigns and a later one reads: the scan begins with its first split and ends
    with the join of its carries."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    first = next(i for i, line in enumerate(function.body) if "rt.split(" in ast.unparse(line))
    last = next(i for i, line in enumerate(function.body) if "rt.carry_join(" in ast.unparse(line))
    prologue, scan, epilogue = function.body[:first], function.body[first : last + 1], function.body[last + 1 :]
    read = _names(epilogue, ast.Load)
    return _names(prologue, ast.Store) & (_names(scan, ast.Load) | read) | _names(scan, ast.Store) & read


def _names(lines: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    names = (node for line in lines for node in ast.walk(line) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, context)}


@pytest.mark.parametrize(("gate", "extra"), [("channel", 0), ("token", 127 * 4)])
def test_hopper_kernels_leave_what_the_plan_says(gate: str, extra: int) -> None:
    """They form U in the scan, from a smaller tile. A gate per token is kept as a row, like one per channel."""
    made = plan(linear_attention_program(gate, True), "cuda_sm90", Options(values="scan"), C=64, K=128, V=128)
    names = {"decay", "A_qk_io", "M_1_io", "W_io", "K_decayed_io", "Q_gated_io"}
    assert {b.name for b in made.tensors} == names
    schedule = Schedule(
        chunks=10, run=5, columns=128, segments=1, padded_values=128, tiles_per_chunk=3, sequence_heads=3
    )  # fmt: skip
    assert schedule.scratch_bytes == 3 * 5 * (made.tensor_bytes + extra)


@pytest.mark.parametrize("sizes", [{"length": 130}, {"lengths": (70, 0, 1), "key_width": 64, "value_width": 256}])
@pytest.mark.parametrize("target", ["ascend910b", "ascend910_95"])
@pytest.mark.parametrize("row", ROWS)
def test_emitted_ascend_kernels_allocate_what_the_plan_says(
    row: tuple[str, bool], target: str, sizes: dict[str, Any]
) -> None:
    defaults: dict[str, Any] = {"heads": 1, "key_width": 128, "value_width": 128, "dtype": torch.bfloat16}
    case = Case(*row, **{**defaults, **sizes})
    inputs, scratch = make_inputs(case), Scratch()
    as_implementation(EmittedKernels(lambda launch: None, 20, target))(inputs, scratch)
    assert scratch.allocated_bytes == ascend_scratch(case, 20, target) > 0


def test_values_in_the_scan_never_cost_bytes() -> None:
    """What is as wide as V is never smaller than what it is made from."""
    for row in ROWS:
        program = linear_attention_program(*row)
        bytes = [plan(program, "cuda_sm90", Options(values=v)).tensor_bytes for v in ("prologue", "uninverted", "scan")]
        assert bytes == sorted(bytes, reverse=True)
