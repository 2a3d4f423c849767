"""What a command shows: tables, colours and progress at a terminal, plain text in a pipe or without rich."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kdacompile.doctor import Check
    from kdacompile.report.report import Report

_COLOURS = {"ok": "green", "note": "yellow", "missing": "dim", "broken": "bold red"}


def is_rich(stream: TextIO) -> bool:
    """Whether a person looks at the stream, and rich is there to please them."""
    return stream.isatty() and util.find_spec("rich") is not None


def show_checks(findings: Sequence[Check]) -> None:
    """The doctor's findings."""
    if not is_rich(sys.stdout):
        print(*findings, sep="\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        hint = Text(f"\n{finding.hint}", style="cyan") if finding.hint else Text()
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, Text(finding.name, style="bold"), Text(finding.detail) + hint)
    Console().print(table)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: str) -> None:
    """A table at a terminal, Markdown elsewhere."""
    if not is_rich(sys.stdout):
        print(markdown)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def show_report(report: Report) -> None:
    """What ``explain`` found."""
    if not is_rich(sys.stdout):
        print(report)
        return
    from rich.console import Console

    Console().print(report_view(report))


def report_view(report: Report) -> Any:
    """A report as something that rich prints; the documentation's screenshot is one too."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    from kdacompile.report.page import near_miss_page

    found = ", ".join(f"{count} x {name}" for name, count in report.counts.items()) or "no matches"
    parts: list[Any] = [Text.assemble((f"kdacompile: {report.title or 'report'}", "bold"), f"  {found}")]
    if report.saved:
        parts.append(Text(f"estimated gain: {report.saved.text}", style="green"))
    for layers in report.layers:
        title, *lines = _here(layers.text(report.device)).splitlines()
        body = Text("\n".join(line.strip() for line in lines))
        parts.append(Panel(body, title=Text(title), title_align="left", border_style="green"))
    for rejection in [*report.rejections, *report.declined]:
        kind = "declined by cost" if rejection.declined else "near miss"
        title = Text(_here(f"{kind}: {rejection.pattern} at {rejection.source}"))
        times = f" ({rejection.count} times)" if rejection.count > 1 else ""
        advice = Text(f"\nwhat to do: near misses, {rejection.code}", f"link {near_miss_page(rejection.code)}")
        body = Text(rejection.reason + times) + advice
        parts.append(Panel(body, title=title, title_align="left", border_style="yellow"))
    for graph_break in report.graph_breaks:
        parts.append(Panel(Text(_here(str(graph_break))), title="graph break", title_align="left", border_style="red"))
    return Group(*parts)


def _here(text: str) -> str:
    """With paths as they are from the current folder."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def check_writable(path: Path) -> None:
    """Make the folder of a file that a command writes at its end.

    Raises :class:`~kdacompile.errors.OutputError` where that file cannot be written.
    """
    from kdacompile.errors import OutputError  # it imports torch, and doctor may not

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(path=path, problem=f"its folder cannot be made ({error.strerror})") from error
    if path.is_dir():
        raise OutputError(path=path, problem="it is a folder: name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(path=path, problem="no permission")


def draw_report(report: Report, path: Path) -> None:
    """What :func:`show_report` shows at a terminal, as SVG: ``path``, and beside it ``NAME-dark.svg``.

    Raises :class:`~kdacompile.errors.MissingDependencyError` without rich.
    """
    try:
        from rich import terminal_theme
        from rich.console import Console
    except ImportError as error:
        from kdacompile.errors import MissingDependencyError  # it imports torch, and doctor may not

        raise MissingDependencyError(what="--svg", package="rich", install="'kdacompile[cli]'") from error
    themes = {path: terminal_theme.DEFAULT_TERMINAL_THEME}
    themes[path.with_name(f"{path.stem}-dark{path.suffix}")] = terminal_theme.SVG_EXPORT_THEME
    for target, theme in themes.items():
        console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
        console.print(report_view(report))
        drawn = console.export_svg(title="kdacompile explain", theme=theme, unique_id="report")
        fonts = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they would be loaded from elsewhere
        target.write_text(fonts, encoding="utf-8")


@contextmanager
def progress(what: str) -> Generator[None]:
    """A spinner at a terminal while something long runs, a line elsewhere; both on stderr."""
    if not is_rich(sys.stderr):
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
