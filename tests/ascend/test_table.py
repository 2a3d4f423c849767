"""The compiler's figures in the table of plans: stored in lowering/ascend/compiled.json, compared whenever it runs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kdacompile import plans
from kdacompile.lowering.ascend.attention import attention_module
from kdacompile.lowering.ascend.emit import CHUNK, chunk_module
from kdacompile.lowering.ascend.launch import column_tile
from kdacompile.lowering.plan import Plan
from kdacompile.patterns.recurrence.family import FAMILY
from kdacompile.patterns.recurrence.family.row import Pattern
from tests.ascend.cases import SIZES
from tests.ascend.test_attention import constants as attention_constants
from tests.ascend.tools import ARCH, NEXT_ARCH, Tools

TARGETS = {"ascend910b": ARCH, "ascend910_95": NEXT_ARCH}


@pytest.mark.parametrize("target", TARGETS)
def test_the_compiler_still_says_what_the_table_says(tools: Tools, target: str) -> None:
    """Scan kernels at C = 64, K = V = 128, and decoding at 32 heads by 128 tokens, R = 512, D = 64, all in bf16;
    ``KDA_ACCEPT=1`` stores what the compiler says now."""
    found = {row.name: figures(tools, row, target) for row in FAMILY}
    found[plans.MLA] = attention_figures(tools, target)
    stored: dict[str, Any] = json.loads(plans.COMPILED.read_text()) if plans.COMPILED.exists() else {}
    if os.environ.get("KDA_ACCEPT") == "1":
        for name, value in found.items():
            stored.setdefault(name, {})[target] = value
        plans.COMPILED.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    assert {name: stored[name][target] for name in found} == found


def figures(tools: Tools, row: Pattern, target: str) -> dict[str, int]:
    """What the compiler made of a pattern's scan, and the buffers a core has that are the kernel's own."""
    module = chunk_module(row.gate, row.delta, beta=row.delta, target=target)
    kernel = module.kernel("scan")
    constants = {**SIZES, "DELTA": int(row.delta), "BV": column_tile(128, 128, alone=not kernel.cube)}
    facts = tools.compile(kernel, constants, arch=TARGETS[target]).facts
    made = plans.plan(row.name, target, C=CHUNK)
    own = {scratch.name for scratch in module.scratch if scratch.per_core}
    own_bytes = sum(made.bytes(b) for b in made.in_memory if b.name in own)
    return compared(made, facts, own_bytes)


def attention_figures(tools: Tools, target: str) -> dict[str, int]:
    kernel = attention_module(True).kernel("attend")
    facts = tools.compile(kernel, attention_constants(32, 128), arch=TARGETS[target]).facts
    return compared(plans.plan(plans.MLA, target), facts, 0)


def compared(made: Plan, facts: dict[str, Any], own_bytes: int) -> dict[str, int]:
    """The compiler's figures, which are the plan's; where units meet on chip only the kernel's own buffers are in
    memory."""
    assert facts["handovers"] == made.handovers
    if made.target.meeting == "global":
        assert facts["workspace_bytes"] + own_bytes == made.apart_bytes
    else:
        assert facts["workspace_bytes"] == 0
    return {"workspace_bytes": facts["workspace_bytes"], "own_bytes": own_bytes, "handovers": facts["handovers"]}
