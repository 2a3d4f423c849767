"""Every emitted kernel through the real compiler, and what it made of them against the plan."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.ascend.emit import CHUNK, adjoint_module, chunk_module
from kdacompile.lowering.ascend.kernel import Kernel, Module
from kdacompile.lowering.ascend.launch import column_tile
from kdacompile.lowering.ascend.npu import MOST_STEP
from kdacompile.lowering.ascend.step import PLAIN, step_module
from kdacompile.lowering.errors import CapacityError
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.plan import Options, Plan, plan
from kdacompile.lowering.plan.cost import sharing
from kdacompile.lowering.plan.whole import kernel_plans
from kdacompile.lowering.stages import Section
from kdacompile.lowering.target import ASCEND910_95, ASCEND910B, ASCEND910B1, Target, Unit
from tests.ascend.cases import SIZES
from tests.ascend.layout import check_cube, check_on_chip, check_vec, within_capacity
from tests.ascend.tools import ARCH, NEXT_ARCH, ROOT, ToolError, Tools
from tests.lowering.test_ascend import FUSED

# without the head gate, whose kernels are those of the token gate letter by letter (test_same_kernels)
FAMILY = [row for row in ROWS if row[0] != "head"]
MAY_BE_AHEAD = [("channel", True), ("token", True)]


def constants(delta: bool, **sizes: int) -> dict[str, int]:
    return {**SIZES, "DELTA": int(delta), **sizes}


def plan_of(row: tuple[str, bool], io: str = "bf16", target: Target = ASCEND910B, **options: Any) -> Plan:
    sizes = {name: options.pop(name) for name in ("K", "V", "BV") if name in options}
    program = linear_attention_program(*row)
    return plan(program, target, Options(**options), io=io, C=CHUNK, **sizes)


def workspace(made: Plan, module: Module) -> int:
    """What the scan needs of the compiler's workspace: what crosses units, and what Cube hands to itself, unless it has
    a buffer of its own; each at an address of its own, since the compiler shares none safely (test_mutations). Whole
    kernels are compared in test_table."""
    own = {buffer.name for buffer in module.scratch}
    scan = {stage.name for stage in made.section(Section.SCAN)}
    passing = [b for b in made.buffers if b.lifetime is not None and b.producer in scan]
    return sum(made.bytes(b) for b in passing if b.name not in own)


@pytest.mark.parametrize(
    ("arch", "target"), [(ARCH, ASCEND910B), ("Ascend910B1", ASCEND910B1), (NEXT_ARCH, ASCEND910_95)]
)
def test_targets_are_what_the_compiler_takes_them_for(tools: Tools, arch: str, target: Target) -> None:
    """Sizes of the memories and the number of core groups."""
    (kernel,) = step_module("token", True).kernels
    device = tools.compile(kernel, constants(True, BV=column_tile(128, 128, alone=True)), arch=arch).device
    assert device == {**{name: figure.value for name, figure in target.memories.items()}, "groups": target.groups.value}


@pytest.mark.parametrize(("row", "ahead"), [*((row, True) for row in FAMILY), *((row, False) for row in MAY_BE_AHEAD)])
def test_family_compiles_as_planned(tools: Tools, row: tuple[str, bool], ahead: bool) -> None:
    """``ahead``: with the products of the prologue in the scan, where the plan has a choice."""
    module = chunk_module(*row, ahead=ahead)
    made = plan_of(row, ahead=ahead)
    for kernel in module.kernels:
        tile = column_tile(128, 128, alone=not kernel.cube)
        facts = tools.compile(kernel, constants(row[1], BV=tile)).facts
        if kernel.name == "sub_chunks":  # a part of the prologue, by R tokens at a time
            assert within_capacity(facts)
            continue
        check_on_chip(made, kernel.name, facts)
        check_cube(made, kernel.name, facts["memories"])
        if kernel.name == "scan":
            assert facts["workspace_bytes"] == workspace(made, module)
            assert facts["handovers"] == made.handovers
            if made.handovers:
                assert facts["cube"]["block_sets"] == facts["vec"]["block_waits"] <= 3
                assert facts["vec"]["block_sets"] == facts["cube"]["block_waits"] <= 3
                assert facts["crossings"] == made.crossings
            check_vec(made, facts["memories"])


@pytest.mark.parametrize("row", [row for row in FAMILY if row[1]])
def test_the_next_state_does_not_wait_for_the_output(tools: Tools, row: tuple[str, bool]) -> None:
    """In the HIVM: dS is stored and Vec is told before the last product, which is O's, and before O is stored."""
    cube = cube_of_scan(tools, chunk_module(*row).kernel("scan"), row[1])
    (told,) = (found.start() for found in re.finditer(r"sync_block_set\[<CUBE>, <PIPE_FIX>", cube))
    for name, count in (("mma_tile", 5), ("fixpipe_nz2nd", 3)):
        after = [x.start() > told for x in re.finditer(rf"call @{name}", cube)]
        assert after[-count:] == [False] * (count - 1) + [True] and not any(after[:-count])


