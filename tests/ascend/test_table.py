"""The compiler's figures in the table of plans: stored in lowering/ascend/compiled.json, compared whenever it runs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kdacompile import plans
from kdacompile.lowering.ascend.attention import attention_module
from kdacompile.lowering.ascend.emit import CHUNK, FIRST, adjoint_module, chunk_module, chunk_plan
from kdacompile.lowering.ascend.kernel import Module
from kdacompile.lowering.ascend.launch import column_tile
from kdacompile.lowering.ascend.prepare import Fused
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.plan import Options, Plan
from kdacompile.lowering.plan.whole import kernel_plans
from kdacompile.patterns.recurrence.family import FAMILY, Pattern
from tests.ascend.cases import SIZES
from tests.ascend.layout import within_capacity
from tests.ascend.test_attention import constants as attention_constants
from tests.ascend.tools import ARCH, NEXT_ARCH, Tools
from tests.lowering.test_ascend import FUSED

TARGETS = {"ascend910b": ARCH, "ascend910_95": NEXT_ARCH}
Figures = dict[str, dict[str, int]]  # by kernel


@pytest.mark.parametrize("target", TARGETS)
def test_the_compiler_still_says_what_the_table_says(tools: Tools, target: str) -> None:
    """Kernels at C = 64, K = V = 128, and decoding at 32 heads by 128 tokens, R = 512, D = 64, all in bf16;
    ``KDA_ACCEPT=1`` stores what the compiler says now."""
    found = {row.name: figures(tools, row, target) for row in FAMILY}
    if target == FIRST:
        found |= {plans.compiled_as(row.name, plans.GRADIENTS): adjoint_figures(tools, row) for row in FAMILY}
    found[plans.MLA] = attention_figures(tools, target)
    stored: dict[str, Any] = json.loads(plans.COMPILED.read_text()) if plans.COMPILED.exists() else {}
    if os.environ.get("KDA_ACCEPT") == "1":
        for name, value in found.items():
            stored.setdefault(name, {})[target] = value
        plans.COMPILED.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    assert {name: stored[name][target] for name in found} == found


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "head"])
def test_what_kernels_compute_of_their_inputs_is_in_the_plan(tools: Tools, row: tuple[str, bool], ahead: bool) -> None:
    """Norms, gate functions and sigmoid of beta: they fit UB, and nothing crosses that is not planned."""
    fused = FUSED if row[0] != "none" else Fused(norm=True, sigmoid_beta=True)
    made = chunk_plan(*row, row[1], FIRST, Options(ahead=ahead), norm=True)
    module_figures(tools, chunk_module(*row, row[1], fused=fused, ahead=ahead), made, delta=row[1])


def figures(tools: Tools, row: Pattern, target: str) -> Figures:
    """What the compiler made of every kernel of a pattern, and the buffers a core has that are the kernel's own."""
    module = chunk_module(row.gate, row.delta, beta=row.delta, target=target)
    return module_figures(tools, module, plans.plan(row.name, target, C=CHUNK), delta=row.delta)


def adjoint_figures(tools: Tools, row: Pattern) -> Figures:
    module = adjoint_module(row.gate, row.delta, beta=row.delta)
    return module_figures(tools, module, plans.plan(row.name, FIRST, form=plans.GRADIENTS), delta=row.delta)


def module_figures(tools: Tools, module: Module, made: Plan, *, delta: bool) -> Figures:
    found: Figures = {}
    for kernel in module.kernels:
        constants = {**SIZES, "DELTA": int(delta), "BV": column_tile(128, 128, alone=not kernel.cube)}
        facts = tools.compile(kernel, constants, arch=TARGETS[made.target.name]).facts
        arguments = {argument.name.removesuffix("_ptr") for argument in kernel.arguments}
        own = [scratch.name for scratch in module.scratch if scratch.per_core and scratch.name in arguments]
        found[kernel.name] = compared(made, kernel.name, facts, sum(made.bytes(made.buffer(name)) for name in own))
    return found


def attention_figures(tools: Tools, target: str) -> Figures:
    kernel = attention_module(True).kernel("attend")
    facts = tools.compile(kernel, attention_constants(32, 128), arch=TARGETS[target]).facts
    return {"scan": compared(plans.plan(plans.MLA, target), "scan", facts, 0)}


def compared(made: Plan, name: str, facts: dict[str, Any], own_bytes: int) -> dict[str, int]:
    """The compiler's figures, which are the plan's; where units meet on chip only the kernel's own buffers are in
    memory."""
    part = next(kernel for kernel in kernel_plans(made) if kernel.name == name)
    found = {"workspace_bytes": facts["workspace_bytes"], "own_bytes": own_bytes, "handovers": facts["handovers"]}
    found |= {memory: places["peak"] for memory, places in facts["memories"].items()}
    assert within_capacity(facts, made.target)
    if made.target.meeting == "global":
        found["crossings"] = facts["crossings"] or 0
        assert facts["handovers"] == part.handovers
        assert found["crossings"] == part.crossings
        assert facts["workspace_bytes"] + own_bytes == part.bytes(made)
    else:
        assert facts["workspace_bytes"] == 0
        assert name != "scan" or facts["handovers"] == part.handovers
    return found
