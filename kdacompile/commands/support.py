"""``python -m kdacompile support``: the table of what is recognised, from the registry itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kdacompile.commands import console

if TYPE_CHECKING:
    from kdacompile.patterns.recurrence.family import Pattern

_HEADER = ("pattern", "name", "recurrence", "gate", "delta term")
_GATES = {
    "none": "none",
    "head": "constant per head",
    "token": "per token and head",
    "channel": "per token, head and channel",
}


def table() -> str:
    """The family as a Markdown table. README.md holds a copy; a test keeps the two equal."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEADER, ("---",) * len(_HEADER), *_rows("`{}`")))


def main(*, as_json: bool) -> int:
    """Show the table."""
    if as_json:
        print(json.dumps([dict(zip(_HEADER, row, strict=True)) for row in _rows("{}")], indent=2))
    else:
        console.show_table(_HEADER, _rows("{}"), table())
    return 0


def _rows(code: str) -> list[tuple[str, ...]]:
    from kdacompile.patterns.recurrence.family import FAMILY, FORMS

    return [_row(code, row.title, (row.name,), row.equation, [row]) for row in FAMILY] + [
        _row(code, form.title, form.names, form.equation, form.rows) for form in FORMS
    ]


def _row(code: str, title: str, names: tuple[str, ...], equation: str, rows: list[Pattern]) -> tuple[str, ...]:
    gates = dict.fromkeys(_GATES[gate] for row in rows for gate in row.gates)
    delta = dict.fromkeys("yes" if row.delta else "no" for row in rows)
    return title, ", ".join(map(code.format, names)), code.format(equation), ", or ".join(gates), " or ".join(delta)