def cube_of_scan(tools: Tools, kernel: Kernel, delta: bool) -> str:
    text = (Path(tools.compile(kernel, constants(delta)).folder) / "kernel.mlir").read_text()
    return re.split(r"\n  func\.func", text[text.index("func.func @scan_mix_aic(") :])[0]


@pytest.mark.parametrize("gate", ["channel", "token"])
@pytest.mark.parametrize("beta", [True, False])
def test_the_prologue_s_products_do_not_wait_for_the_state(tools: Tools, gate: str, beta: bool) -> None:
    """In the HIVM: of the products of a turn of Cube's loop only the scan's last four, that is all but U, come behind
    the one wait for Vec's S; the rest Cube does while Vec is at the state, and nothing of it goes through Vec."""
    module = chunk_module(gate, True, beta)
    assert [kernel.name for kernel in module.kernels] == ["sub_chunks", "scan"]
    assert tools.compile(module.kernel("sub_chunks"), constants(True, BV=64)).facts["cube"] is None
    cube = cube_of_scan(tools, module.kernel("scan"), True)
    (wait,) = (found.start() for found in re.finditer(r"sync_block_wait\[<CUBE>, <PIPE_MTE3>", cube))
    products = [x.start() > wait for x in re.finditer("call @mma_tile", cube)]
    grams, joins = 2 * (2 + 1), 2 * 4 + 2  # of pairs of blocks: three of Gram matrices; two joined further, and one
    assert products == [False] * (grams + joins + 2) + [True] * 4


def tile_rows(tools: Tools, kernel: Kernel, sizes: dict[str, int]) -> set[int]:
    """Rows of the fp32 tiles that a Vec core has, beside those of a diagonal block and single rows."""
    text = (Path(tools.compile(kernel, sizes).folder) / "kernel.mlir").read_text()
    vec = re.split(r"\n  func\.func", text[text.index(f"func.func @{kernel.name}_mix_aiv(") :])[0]
    shapes = re.findall(r"memref<(\d+)x\d+(?:x\d+)*xf32, #hivm.address_space<ub>>", vec)
    return {int(rows) for rows in shapes} - {1, 4, 8, 16, 24}


@pytest.mark.parametrize(
    ("gate", "adjoint", "kernel", "split"),
    [
        ("channel", False, "prologue", True),
        ("channel", True, "prologue", True),
        ("channel", True, "epilogue", True),
        ("token", True, "epilogue", True),
        ("none", True, "epilogue", True),
        ("token", False, "prologue", False),
    ],
)
def test_rows_are_split_between_the_vec_cores(tools: Tools, gate: str, adjoint: bool, kernel: str, split: bool) -> None:
    """As the modelled times count it: each core has half of every tile, or whole ones."""
    module = adjoint_module(gate, True) if adjoint else chunk_module(gate, True, ahead=False)
    program = adjoint_program(gate, True) if adjoint else linear_attention_program(gate, True)
    made = plan(program, ASCEND910B, Options(ahead=False), C=CHUNK)
    stage = next(s for k in kernel_plans(made) if k.name == kernel for s in k.stages if s.unit is Unit.VEC)
    assert sharing(made, stage) == 1 + split
    rows = tile_rows(tools, module.kernel(kernel), constants(True))
    assert rows == {CHUNK // 2} if split else CHUNK in rows


@pytest.mark.parametrize("row", [("token", False), ("none", False), ("none", True)])
def test_chunks_of_128_fit_without_gates_and_delta_term(tools: Tools, row: tuple[str, bool]) -> None:
    """Elsewhere the prologue is refused, and the scan fits."""
    sizes = {"C": 128, "LEVELS": 3, "BV": 128}
    module = chunk_module(*row)
    tools.compile(module.kernel("scan"), constants(row[1], **{**sizes, "BV": 128 if row[1] else 64}))
    if row == ("none", False):
        assert within_capacity(tools.compile(module.kernel("prologue"), constants(False, **sizes)).facts)
        return
    with pytest.raises(ToolError, match="ub overflow"):
        tools.compile(module.kernel("prologue"), constants(row[1], **sizes))


@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (MOST_STEP, 256)])
@pytest.mark.parametrize("row", FAMILY)
def test_steps_compile(tools: Tools, row: tuple[str, bool], tokens: int, width: int) -> None:
    (kernel,) = step_module(*row, fused=FUSED if tokens > 1 else PLAIN, pool=tokens > 1).kernels
    sizes = constants(row[1], K=width, V=width, BV=column_tile(width, width, alone=True), TOKENS=tokens)
    facts = tools.compile(kernel, sizes).facts
    assert facts["cube"] is None and facts["workspace_bytes"] == 0 and within_capacity(facts)


