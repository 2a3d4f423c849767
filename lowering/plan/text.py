"""A plan as text: made for reading and for golden tests, so it holds no modelled time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir import DType
from ..stages import Buffer, Scope, Stage
from .capacity import Need
from .model import PlanData
from .whole import outer_handovers

_SCOPES = {
    Scope.WORKSPACE: "workspace",
    Scope.TENSOR: "tensors between sections, one tile a lane and step",
    Scope.CARRY: "carry",
    Scope.LOCAL: "kept by one unit",
    Scope.PORT: "ports",
}


def to_text(plan: PlanData) -> str:
    """The stages with their tasks, the buffers by what they are, and what every stage keeps on chip."""
    sizes = " ".join(f"{name}={n}" for name, n in sorted(plan.sizes.items()))
    lines = [f"plan of {plan.program.name} for {plan.target.name}: {sizes} {plan.io}", *_summary(plan), "", "stages"]
    for stage in plan.stages:
        lines += _stage(stage, plan.step)
    for scope, title in _SCOPES.items():
        chosen = [b for b in plan.buffers if b.scope is scope]
        if chosen:
            lines += ["", title, *table(_HEAD, [_row(plan, b) for b in chosen])]
    if plan.needs:
        rows = [(n.stage, n.memory, f"{n.bytes:,}", apart_text(plan, n), f"{n.available:,}") for n in plan.needs]
        lines += ["", "on chip, bytes a core", *table(("stage", "memory", "most", "apart", "has"), rows)]
    return "\n".join(lines) + "\n"


def _summary(plan: PlanData) -> list[str]:
    return [
        f"  hand-overs a {plan.step} {plan.handovers}, no schedule has fewer than {plan.lower_bound}; "
        f"outside the scan {outer_handovers(plan)}",
        f"  {plan.meeting} {plan.meeting_bytes:,} bytes a core group, floor {plan.floor_bytes:,}{_apart(plan)}; "
        f"{plan.crossings} tiles and {plan.crossing_bytes:,} bytes cross a {plan.step}",
        f"  tensors between sections {plan.tensor_bytes:,} bytes a lane and {plan.step}",
    ]


def _apart(plan: PlanData) -> str:
    return f", every tile apart {plan.apart_bytes:,}" if plan.apart_bytes else ""


def _stage(stage: Stage, step: str) -> list[str]:
    where = f"all {step}s at once" if "step" in stage.domain else f"{step} after {step}"
    lines = [f"  {stage.name} ({where})"]
    lines += [f"    flops {stage.flops}", f"    bytes {stage.bytes}"]
    for task in stage.tasks:
        ahead = stage.shift.get(task.name, 0)
        lines.append(f"    {task}" + (f"    # for {ahead} {step}{'s'[: ahead > 1]} later" if ahead else ""))
    return lines


_HEAD = ("name", "tile", "dtype", "bytes", "from", "to", "alive", "at", "why")


def _row(plan: PlanData, b: Buffer) -> tuple[str, ...]:
    dtype = plan.io if b.dtype is DType.IO else "fp32"
    count = b.tiles * b.copies
    bytes = f"{plan.bytes(b):,}" + (f" x {count}" if count > 1 else "")
    alive = "" if b.lifetime is None else f"{b.lifetime[0]}-{b.lifetime[1]}"
    note = "; ".join(filter(None, (b.reason, "row by row" if b.streamed else "")))
    at = " ".join(str(a) for a in b.addresses)
    return (b.name, f"[{b.shape[0]},{b.shape[1]}]", dtype, bytes, b.producer, " ".join(b.consumers), alive, at, note)


def apart_text(plan: PlanData, need: Need) -> str:
    """Bytes with every tile in a place of its own, where a compiler lays them out so."""
    return f"{need.apart_bytes:,}" if need.apart and plan.target.split else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns padded to their widest entry; columns that are empty throughout are left out."""
    cells = [tuple(row) for row in rows]
    used = [i for i in range(len(head)) if any(row[i] for row in cells)]
    widths = [max(len(head[i]), *(len(row[i]) for row in cells)) for i in used]
    return [
        "  " + "  ".join(row[i].ljust(width) for i, width in zip(used, widths, strict=True)).rstrip()
        for row in (tuple(head), *cells)
    ]
