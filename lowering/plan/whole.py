"""A plan kernel by kernel: what each hands over, and what it needs of memory, over the whole of a chunk.

A section is one kernel, but for gates per channel, whose first stage of Vec is a kernel of its own: between two kernels
nothing is handed over, and what one leaves for another is a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import OpKind
from ..stages import SCANS, Buffer, Scope, Section, Stage
from ..target import Unit
from .hazards import slots
from .model import PlanData

SUB_CHUNKS = "sub_chunks"  # the kernel of what is scaled level by level


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of a plan. ``handovers`` are those that Cube takes part in, a step, the wrap to the next included;
    ``crossing`` the tiles that change unit in it, ``passing`` those that take memory of a core group, each once; but
    outside the scans what Vec makes is sent once for every product."""

    name: str
    stages: tuple[Stage, ...]
    handovers: int
    crossing: tuple[Buffer, ...]
    passing: tuple[Buffer, ...]

    @property
    def crossings(self) -> int:
        return sum(buffer.tiles for buffer in self.crossing)

    @property
    def slots(self) -> int:
        """Places for every tile that changes unit, and so how many steps the units may be apart."""
        return slots(self.stages) if self.passing else 1

    def bytes(self, plan: PlanData) -> int:
        """Of a core group, with every tile in places of its own."""
        return sum(plan.bytes(buffer) * buffer.tiles for buffer in self.passing) * self.slots


def kernel_plans(plan: PlanData) -> tuple[KernelPlan, ...]:
    """The kernels of a plan, in the order in which they run."""
    found: list[KernelPlan] = []
    for section in Section:
        stages = plan.section(section)
        if stages and any(task.part == "cols" for task in stages[0].tasks):
            found.append(_kernel(plan, SUB_CHUNKS, stages[:1]))
            stages = stages[1:]
        if stages:
            found.append(_kernel(plan, section.value, stages))
    return tuple(found)


def whole_handovers(plan: PlanData) -> int:
    """Hand-overs of a step, in all kernels."""
    return sum(kernel.handovers for kernel in kernel_plans(plan))


def outer_handovers(plan: PlanData) -> int:
    """Those outside the scan, where steps are independent and hide them behind each other."""
    return sum(kernel.handovers for kernel in kernel_plans(plan) if kernel.name not in SCANS)


def whole_bytes(plan: PlanData) -> int:
    """Memory of a core group where units meet, of all kernels: none where they meet on chip."""
    return sum(kernel.bytes(plan) for kernel in kernel_plans(plan)) if plan.target.meeting == "global" else 0


def _kernel(plan: PlanData, name: str, stages: Sequence[Stage]) -> KernelPlan:
    unit = {stage.name: stage.unit for stage in stages}
    inside = [b for b in plan.buffers if b.producer in unit and b.scope in (Scope.WORKSPACE, Scope.TENSOR, Scope.LOCAL)]
    crossing = [b for b in inside if {unit[name] for name in b.consumers if name in unit} - {unit[b.producer]}]
    in_tensors = _in_tensors(stages)
    passing = [b for b in inside if b.lifetime is not None and b.name not in in_tensors and unit.keys() & b.consumers]
    if stages[0].section not in SCANS:  # what Vec leaves for another kernel, Cube gets by itself
        sent = [b for b in crossing if unit[b.producer] is Unit.VEC and b.name not in in_tensors]
        passing += [b for b in sent if b.scope is Scope.TENSOR]
        again = [b for b in sent for _ in range(_products(stages, b.name) - 1)]
        crossing, passing = crossing + again, passing + again
    return KernelPlan(name, tuple(stages), _handovers(stages, crossing), tuple(crossing), tuple(passing))


def _products(stages: Sequence[Stage], name: str) -> int:
    """How many operands of a kernel's products are a value."""
    tasks = [task for stage in stages for task in stage.tasks if stage.unit is Unit.CUBE]
    products = [task for task in tasks if task.kind in (OpKind.DOT, OpKind.GATED_DOT, OpKind.GATED_GRAM)]
    return sum(value.name == name for task in products for value in task.inputs[:2])


def _in_tensors(stages: Sequence[Stage]) -> set[str]:
    """With a gate per channel: of a Gram matrix what is below the diagonal blocks is put beside them, in their tensor,
    and the weights of pairs are read from theirs, block by block."""
    tasks = [task for stage in stages for task in stage.tasks if task.part == "product"]
    levels = [task for task in tasks if task.op.inputs[2].type.cols != 1]
    return {task.name if task.op.kind is OpKind.GATED_GRAM else task.inputs[0].name for task in levels}


def _handovers(stages: Sequence[Stage], crossing: Sequence[Buffer]) -> int:
    """Changes between what Cube takes and what it gives, around the ring of its stages."""
    events: list[str] = []
    for stage in stages:
        if stage.unit is not Unit.CUBE:
            continue
        takes = any(stage.name in b.consumers and b.producer != stage.name for b in crossing)
        gives = any(b.producer == stage.name for b in crossing)
        events += ["takes"] * takes + ["gives"] * gives
    changes = sum(a != b for a, b in zip(events, events[1:] + events[:1], strict=True))
    return max(changes, 2) if events else 0
