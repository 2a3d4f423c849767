"""Verdicts on disk: a function proven in one process is lifted in the next before anything unrolls.

One file a verdict, JSON below its hash, in Inductor's cache directory, under a key of the function's identity, the
call, the settings and our own source. Written atomically: processes may share the directory.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdacompile import compat
from kdacompile.store.disk import read_checked, write_checked


@dataclass(frozen=True)
class Verdict:
    """What came of a function: the text of its replacement, or the reason there is none."""

    function: str
    source: str
    text: str = ""
    reason: str = ""
    wrong_layout: bool = False
    """The reason is that batch and tokens were looked for in the wrong dimensions."""
    matches: tuple[dict[str, Any], ...] = ()
    lengths: tuple[int, ...] = ()
    max_error: float = 0.0
    modulus: int | None = None
    """The function takes only lengths divisible by it."""
    tokens: tuple[int, int] = (0, 1)
    """Where the length stands: (tensor, dimension)."""


def _path(key: str) -> Path:
    return Path(compat.inductor_cache_dir()) / "kdacompile" / "lifts" / f"{key}.json"


def has(key: str) -> bool:
    return compat.disk_caches() and os.path.exists(_path(key))  # False where the folder may not be read


def load(key: str) -> Verdict | None:
    """The verdict on disk. None if there is none, or if the file is not what was written, since the code in it would be
    run: it is proven again.
    """
    body = read_checked(_path(key)) if compat.disk_caches() else None
    if body is None:
        return None
    data = json.loads(body)
    for name in ("matches", "lengths", "tokens"):
        data[name] = tuple(data[name])
    return Verdict(**data)


def save(key: str, verdict: Verdict) -> None:
    if compat.disk_caches():
        write_checked(_path(key), json.dumps(asdict(verdict)))
