"""A report as one self-contained page: what matched, on which lines, how well, and why the rest did not."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from kdacompile.report.findings import PLAN_TARGETS, Findings, Layers

_CONTEXT = 2  # source lines shown on each side of the one that matched
_DOCS = Path(__file__).parents[2] / "docs"  # in a checkout


def render(report: Findings) -> str:
    """The page as HTML, light or dark as the reader's system is; nothing is loaded from elsewhere."""
    return _template().render(
        report=report,
        errors=[match.max_error for match in report.matches],
        near_misses=sum(rejection.count for rejection in report.rejections),
        longest=max(report.seconds.values(), default=0.0) or 1.0,
    )


def near_miss_page(code: str) -> str:
    """Where a code of a rejection is explained: in this checkout, or on the project's site."""
    page = _DOCS / "near-misses.md"
    if page.exists():
        return f"{page.resolve().as_uri()}#{code}"
    return f"{_site()}/near-misses.html#{code}"


@functools.cache
def _site() -> str:
    try:
        urls = metadata.metadata("kdacompile").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    named = dict(url.split(", ", 1) for url in urls)
    return named.get("Documentation", "docs").rstrip("/")


@functools.cache
def _template() -> Any:
    import jinja2  # torch requires it; importing the package does not

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(
        "page.html.jinja",
        globals={
            "lines_around": _lines_around,
            "plan_of": _plan_of,
            "near_miss_page": near_miss_page,
            "title_of": _title,
            "equation_of": _equation,
        },
    )


def _plan_of(layers: Layers, device: str) -> tuple[str, str, str] | None:
    """A summary, a picture and a text of how the match is cut on the device at hand."""
    from kdacompile import plans

    match = layers.first
    if match.mode != "sequence" or match.pattern not in plans.names():
        return None
    found = plans.plan(match.pattern, PLAN_TARGETS.get(device, "ascend910b"))
    if not found.target.split:
        return f"stages and buffers on {found.target.title}", "", str(found)
    return (
        f"{plans.whole_handovers(found)} hand-overs a chunk on {found.target.title}",
        found.to_svg(standalone=False),
        "",
    )


def _lines_around(source: str) -> Sequence[tuple[int, str, bool]]:
    """Number and text of the lines around ``file:line``, and whether it is the one; none where it cannot be read."""
    filename, _, line = source.rpartition(":")
    lines = linecache.getlines(filename) if line.isdecimal() else []
    number = int(line) if lines else 0
    if not 1 <= number <= len(lines):
        return ()
    shown = range(max(1, number - _CONTEXT), min(len(lines), number + _CONTEXT) + 1)
    return [(at, lines[at - 1].rstrip(), at == number) for at in shown]


def _title(pattern: str) -> str:
    return _texts().get(pattern, (pattern, ""))[0]


def _equation(pattern: str) -> str:
    return _texts().get(pattern, (pattern, ""))[1]


@functools.cache
def _texts() -> dict[str, tuple[str, str]]:
    """Title and equation by pattern name. A report read back from JSON may name patterns this version lacks."""
    from kdacompile.patterns.recurrence.family import FAMILY

    return {row.name: (row.title, row.equation) for row in FAMILY}
