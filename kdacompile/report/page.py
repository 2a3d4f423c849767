"""A report as one self-contained page: what matched, on which lines, how well, and why the rest did not."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Sequence
from html import escape

from kdacompile.report.findings import Findings, GraphBreak, Match, Rejection

_CONTEXT = 2  # source lines shown on each side of the one that matched

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6878; --page: #f6f7f9; --card: #ffffff; --line: #dfe4ea;
        --good: #1a7f4b; --warn: #a15c00; --bad: #b3322b; --mark: #fff3c4; --code: #f0f2f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #97a3b3; --page: #14181e; --card: #1c222b; --line: #323b47;
          --good: #5cc98f; --warn: #e3a857; --bad: #ef7d75; --mark: #4a4220; --code: #12161b; } }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1.05rem; margin: 0; } p { margin: .4rem 0; } .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0; }
.tile { flex: 1 1 8rem; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
        padding: .8rem 1rem; } .tile b { display: block; font-size: 1.7rem; line-height: 1.2; }
.card { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--good); border-radius: 8px;
        padding: 1rem 1.2rem; margin: 0 0 1rem; overflow-x: auto; }
.card.miss { border-left-color: var(--warn); } .card.break { border-left-color: var(--bad); }
.head { display: flex; flex-wrap: wrap; gap: .6rem; align-items: baseline; }
.tag { font-size: .8rem; border: 1px solid var(--line); border-radius: 99px; padding: .05rem .6rem;
       color: var(--soft); }
.math { white-space: pre-wrap; margin: .7rem 0; font-style: italic; }
code, pre, td.value { font-family: ui-monospace, monospace; font-size: .88rem; }
pre { background: var(--code); border-radius: 6px; padding: .6rem .8rem; margin: .7rem 0; overflow-x: auto;
      line-height: 1.5; } pre .no { color: var(--soft); user-select: none; } pre mark { background: var(--mark);
      color: inherit; display: inline-block; min-width: 100%; }
table { border-collapse: collapse; margin: .6rem 0; } th, td { text-align: left; padding: .25rem 1.2rem .25rem 0;
        border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--soft); font-weight: 500; }
.bar { background: var(--good); height: .6rem; border-radius: 3px; min-width: 2px; } td.wide { width: 14rem; }
"""


