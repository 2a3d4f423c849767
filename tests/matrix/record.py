"""What has been measured, as JSON lines, and the tables made of it.

Every line names the code it was measured with, so that an interrupted run goes on where it stopped and a run of changed
code starts anew in the same file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdacompile.doctor import version_of
from kdacompile.store.disk import source_fingerprint
from tests.matrix.cells import Cell, Row

HEADER = f"{'model':<17}{'T':>6} {'numbers':<8}{'what':<9}{'layers':>7}{'breaks':>8}{'error':>10}{'ratio':>7}{'s':>8}"


class Record:
    """A file of rows. Several processes may append to it at once: a line is one write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = f"{source_fingerprint()[:16]} torch {version_of('torch')} transformers {version_of('transformers')}"

    def add(self, row: Row) -> None:
        self._append({"code": self.code, "row": asdict(row)})

    def start(self, cell: Cell) -> None:
        """Note that a cell is being measured, so that a process that dies leaves behind where."""
        self._append({"code": self.code, "started": asdict(cell)})

    def rows(self) -> dict[Cell, Row]:
        """The newest row of every cell measured with the present code."""
        lines = (line["row"] for line in self._lines() if "row" in line)
        return {row.cell: row for row in map(_row, lines)}

    def unfinished(self, cells: Sequence[Cell]) -> Cell | None:
        """The first of ``cells`` that was started and has no row."""
        started = {Cell(**line["started"]) for line in self._lines() if "started" in line}
        done = self.rows()
        return next((cell for cell in cells if cell in started and cell not in done), None)

    def _append(self, line: dict[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line for line in lines if line["code"] == self.code]


def _row(fields: dict[str, Any]) -> Row:
    fields |= {name: tuple(fields[name]) for name in ("checked", "problems")}
    cell = Cell(**fields.pop("cell"))
    return Row(cell, **fields)


def line(row: Row) -> str:
    """A row as a line under ``HEADER``."""
    cell = row.cell
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    layers = f"{row.matched}/{cell.case.layers}"
    verdict = "ok" if not row.problems else "FAIL " + "; ".join(row.problems)
    return (
        f"{cell.model:<17}{cell.length:>6} {cell.numbers:<8}{cell.what:<9}{layers:>7}{row.breaks_added:>+8}"
        f"{row.error:>10.1e}{ratio:>7}{row.seconds:>8.1f}  {verdict}"
    )


def markdown(rows: Iterable[Row]) -> str:
    """A Markdown table: a line for each model and mode, the worst figure over all lengths for each kind of numbers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.model, row.cell.what), []).append(row)
    titles = ("model", "pattern", "mode", "lengths", "cells passed", "fp32 error", "bf16 ratio", "bf16-up ratio")
    lines = [_table_line(titles), _table_line(["---"] * len(titles))]
    for (model, what), group in groups.items():
        lengths = " ".join(str(length) for length in sorted({row.cell.length for row in group}))
        passed = f"{sum(not row.problems for row in group)} of {len(group)}"
        figures = (_worst(group, "fp32"), _worst(group, "bf16"), _worst(group, "bf16-up"))
        lines.append(_table_line((model, group[0].cell.case.pattern, what, lengths, passed, *figures)))
    return "\n".join(lines)


def how_shown(rows: Iterable[Row]) -> str:
    """How many matches were shown exactly, and what stood in the way of the others."""
    counts = Counter(checked for row in rows for checked in row.checked)
    others = [f"{count} {checked}" for checked, count in counts.most_common() if checked != "exactly"]
    return "; ".join([f"{counts['exactly']} of {counts.total()} matches shown exactly", *others])


def _table_line(fields: Iterable[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def _worst(rows: Iterable[Row], numbers: str) -> str:
    chosen = [row for row in rows if row.cell.numbers == numbers]
    if not chosen:
        return ""
    if any(row.error != row.error for row in chosen):
        return "none"
    if numbers == "fp32":
        return f"{max(row.error for row in chosen):.1e}"
    return f"{max(row.ratio or 0.0 for row in chosen):.2f}"
