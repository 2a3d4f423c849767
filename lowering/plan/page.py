"""A plan as one self-contained page: the picture, the stages, the buffers, the cost and what the figures rest on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..ir import DType
from ..stages import Buffer, Scope, Section, Stage
from .cost import assumptions, total_bytes, total_flops
from .model import PlanData
from .picture import groups_svg, timeline_svg
from .text import apart_text
from .timeline import schedule, timeline
from .whole import outer_handovers

_CHUNKS = 4

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6878; --page: #f6f7f9; --card: #ffffff; --line: #dfe4ea;
        --code: #f0f2f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #97a3b3; --page: #14181e; --card: #1c222b; --line: #323b47; --code: #12161b; } }
body { margin: 0 auto; max-width: 74rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .8rem; }
.soft { color: var(--soft); } .tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; }
.tile { flex: 1 1 9rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
        padding: .8rem 1rem; } .tile b { display: block; font-size: 1.6rem; line-height: 1.2; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 1rem 1.2rem;
        margin: 0 0 1rem; overflow-x: auto; } .card svg { width: 100%; min-width: 52rem; height: auto; }
code, td { font-family: ui-monospace, monospace; font-size: .84rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--soft); font-weight: 500; }
details { margin: .3rem 0; } summary { cursor: pointer; } pre { background: var(--code); border-radius: 6px;
  padding: .6rem .8rem; overflow-x: auto; font-size: .82rem; line-height: 1.5; }
"""


def to_html(plan: PlanData, naive: PlanData | None = None) -> str:
    """The page of ``plan``; with ``naive``, its timeline stands above at the same scale."""
    name = f"{plan.program.name} on {plan.target.title}"
    sizes = " ".join(f"{key}={n}" for key, n in sorted(plan.sizes.items()))
    body = [
        f"<h1>{escape(name)}</h1><p class='soft'>{escape(sizes)}, inputs in {plan.io}</p>",
        _tiles(plan, naive),
        _pictures(plan, naive),
        "<h2>Stages</h2>",
        *(_stage(stage, plan.step) for stage in plan.stages),
        "<h2>Buffers</h2>",
        _card(_table(_BUFFER_HEAD, (_buffer_row(plan, b) for b in plan.buffers))),
        _chip(plan),
        _cost(plan),
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(name)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>"
    )


def _tiles(plan: PlanData, naive: PlanData | None) -> str:
    was = "" if naive is None else f"naive {naive.handovers}; "
    bytes_were = "" if naive is None else f"naive {naive.meeting_bytes:,}; "
    entries = [
        (str(plan.handovers), f"hand-overs a {plan.step} ({was}least possible {plan.lower_bound})"),
        (
            f"{plan.meeting_bytes:,}",
            f"{plan.meeting}, bytes a core group ({bytes_were}floor {plan.floor_bytes:,}{_apart(plan)})",
        ),
        (f"{plan.crossing_bytes:,}", f"bytes a {plan.step} in {plan.crossings} tiles that change unit"),
        (
            str(sum(1 for s in Section if plan.section(s))),
            f"sections, of a kernel or more each; {outer_handovers(plan)} hand-overs outside the scan",
        ),
    ]
    tiles = "".join(f"<div class='tile'><b>{escape(n)}</b>{escape(what)}</div>" for n, what in entries)
    return f"<div class='tiles'>{tiles}</div>"


def _apart(plan: PlanData) -> str:
    return f"; every tile apart {plan.apart_bytes:,}" if plan.apart_bytes else ""


def _pictures(plan: PlanData, naive: PlanData | None) -> str:
    if not plan.target.split:
        return ""
    played = timeline(plan, _CHUNKS)
    cards: list[str] = []
    span = None
    if naive is not None:
        slow = timeline(naive, 1)
        span = max(slow.end, played.end)
        cards.append(_card(timeline_svg(naive, slow, span=span)))
    cards.append(_card(timeline_svg(plan, played, span=span)))
    if plan.section(Section.SCAN):
        cards.append(_card(groups_svg(plan, schedule(plan))))
    return "".join(cards)


def _stage(stage: Stage, step: str) -> str:
    where = f"all {step}s at once" if "step" in stage.domain else f"{step} after {step}"
    lines = [
        str(task) + (f"    # for {stage.shift[task.name]} {step} later" if task.name in stage.shift else "")
        for task in stage.tasks
    ]
    return (
        f"<div class='card'><b>{escape(stage.name)}</b> <span class='soft'>{where}</span>"
        f"<pre>{escape(chr(10).join(lines))}</pre>"
        f"<span class='soft'>flops</span> <code>{escape(str(stage.flops))}</code><br>"
        f"<span class='soft'>bytes</span> <code>{escape(str(stage.bytes))}</code></div>"
    )


_BUFFER_HEAD = ("name", "kept", "tile", "dtype", "bytes", "from", "to", "at", "why fp32")
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


def _chip(plan: PlanData) -> str:
    if not plan.needs:
        return ""
    rows = (
        (n.stage, n.memory, f"{n.bytes:,}", apart_text(plan, n), f"{n.available:,}", ", ".join(x for x, _ in n.tiles))
        for n in plan.needs
    )
    return "<h2>On chip</h2>" + _card(_table(("stage", "memory", "most bytes", "apart", "has", "tiles"), rows))


def _cost(plan: PlanData) -> str:
    spread = schedule(plan)
    lines = [
        f"<p>Multiplies and adds: <code>{escape(str(total_flops(plan)))}</code></p>",
        f"<p>Bytes through global memory: <code>{escape(str(total_bytes(plan)))}</code></p>",
    ]
    if spread.high > 0:
        lines.append(
            f"<p>Modelled: {spread.low * 1e6:,.0f} us with hand-overs at no price, {spread.high * 1e6:,.0f} us with "
            f"them at twice the assumed price. Good for ranking plans, not for predicting a run.</p>"
        )
    figures = "".join(f"<li>{escape(line)}</li>" for line in assumptions(plan))
    lines.append(f"<details><summary>What the modelled times rest on</summary><ul>{figures}</ul></details>")
    return "<h2>Cost</h2>" + _card("".join(lines))


def _card(inner: str) -> str:
    return f"<div class='card'>{inner}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
