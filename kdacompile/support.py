"""``python -m kdacompile support``: the table of what is recognised, from the registry itself."""

from __future__ import annotations

_GATES = {
    "none": "none",
    "head": "constant per head",
    "token": "per token and head",
    "channel": "per token, head and channel",
}


def table() -> str:
    """The family as a Markdown table. README.md holds a copy; a test keeps the two equal."""
    from kdacompile.patterns.recurrence.family import FAMILY

    lines = ["| pattern | name | recurrence | gate | delta term |", "| --- | --- | --- | --- | --- |"]
    for row in FAMILY:
        gates = ", or ".join(_GATES[gate] for gate in row.gates)
        delta = "yes" if row.delta else "no"
        lines.append(f"| {row.title} | `{row.name}` | `{row.equation}` | {gates} | {delta} |")
    return "\n".join(lines)
