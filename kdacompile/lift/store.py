"""Verdicts on disk: a function proven in one process is lifted in the next before anything unrolls.

One file a verdict, JSON below its hash, in Inductor's cache directory, under a key of the function's identity, the
call, the settings and our own source. Written atomically: processes may share the directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdacompile import compat
from kdacompile.disk import write_whole

log = logging.getLogger(__name__)


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
    return compat.disk_caches() and _path(key).exists()


def load(key: str) -> Verdict | None:
    """The verdict on disk. None if there is none, or if the file is not what was written: it is proven again."""
    if not compat.disk_caches():
        return None
    try:
        text = _path(key).read_text()
    except (OSError, UnicodeDecodeError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("a verdict could not be read, its function is proven again: %s", error)
        return None
    digest, _, body = text.partition("\n")
    if digest != _digest(body):
        log.warning("%s is not as it was written, its function is proven again", _path(key))
        return None
    data = json.loads(body)
    for name in ("matches", "lengths", "tokens"):
        data[name] = tuple(data[name])
    return Verdict(**data)


def save(key: str, verdict: Verdict) -> None:
    if not compat.disk_caches():
        return
    body = json.dumps(asdict(verdict))
    try:
        write_whole(_path(key), f"{_digest(body)}\n{body}")
    except OSError:
        return  # a full or read-only disk: it only costs time


def _digest(body: str) -> str:
    """In front of the verdict: what a changed letter makes of the code in it would be run."""
    return hashlib.sha256(body.encode()).hexdigest()