@pytest.mark.parametrize("row", FAMILY)
def test_next_generation_meets_on_chip(tools: Tools, row: tuple[str, bool]) -> None:
    """Its kernels come from plans of their own, in which Vec adds and rounds, and change unit as often as planned: a
    hand-over of V' more than on the 910B. One less would mean that Cube does not wait for the buffer V' lies in."""
    made = plan_of(row, target=ASCEND910_95)
    module = chunk_module(*row, beta=row[1], target=ASCEND910_95.name)  # as in the table of plans
    for kernel in [*module.kernels, *step_module(*row).kernels]:
        sizes = constants(row[1], BV=column_tile(128, 128, alone=not kernel.cube))
        facts = tools.compile(kernel, sizes, arch=NEXT_ARCH).facts
        assert facts["workspace_bytes"] == 0 and within_capacity(facts, ASCEND910_95)
        if kernel.name == "scan":
            check_on_chip(made, kernel.name, facts)
            assert facts["handovers"] == made.handovers == (4 if row[1] else 0)


def test_same_kernels() -> None:
    for delta in (True, False):
        for module in (chunk_module, step_module):
            pairs = zip(module("head", delta).kernels, module("token", delta).kernels, strict=True)
            assert all(a.text == b.text for a, b in pairs)


@pytest.mark.parametrize(("narrow_update", "expected"), [(False, 65536), (True, 32768)])
def test_gated_delta_rule_state_kernel(tools: Tools, narrow_update: bool, expected: int) -> None:
    """The kernel that writes every chunk's state and new values, at C = 64, K = V = 128, all of V: public kernels have
    147,456 bytes and four hand-overs. The states and new values are written for the output kernel anyway and are read
    back from there; what is left is the change of the state, in the compiler's workspace. No op asks for this form."""
    module = chunk_module("token", True, outputs="epilogue", narrow_update=narrow_update)
    compiled = tools.compile(module.kernel("scan"), constants(True))
    made = plan_of(("token", True), outputs="epilogue", narrow_update=narrow_update)
    assert compiled.facts["workspace_bytes"] == workspace(made, module) == expected
    assert compiled.facts["handovers"] == made.handovers == 2


def limited(environment: Path, limit: int, work: int, *command: str) -> subprocess.CompletedProcess[str]:
    """A command run as the tools run their binaries, with other limits."""
    program = f"""from tests.ascend import toolchain
toolchain.LIMIT = {limit}
print(toolchain.limited({list(command)}, "the scan", {work}).stdout)"""
    python = [str(environment / "bin" / "python"), "-c", program]
    return subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_compiler_that_does_not_come_back(environment: Path, tmp_path: Path) -> None:
    """One that works for ever is run again, until its time is over."""
    found = limited(environment, 1, 8, "sleep", "60")
    assert "sleep has not come back on the scan in 1 s" in found.stderr
    once = f"test -e {tmp_path}/again && echo back && exit; touch {tmp_path}/again; while :; do :; done"
    found = limited(environment, 30, 1, "sh", "-c", once)
    assert found.stdout.strip() == "back"


@pytest.mark.parametrize(("io", "name"), [(torch.float16, "fp16"), (torch.float32, "fp32")])
@pytest.mark.parametrize(("width", "columns"), [(128, 128), (64, 64), (128, 256)])
def test_scan_at_other_sizes(tools: Tools, io: torch.dtype, name: str, width: int, columns: int) -> None:
    tile = column_tile(width, columns)
    module = chunk_module("channel", True, ahead=tile == columns)
    sizes = {"K": width, "V": columns, "BV": tile}
    facts = tools.compile(module.kernel("scan"), constants(True, **sizes), io=io).facts
    made = plan_of(("channel", True), name, K=width, V=columns, BV=tile)
    assert facts["workspace_bytes"] == workspace(made, module) and within_capacity(facts)
    check_cube(made, "scan", facts["memories"])


def test_an_oversized_tile_is_refused(tools: Tools) -> None:
    """The whole state of K = V = 256: the launcher never asks for it, the plan says which tile is too large and by how
    much, and the compiler which memory."""
    assert column_tile(256, 256) == 64
    with pytest.raises(CapacityError, match=r"L0C.*: 196,608 over.*largest tile is dS"):
        plan_of(("channel", True), K=256, V=256, BV=256)
    with pytest.raises(ToolError, match="overflow"):
        tools.compile(chunk_module("channel", True).kernel("scan"), constants(True, K=256, V=256, BV=256), arch=ARCH)
