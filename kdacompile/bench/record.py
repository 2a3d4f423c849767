"""What the suites share: which cases are asked for, the file of figures, tables as text."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from kdacompile.doctor import version_of
from kdacompile.errors import BenchError
from kdacompile.store.disk import write_whole

Figures = dict[str, Any]
Results = dict[str, dict[str, Figures]]
"""By case and contender: figures, or ``{"failure": text}``."""
Rows = Sequence[Sequence[str]]

_PACKAGES = ("torch", "triton", "kdacompile", "transformers", "fla-core")


def chosen(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    """The names that have one of ``only`` in them; raises :class:`BenchError` where there is none."""
    found = [name for name in names if not only or any(part in name for part in only)]
    if not found:
        raise BenchError(detail=f"no case matches {', '.join(only or ())}; there are {', '.join(names)}")
    return found


def cuda_device(suite: str, least: int = 1) -> str:
    """The name of the device; raises :class:`BenchError` where there are not so many."""
    if torch.cuda.device_count() < least:
        raise BenchError(detail=f"the {suite} suite needs {'a CUDA device' if least == 1 else f'{least} CUDA devices'}")
    return torch.cuda.get_device_name(0)


def write(path: Path, suite: str, cases: Sequence[Figures], **about: Any) -> None:
    """All that is known so far, with the day, the commit and the versions it was measured with."""
    about |= {"date": date.today().isoformat(), "commit": _commit()}
    versions = {name: version_of(name) for name in _PACKAGES}
    write_whole(path, json.dumps({"suite": suite, **about, "versions": versions, "cases": cases}, indent=2) + "\n")


@functools.cache
def _commit() -> str | None:
    """Of the checkout this runs from; None where there is none, or no git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def aligned(rows: Rows) -> str:
    """A table whose first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]])


def markdown(rows: Rows) -> str:
    header, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *body)) + "\n"