def render(report: Findings) -> str:
    title = escape("kdacompile: " + (report.title or "report"))
    sections = [
        _summary(report),
        _cards("What matched", [_match(match) for match in report.matches]),
        _cards("Near misses, left to Inductor", [_rejection(rejection) for rejection in report.rejections]),
        _cards("Graph breaks", [_graph_break(graph_break) for graph_break in report.graph_breaks]),
        _seconds(report),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _summary(report: Findings) -> str:
    errors = [match.max_error for match in report.matches]
    tiles = [
        (str(len(report.matches)), "regions proven and rewritten"),
        (f"{max(errors):.1e}" if errors else "-", "largest error against the fp64 recurrence"),
        (str(sum(rejection.count for rejection in report.rejections)), "near misses"),
        (f"{report.graph_count} / {len(report.graph_breaks)}", "graphs / breaks"),
    ]
    found = ", ".join(f"{count} x {_title(name)}" for name, count in report.counts.items())
    nothing = "Nothing matched: everything runs exactly as under Inductor alone."
    cells = "".join(f'<div class="tile"><b>{escape(value)}</b>{escape(label)}</div>' for value, label in tiles)
    return f'<p class="soft">{escape(found or nothing)}</p><div class="tiles">{cells}</div>'


def _cards(title: str, cards: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(cards) if cards else ""


def _match(match: Match) -> str:
    roles = _table(("role", "value in your model"), match.roles.items())
    absorbed = f"<p>Absorbed as well: {escape(', '.join(match.absorbed))}.</p>" if match.absorbed else ""
    unrolled = (
        f"<p>Unrolled, so other lengths may take other graphs. Not lifted: {escape(match.not_lifted)}.</p>"
        + _where(match.loop)
        if match.loop
        else ""
    )
    verdict = "verdict from cache" if match.from_cache else "proven in this run"
    checked = f"checked {match.checked}" if match.checked else "documented"
    tags = _tags(match.mode, f"max error {match.max_error:.1e}", checked, verdict)
    equation = _equation(match.pattern)
    return (
        f'<section class="card"><div class="head"><h3>{escape(_title(match.pattern))}</h3>{tags}</div>'
        + (f'<p class="math">{escape(equation)}</p>' if equation else "")
        + _where(match.source)
        + f"<p>Runs as <code>{escape(match.op)}</code>.</p>{roles}{absorbed}{unrolled}{_plan(match)}</section>"
    )


def _plan(match: Match) -> str:
    """How the match is cut on a target whose matrix and vector units are different cores, as a picture to unfold."""
    from kdacompile import plans

    command = f"<p>Its stages and buffers: <code>{escape(match.plan_command)}</code></p>"
    if match.mode != "sequence" or match.pattern not in plans.names():
        return command
    found = plans.plan(match.pattern)
    summary = f"{found.handovers} hand-overs a chunk on {found.target.title}"
    return f"{command}<details><summary>{escape(summary)}</summary>{found.to_svg(standalone=False)}</details>"


def _rejection(rejection: Rejection) -> str:
    times = (f"{rejection.count} times",) if rejection.count > 1 else ()
    return (
        f'<section class="card miss"><div class="head"><h3>{escape(_title(rejection.pattern))}</h3>'
        f"{_tags(rejection.code, *times)}</div><p>{escape(rejection.reason)}</p>{_where(rejection.source)}</section>"
    )


def _graph_break(graph_break: GraphBreak) -> str:
    where = _where(graph_break.source) if graph_break.source else ""
    return f'<section class="card break"><p>{escape(graph_break.reason)}</p>{where}</section>'


def _seconds(report: Findings) -> str:
    seconds = report.seconds
    if not seconds:
        return ""
    longest = max(seconds.values()) or 1.0
    rows = "".join(
        f'<tr><td>{escape(phase)}</td><td class="value">{spent:.3f} s</td>'
        f'<td class="wide"><div class="bar" style="width:{100 * spent / longest:.0f}%"></div></td></tr>'
        for phase, spent in seconds.items()
    )
    return f"<h2>kdacompile's own compile time</h2><table>{rows}</table>"


def _tags(*texts: str) -> str:
    return "".join(f'<span class="tag">{escape(text)}</span>' for text in texts)


def _table(header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><td>{escape(key)}</td><td class="value">{escape(value)}</td></tr>' for key, value in rows)
    if not body:
        return ""
    return f"<table><tr><th>{escape(header[0])}</th><th>{escape(header[1])}</th></tr>{body}</table>"


def _where(source: str) -> str:
    """``file:line``, with the lines themselves where the file can be read here."""
    filename, _, line = source.rpartition(":")
    label = f'<p class="soft"><code>{escape(source)}</code></p>'
    lines = linecache.getlines(filename) if line.isdecimal() else []
    number = int(line) if lines else 0
    if not 1 <= number <= len(lines):
        return label
    shown: list[str] = []
    for at in range(max(1, number - _CONTEXT), min(len(lines), number + _CONTEXT) + 1):
        text = f'<span class="no">{at:5d}  </span>{escape(lines[at - 1].rstrip())}'
        shown.append(f"<mark>{text}</mark>" if at == number else text)
    return label + "<pre>" + "\n".join(shown) + "</pre>"


def _title(pattern: str) -> str:
    return _texts().get(pattern, (pattern, ""))[0]


def _equation(pattern: str) -> str:
    return _texts().get(pattern, (pattern, ""))[1]


def _texts() -> dict[str, tuple[str, str]]:
    """Title and equation by pattern name. A report read back from JSON may name patterns this version lacks."""
    from kdacompile.patterns.recurrence.family import FAMILY

    return {row.name: (row.title, row.equation) for row in FAMILY}
