"""A plan as one self-contained page: the picture, the stages, the buffers, the cost and what the figures rest on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..ir import DType
from ..stages import Buffer, Scope, Section
from .capacity import Need
from .cost import assumptions, total_bytes, total_flops
from .model import PlanData
from .picture import groups_svg, timeline_svg
from .text import apart_text
from .timeline import schedule, timeline
from .whole import outer_handovers

_CHUNKS = 4


def to_html(plan: PlanData, naive: PlanData | None = None) -> str:
    """The page of ``plan``; with ``naive``, its timeline stands above at the same scale."""
    return _template().render(
        plan=plan,
        naive=naive,
        title=f"{plan.program.name} on {plan.target.title}",
        sections=sum(1 for section in Section if plan.section(section)),
        outside=outer_handovers(plan),
        pictures=_pictures(plan, naive),
        buffers=[_buffer_row(plan, buffer) for buffer in plan.buffers],
        needs=[_need_row(plan, need) for need in plan.needs],
        flops=total_flops(plan),
        bytes=total_bytes(plan),
        spread=schedule(plan),
        assumptions=assumptions(plan),
    )


@functools.cache
def _template() -> Any:
    import jinja2  # torch requires it; importing the package does not

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.get_template("page.html.jinja")


def _pictures(plan: PlanData, naive: PlanData | None) -> list[str]:
    if not plan.target.split:
        return []
    played = timeline(plan, _CHUNKS)
    drawn: list[str] = []
    span = None
    if naive is not None:
        slow = timeline(naive, 1)
        span = max(slow.end, played.end)
        drawn.append(timeline_svg(naive, slow, span=span))
    drawn.append(timeline_svg(plan, played, span=span))
    if plan.section(Section.REVERSE):
        drawn.append(timeline_svg(plan, timeline(plan, _CHUNKS, section=Section.REVERSE), span=span))
    if plan.section(Section.SCAN):
        drawn.append(groups_svg(plan, schedule(plan)))
    return drawn


_KEPT = {
    Scope.PORT: "caller",
    Scope.CARRY: "on its unit",
    Scope.TENSOR: "global, every step",
    Scope.WORKSPACE: "workspace",
    Scope.LOCAL: "on its unit",
}


def _buffer_row(plan: PlanData, b: Buffer) -> Sequence[str]:
    count = b.tiles * b.copies
    return (
        b.name,
        _KEPT[b.scope],
        f"[{b.shape[0]},{b.shape[1]}]",
        plan.io if b.dtype is DType.IO else "fp32",
        f"{plan.bytes(b):,}" + (f" x {count}" if count > 1 else ""),
        b.producer,
        ", ".join(b.consumers),
        ", ".join(f"{at:,}" for at in b.addresses),
        "; ".join(filter(None, (b.reason, "row by row" if b.streamed else ""))),
    )


def _need_row(plan: PlanData, n: Need) -> Sequence[str]:
    tiles = ", ".join(name for name, _ in n.tiles)
    return n.stage, n.memory, f"{n.bytes:,}", apart_text(plan, n), f"{n.available:,}", tiles
