"""A plan as a picture: the Cube lane, the buffers between, the Vec lanes, and heads over core groups. Plain SVG.

Times are modelled (see ``cost.py``); what the picture is for is the shape: who waits for whom, what runs side by side,
which bytes two buffers share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from .model import PlanData
from .timeline import Event, Schedule, Timeline

WIDTH = 1120
_LEFT, _RIGHT = 108, 24
_LANE, _GAP, _BYTES = 46, 12, 104
_MARGIN = 16  # around a picture that is a file of its own
_HUES = ("a", "b", "c")

STYLE = """
.plan { font: 12px ui-sans-serif, system-ui, sans-serif; --ink: #1c2430; --soft: #5c6878; --line: #dfe4ea;
  --lane: #f2f4f7; --a: #3566c9; --b: #1f8a70; --c: #a4562a; --wait: #c2410c; }
@media (prefers-color-scheme: dark) { .plan { --ink: #e4e8ee; --soft: #97a3b3; --line: #323b47; --lane: #1a2028;
  --a: #7aa2f7; --b: #5cc9a8; --c: #e0a070; --wait: #fb923c; } }
.plan text { fill: var(--ink); } .plan .soft { fill: var(--soft); } .plan .head { font-size: 15px; font-weight: 600; }
.plan .lane { fill: var(--lane); fill-opacity: .6; } .plan .axis { stroke: var(--line); }
.plan .in { fill: #fff; font-size: 11px; }
.plan .name { paint-order: stroke; stroke: var(--lane); stroke-width: 3px; stroke-opacity: .8; font-size: 11px; }
.plan text.a, .plan text.b, .plan text.c { font-size: 11px; font-weight: 600; }
.plan text.a { fill: var(--a); } .plan text.b { fill: var(--b); } .plan text.c { fill: var(--c); }
.plan .a { fill: var(--a); } .plan .b { fill: var(--b); } .plan .c { fill: var(--c); }
.plan .faint { fill-opacity: .38; } .plan .box { stroke: var(--lane); stroke-width: 1; }
.plan .over { stroke: var(--wait); fill: none; stroke-width: 1.4; marker-end: url(#tip); }
.plan .tip { fill: var(--wait); }
.plan .idle { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
"""


@dataclass
class _Sheet:
    """SVG elements as they pile up, and how far down they reach."""

    parts: list[str]
    y: float = 0.0
    names: list[str] = field(default_factory=list[str])  # of tiles: drawn over the arrows that cross them

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        name = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{name}>{escape(text)}</text>')

    def name(self, x: float, y: float, text: str) -> None:
        self.names.append(f'<text x="{x:.1f}" y="{y:.1f}" class="name">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str, label: str = "") -> None:
        shape = (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}" rx="2" class="{kind}"/>'
        )
        inner = ""
        if label and width > 6.4 * len(label) + 6:
            inner = f'<text x="{x + 4:.1f}" y="{y + height / 2 + 4:.1f}" class="in">{escape(label)}</text>'
        self.parts.append(f"<g><title>{escape(title)}</title>{shape}{inner}</g>")

    def svg(self, standalone: bool) -> str:
        space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
        edge = _MARGIN if standalone else 0
        view = f"{-edge} {-edge} {WIDTH + 2 * edge} {self.y + 8 + 2 * edge:.0f}"
        return (
            f'<svg class="plan"{space} viewBox="{view}" role="img">'
            f'<style>{STYLE}</style><defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
            f'markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" class="tip"/></marker></defs>'
            f"{''.join(self.parts)}</svg>"
        )


def timeline_svg(plan: PlanData, played: Timeline, *, span: float | None = None, standalone: bool = False) -> str:
    """The scan of one core group. ``span``: seconds the width stands for, to draw two plans to one scale.

    ``standalone``: for a file of its own rather than inside a page.
    """
    sheet = _Sheet([])
    end = span or played.end or 1.0

    def at(seconds: float) -> float:
        return _LEFT + seconds / end * (WIDTH - _LEFT - _RIGHT)

    _title(sheet, plan, played)
    behind = len(sheet.parts)
    _steps(sheet, plan, played, at)
    edges = _lanes(sheet, plan, played, at)
    _arrows(sheet, plan, played, at, edges)
    sheet.parts += sheet.names
    _axis(sheet, end, at, behind)
    return sheet.svg(standalone)


def _title(sheet: _Sheet, plan: PlanData, played: Timeline) -> None:
    steps = f"{played.steps} {plan.step}s, a colour each" if played.steps > 1 else f"one {plan.step}"
    sheet.text(0, 16, f"{plan.program.name} on {plan.target.title}", "head")
    sheet.text(
        0,
        34,
        f"{plan.handovers} hand-overs a {plan.step} (arrows), {plan.meeting} {_meeting_bytes(plan):,} bytes "
        f"(by address); the {played.section.value} of one core group as modelled, {steps}",
        "soft",
    )
    sheet.y = 46


def _steps(sheet: _Sheet, plan: PlanData, played: Timeline, at: Callable[[float], float]) -> None:
    """The number of every step over where the first unit begins it."""
    first = played.lane(plan.target.units[0].value)
    for step in range(played.steps):
        starts = [event.start for event in first if event.step == step]
        if starts:
            sheet.text(at(min(starts)), sheet.y + 10, f"{plan.step} {step}", _HUES[step % 3])
    sheet.y += 16


def _lanes(
    sheet: _Sheet, plan: PlanData, played: Timeline, at: Callable[[float], float]
) -> dict[str, tuple[float, float]]:
    """Draw Cube, the workspace by address, and the Vec cores; returns the upper and lower edge of each unit."""
    edges: dict[str, tuple[float, float]] = {}
    kinds = [unit.value for unit in plan.target.units]
    for unit in kinds:
        if unit == "vec":
            _memory(sheet, plan, played, at)
        count = plan.target.vec_cores if unit == "vec" else 1
        height = _LANE if count == 1 else 30
        edges[unit] = (sheet.y, sheet.y + count * height - 4)
        busy = sum(event.end - event.start for event in played.lane(unit)) / (played.end or 1.0)
        for core in range(count):
            sheet.box(_LEFT, sheet.y, WIDTH - _LEFT - _RIGHT, height - 4, "lane", unit)
            sheet.text(0, sheet.y + height / 2 + (2 if count > 1 else -6), _lane_name(unit, core, count))
            if core == 0:
                x, y = (42, 2) if count > 1 else (0, 10)
                sheet.text(x, sheet.y + height / 2 + y, f"{busy:.0%} busy", "soft")
            for event in played.lane(unit):
                _event(sheet, plan.step, event, at, sheet.y + 3, height - 10)
            sheet.y += height
        sheet.y += _GAP
    return edges


def _lane_name(unit: str, core: int, count: int) -> str:
    name = {"cube": "Cube", "vec": "Vec", "core": "Core"}[unit]
    return f"{name} {core}" if count > 1 else name


def _event(sheet: _Sheet, step: str, event: Event, at: Callable[[float], float], y: float, height: float) -> None:
    title = f"{event.label}, {step} {event.step}: {_us(event.start)} to {_us(event.end)}"
    kind = f"box {_HUES[event.step % 3]}"
    sheet.box(at(event.start), y, at(event.end) - at(event.start), height, kind, title, event.label)


def _meeting_bytes(plan: PlanData) -> int:
    """In global memory the compiler has every tile at an address of its own."""
    return plan.apart_bytes or plan.meeting_bytes


def _addresses(plan: PlanData) -> dict[str, tuple[int, ...]]:
    """Where the tiles of each buffer lie, among :func:`_meeting_bytes`."""
    if not plan.apart_bytes:
        return {buffer.name: buffer.addresses for buffer in plan.in_memory}
    found: dict[str, tuple[int, ...]] = {}
    first = 0
    for buffer in plan.in_memory:
        size, count = plan.bytes(buffer), len(buffer.addresses)
        found[buffer.name] = tuple(range(first, first + count * size, size))
        first += count * size
    return found


def _memory(sheet: _Sheet, plan: PlanData, played: Timeline, at: Callable[[float], float]) -> None:
    """Workspaces as rectangles of address by time."""
    if not plan.in_memory:
        return
    whole, addresses = _meeting_bytes(plan), _addresses(plan)
    top = sheet.y
    sheet.box(_LEFT, top, WIDTH - _LEFT - _RIGHT, _BYTES, "lane", plan.meeting)
    sheet.text(0, top + 14, plan.meeting)
    sheet.text(0, top + 30, f"{whole:,} B", "soft")
    scale = _BYTES / max(whole, 1)
    for buffer in plan.in_memory:
        for i, address in enumerate(addresses[buffer.name]):
            for event in played.lane(f"buffer {buffer.name}"):
                if event.step % buffer.copies != i % buffer.copies:
                    continue
                size = plan.bytes(buffer)
                title = f"{buffer.name}, {plan.step} {event.step}: bytes {address:,} to {address + size:,}"
                kind = f"box faint {_HUES[event.step % 3]}"
                y, height = top + address * scale, size * scale
                sheet.box(at(event.start), y, at(event.end) - at(event.start), height, kind, title)
                if at(event.end) - at(event.start) > 6.4 * len(buffer.name) and height > 9:
                    sheet.name(at(event.start) + 4, y + min(height / 2 + 4, 16), buffer.name)
    sheet.y += _BYTES + _GAP


def _arrows(
    sheet: _Sheet,
    plan: PlanData,
    played: Timeline,
    at: Callable[[float], float],
    edges: dict[str, tuple[float, float]],
) -> None:
    """Hand-overs: from where a tile leaves one unit to where the other begins to read it, edge to edge."""
    unit_of = {stage.name: stage.unit.value for stage in plan.stages}
    tasks = [task for stage in plan.stages for task in stage.tasks]
    for buffer in plan.workspaces:
        readers = {task.name for task in tasks if any(v.name == buffer.name for v in task.inputs)}
        (top, low), (high, bottom) = edges[unit_of[buffer.producer]], edges[unit_of[buffer.consumers[0]]]
        y0, y1 = (low, high) if low < high else (top, bottom)
        middle = (y0 + y1) / 2
        for written in played.lane(f"buffer {buffer.name}"):
            starts = [event.start for event in played.events if event.step == written.step and event.label in readers]
            if starts:
                x0, x1 = at(written.start), at(min(starts))
                path = f"M{x0:.1f} {y0:.1f}C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
                sheet.parts.append(f'<path d="{path}" class="over"/>')


def _axis(sheet: _Sheet, end: float, at: Callable[[float], float], behind: int) -> None:
    """Times along the bottom, and lines up from them that stand behind everything from part ``behind`` on."""
    step = _nice(end / 8)
    for n in range(int(end / step) + 1):
        x = at(n * step)
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="46" y2="{sheet.y:.1f}" class="axis"/>'
        sheet.parts.insert(behind, line)
        sheet.text(x + 2, sheet.y + 12, _us(n * step), "soft")
    sheet.y += 18


def groups_svg(plan: PlanData, spread: Schedule) -> str:
    """The scan's heads over core groups, one row a group."""
    sheet = _Sheet([])
    rounds = max((len(group.lanes) for group in spread.groups), default=1) or 1
    lanes = plan.sizes.get("B", 1) * plan.sizes.get("H", 1)
    sheet.text(0, 16, f"{lanes} lanes on {len(spread.groups)} core groups", "head")
    sheet.text(0, 34, f"one lane (batch entry and head) a group, {spread.steps} {plan.step}s each", "soft")
    sheet.y = 44
    width = (WIDTH - _LEFT - _RIGHT) / rounds
    for group in spread.groups:
        sheet.text(0, sheet.y + 12, f"group {group.index}", "soft")
        if not group.lanes:
            title = "has its part of the prologue and the epilogue, which are kernels of their own"
            sheet.box(_LEFT, sheet.y, width * rounds, 14, "idle", title)
            sheet.text(_LEFT + 6, sheet.y + 11, "idle in the scan", "soft")
        for n, lane in enumerate(group.lanes):
            kind = f"box {_HUES[lane % 3]}"
            sheet.box(_LEFT + n * width, sheet.y, width - 2, 14, kind, f"lane {lane}", f"lane {lane}")
        sheet.y += 17
    return sheet.svg(standalone=False)


def _nice(least: float) -> float:
    scale = 1e-9
    while True:
        for factor in (1, 2, 5):
            if scale * factor >= least:
                return scale * factor
        scale *= 10


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
