"""What a plan costs: formulas in its symbols, and a modelled time that says which assumptions it rests on.

The formulas count what the algorithm does. The times come from a handful of published or fitted rates that disagree by
a factor of three among themselves, and nothing is published about the price of a hand-over: read them as rankings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import sympy

from ..decay import SUB_CHUNK
from ..ir import OpKind
from ..stages import SCANS, Buffer, Scope, Section, Stage, Task, evaluate, size, symbol
from ..target import Unit
from .model import PlanData
from .whole import kernel_plans

_BINARY = (OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.MASK)


def total_flops(plan: PlanData) -> sympy.Expr:
    """Multiplies and adds of the whole sequence, for all batch entries and heads."""
    return all_steps(plan, sum((stage.flops for stage in plan.stages), sympy.Integer(0)))


def total_bytes(plan: PlanData) -> sympy.Expr:
    """Bytes through global memory: ports once a reading or writing stage, tensors and workspaces at both ends."""
    return all_steps(plan, sum((stage.bytes for stage in plan.stages), sympy.Integer(0)))


def all_steps(plan: PlanData, a_step: sympy.Expr) -> sympy.Expr:
    """Of the whole sequence, for all batch entries and heads, what one lane's step comes to."""
    lanes = symbol("B") * symbol("H")
    steps = symbol("T") / symbol("C") if "C" in plan.sizes else sympy.Integer(1)
    return sympy.expand(lanes * steps * a_step)


def assumptions(plan: PlanData) -> list[str]:
    """The rates the modelled times rest on, each with its source."""
    target = plan.target
    lines = [f"{name}: {figure}" for name, figure in target.rates.items()]
    lines += [f"{name}: peak {p.peak}, half of it at {p.half.value:g} bytes" for name, p in target.paths.items()]
    return lines


# ---- modelled times, in seconds, of one core group


def sharing(plan: PlanData, stage: Stage) -> int:
    """How many cores share the rows of a stage's tiles: one Cube, and a group's Vec cores in the scan, with a task of
    each one's own where a kernel has no products, and where the compiler splits rows: in the epilogues of gradients,
    and in prologues whose triangular inverse begins with diagonal blocks that another kernel has inverted. In other
    kernels it gives each Vec core whole tiles."""
    if stage.unit is not Unit.VEC:
        return 1
    kernel = next(found for found in kernel_plans(plan) if any(stage is other for other in found.stages))
    alone = all(other.unit is not Unit.CUBE for other in kernel.stages)
    gradients = stage.section is Section.EPILOGUE and plan.program.reverse is not None
    inverted = any(task.part == "blocks" and len(task.inputs) > 1 for other in kernel.stages for task in other.tasks)
    return plan.target.vec_cores if stage.section in SCANS or alone or gradients or inverted else 1


def task_seconds(plan: PlanData, task: Task, cores: int) -> float:
    """Arithmetic of one task: Cube by the cycles of a product, Vec by lanes and start-up, its rows over ``cores``."""
    rates = plan.target.rates
    if "clock" not in rates:
        return 0.0
    cycles = _cube_cycles(plan, task) if task.unit is Unit.CUBE else _vec_cycles(plan, task, cores)
    return cycles / rates["clock"].value


def _cube_cycles(plan: PlanData, task: Task) -> float:
    rates = plan.target.rates
    if task.op.kind is OpKind.CAST:
        return 0.0  # on store
    if task.part in ("left", "join"):
        size = _extent(plan, task.op.result.type.rows) // SUB_CHUNK
        levels = [1 << n for n in range(size.bit_length() - 1)]
        return sum(size // (2 * n) * (rates["cube_start"].value + n**3 * rates["cube_block"].value) for n in levels)
    rows, cols = (_extent(plan, dim) for dim in task.output.type.shape)
    a = task.op.inputs[0].type
    inner = _extent(plan, a.rows if task.op.attr("trans_a", False) else a.cols)
    blocks = ceil(rows / 16) * ceil(cols / 16) * ceil(inner / 16)
    return rates["cube_start"].value + blocks * rates["cube_block"].value


def _vec_cycles(plan: PlanData, task: Task, cores: int) -> float:
    """Elements by lanes; the forward substitution is a row operation for each entry below the diagonal."""
    rates = plan.target.rates
    rows, cols = (_extent(plan, dim) for dim in task.output.type.shape)
    lanes, start = rates["vec_lanes"].value, rates["vec_start"].value
    if task.part == "diagonal" or (task.part == "blocks" and len(task.inputs) == 1):
        return SUB_CHUNK * start + rows * SUB_CHUNK**2 / (lanes / 2) / cores
    if task.op.kind is OpKind.UNIT_LOWER_INVERSE and not task.part:
        return rows * start + rows * rows * cols / 2 / (lanes / 2) / cores
    if task.part == "pairs":  # walks the tokens of a sub-chunk
        return 4 * SUB_CHUNK * (start + rows * cols / (lanes / 2) / cores)
    if task.part == "triangle":
        inner = _extent(plan, task.op.inputs[0].type.cols) if len(task.inputs) > 2 else 1
        return 4 * start + (rows * cols + 4 * rows * 8 * inner) / (lanes / 2) / cores
    passes = 3 if task.part in ("rows", "cols") else 1
    width = lanes / 2 if task.op.kind in _BINARY or task.part else lanes
    return passes * (start + rows * cols / width / cores)


def _extent(plan: PlanData, dim: str | int) -> int:
    return evaluate(size(dim), plan.tile_sizes)


def transfer_seconds(plan: PlanData, stage: Stage, scopes: Sequence[Scope]) -> float:
    """Time on the paths between a stage's cores and global memory, for its buffers of these scopes."""
    paths = plan.target.paths
    ways = {Unit.CUBE: ("GM->L1", "L0C->GM"), Unit.VEC: ("GM->UB", "UB->GM")}.get(stage.unit)
    if ways is None or any(way not in paths for way in ways):
        return 0.0
    cores = sharing(plan, stage)
    seconds = 0.0
    for way, side in zip(ways, (stage.reads, stage.writes), strict=True):
        for buffer in side:
            if buffer.scope in scopes and buffer.layout != "lane":
                seconds += paths[way].seconds(plan.bytes(buffer) / cores)
    return seconds


def section_seconds(plan: PlanData, section: Section) -> float:
    """A step of a section without a carry: its steps hide behind each other, so the busier unit counts."""
    busy: dict[Unit, float] = {}
    for stage in plan.section(section):
        arithmetic = sum(task_seconds(plan, task, sharing(plan, stage)) for task in stage.tasks)
        moved = transfer_seconds(plan, stage, (Scope.PORT, Scope.TENSOR, Scope.WORKSPACE))
        busy[stage.unit] = busy.get(stage.unit, 0.0) + max(arithmetic, moved)
    return max(busy.values(), default=0.0)


def crossing_seconds(plan: PlanData, buffer: Buffer, *, out: bool) -> float:
    """Writing (``out``) or reading one workspace tile."""
    name = buffer.producer if out else buffer.consumers[0]
    on_cube = next(stage for stage in plan.stages if stage.name == name).unit is Unit.CUBE
    way = ("L0C->GM" if on_cube else "UB->GM") if out else ("GM->L1" if on_cube else "GM->UB")
    path = plan.target.paths.get(way)
    cores = 1 if on_cube else plan.target.vec_cores
    return 0.0 if path is None else path.seconds(plan.bytes(buffer) / cores)
