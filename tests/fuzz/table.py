"""What came of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

KINDS = ("matched", "declined", "unseen", "wrong", "crashed", "slow", "unstable", "torch", "invalid")


def totals(rows: Sequence[dict[str, Any]]) -> str:
    """How many have run, how long they took, and what came of them."""
    run = [row for row in rows if row["kind"] in KINDS[:-1]]
    spent = sum(row["seconds"] for row in run)
    counts = Counter(row["kind"] for row in rows)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS[:-1])
    return (
        f"{len(run)} programs ({spent / max(1, len(run)):.2f} s each): {kinds}; "
        f"{counts['invalid']} texts that eager refuses, {counts['not drawn']} not drawn"
    )


def text(rows: Sequence[dict[str, Any]], seed: int, numbers: int) -> str:
    """Programs by source and by what was done to them; invalid ones (eager fails) are no programs. ``numbers``: how
    many were asked for, those included.
    """
    run = [row for row in rows if row["kind"] in KINDS[:-1]]
    lines = [
        f"seed {seed}, {len(rows)} of {numbers}: {totals(rows)}",
        "",
        _table("source", ((row.get("source", "?"), row["kind"]) for row in run)),
        _table("edit", ((group, row["kind"]) for row in run for group in row.get("groups") or ["none"])),
        _listed("matches", (pattern for row in run for pattern in row.get("patterns", ()))),
        _listed("rejections", (code for row in run for code in row.get("codes", ()))),
    ]
    return "\n".join(lines)


def _table(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    counts = Counter(pairs)
    head = f"{title:24}" + "".join(f"{kind:>10}" for kind in KINDS[:-1])
    names = sorted({name for name, _ in counts})
    return "\n".join(
        [head, *(f"{name:24}" + "".join(f"{counts[name, kind]:>10}" for kind in KINDS[:-1]) for name in names), ""]
    )


def _listed(title: str, names: Iterable[str]) -> str:
    return f"{title}: " + ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
